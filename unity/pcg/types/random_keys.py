"""Types of random keys, and how a batch of keys draws."""

from __future__ import annotations

from typing import Any


def by_key(dtype: Any) -> bool:
    """Return whether each key of a batch draws as it does alone. Under `vmap`, other generators draw for all from the first."""
    return str(dtype) == "key<fry>"
