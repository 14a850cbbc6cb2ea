"""Weak types, as JAX has them: a Python number takes the type of what it is combined with, and so does what is made of such alone.

A program has every conversion written out, so inside of it weak types say nothing. They matter at its ends: of an argument, for
what the function converts, and of a result, for what its reader converts.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend import core


def is_weak(x: Any) -> bool:
    """Whether a value, or a type, is weakly typed."""
    return bool(getattr(x if hasattr(x, "weak_type") else jax.typeof(x), "weak_type", False))


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape and type of a value that is described by an abstract one."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def changes_weak_type_alone(eqn: core.JaxprEqn) -> bool:
    """Whether an equation converts a value to the type that it has."""
    if eqn.primitive.name != "convert_element_type" or eqn.params.get("sharding") is not None:
        return False
    before: Any = eqn.invars[0].aval
    return before.dtype == eqn.params["new_dtype"]


def with_weak_type(x: Any, weak: bool) -> Any:
    """Returns the same array, weakly typed or not."""
    if is_weak(x) == weak:
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak, sharding=None)
