"""How a scan's operands are divided, which JAX 0.10 says by two numbers, and later versions by a tree of each part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def constants_and_carry(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried from step to step; the others are taken in steps."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)
