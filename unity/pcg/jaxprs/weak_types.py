"""JAX's weak types: a Python number, or a value computed from such numbers alone, takes the type of its partner in an operation.

A captured program has explicit conversions, so inside of it weak types mean nothing. They matter at its boundary: for arguments,
since the function may convert them, and for results, since their user may.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend import core


def is_weak(x: Any) -> bool:
    """Return whether a value or a type is weakly typed."""
    return bool(getattr(x if hasattr(x, "weak_type") else jax.typeof(x), "weak_type", False))


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Convert an abstract value to a `ShapeDtypeStruct`."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def changes_weak_type_alone(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation converts a value to its own type."""
    if eqn.primitive.name != "convert_element_type" or eqn.params.get("sharding") is not None:
        return False
    before: Any = eqn.invars[0].aval
    return before.dtype == eqn.params["new_dtype"]


def with_weak_type(x: Any, weak: bool) -> Any:
    """Return an array with or without a weak type."""
    if is_weak(x) == weak:
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak, sharding=None)
