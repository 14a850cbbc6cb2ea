"""The parts of a scan's operands, which JAX 0.10 gives as two numbers, and later versions as a tree for each part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def constants_and_carry(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of a scan's constants and of its carried operands, from its parameters. The others are scanned over."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)
