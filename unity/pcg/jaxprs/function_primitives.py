"""Functions that JAX keeps as one primitive, with an object among its parameters that says which (`jax.experimental.hijax`).

Since JAX 0.12 `jnp.searchsorted`, `jnp.nonzero`, `lax.custom_root` and others are such ones, and packages may make theirs. A
program has in their place what they compute (`pcg/foreign.py`). Some work element by element, and their derivatives are
themselves again: these stay, and have a name each, under which the operator table knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

HELD = "call_hi_primitive"
NAMES = {"Frexp": "frexp", "Ldexp": "ldexp"}  # JAX's classes of those that stay


def name_of(primitive: str, params: Mapping[str, Any]) -> str:
    """The name of a primitive, or of the function that it holds."""
    if primitive != HELD:
        return primitive
    kind = type(params["_prim"])
    return NAMES.get(kind.__name__, HELD) if kind.__module__.startswith("jax.") else HELD


def function_of(params: Mapping[str, Any]) -> Callable[..., list]:
    """What is held, as a function of all operands in terms of what JAX has no objects for."""
    held = params["_prim"]
    return lambda *operands: list(held.out_tree.flatten_up_to(held.expand(*held.in_tree.unflatten(operands))))
