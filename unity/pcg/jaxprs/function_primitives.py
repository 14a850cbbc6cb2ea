"""Functions that JAX represents as one primitive, with an object among its parameters (`jax.experimental.hijax`).

Since JAX 0.12 these are `jnp.searchsorted`, `jnp.nonzero`, `lax.custom_root` and others, and packages may define more. They are
replaced by their programs (`foreign_primitives`). A few are elementwise, with derivatives made of themselves: these stay, under
names of the operator table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

HELD = "call_hi_primitive"
NAMES = {"Frexp": "frexp", "Ldexp": "ldexp"}  # JAX's classes of the functions that stay


def name_of(primitive: str, params: Mapping[str, Any]) -> str:
    """Return the name of a primitive, or of the function that it represents."""
    if primitive != HELD:
        return primitive
    kind = type(params["_prim"])
    return NAMES.get(kind.__name__, HELD) if kind.__module__.startswith("jax.") else HELD


def function_of(params: Mapping[str, Any]) -> Callable[..., list]:
    """Return the represented function, of flat operands, in ordinary primitives."""
    held = params["_prim"]
    return lambda *operands: list(held.out_tree.flatten_up_to(held.expand(*held.in_tree.unflatten(operands))))
