"""JAX's weak types: a Python number, or a value computed from such numbers alone, takes the type of its partner in an operation.

A captured program has explicit conversions, so inside of it weak types mean nothing. They matter at its boundary: for arguments,
since the function may convert them, and for results, since their user may. The gradient of an argument need not be as weakly typed
as the argument: the transpose of a product, or the backward rule of a `jax.custom_vjp`, returns what it computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

WITHOUT_WEAK_TYPE = "without_weak_type"


def is_weak(x: Any) -> bool:
    """Return whether a value or a type is weakly typed."""
    return bool(getattr(x if hasattr(x, "weak_type") else jax.typeof(x), "weak_type", False))


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Convert an abstract value to a `ShapeDtypeStruct`."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def changes_weak_type_alone(eqn: core.JaxprEqn) -> bool:
    """Return whether an equation converts a value to its own type."""
    if eqn.primitive.name == WITHOUT_WEAK_TYPE:
        return True
    if eqn.primitive.name != "convert_element_type" or eqn.params.get("sharding") is not None:
        return False
    before: Any = eqn.invars[0].aval
    return before.dtype == eqn.params["new_dtype"]


def with_weak_type(x: Any, weak: bool) -> Any:
    """Return an array with or without a weak type."""
    if is_weak(x) == weak:
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=x.dtype, weak_type=weak, sharding=None)


@dataclass(frozen=True, eq=False, repr=False)
class GradientTypes:
    """The weak types of a function's gradients, which are computed when a gradient is first needed.

    Attributes:
        compute: returns for every argument leaf whether its gradient is weakly typed.
    """

    compute: Callable[[], tuple[bool, ...]]

    @cached_property
    def weak(self) -> tuple[bool, ...]:
        """For every argument leaf, whether its gradient is weakly typed."""
        return self.compute()

    def __repr__(self) -> str:  # in printed programs, of which it is a parameter
        return type(self).__name__


_primitive = core.Primitive(WITHOUT_WEAK_TYPE)
_primitive.def_impl(lambda x, *, types, number: with_weak_type(x, False))
_primitive.def_abstract_eval(lambda x, *, types, number: x.update(weak_type=False))
mlir.register_lowering(_primitive, lambda context, x, *, types, number: [x])
batching.defvectorized(_primitive)
ad.deflinear2(_primitive, lambda cotangent, x, *, types, number: [with_weak_type(cotangent, types.weak[number])])


def without_weak_type(x: Any, types: GradientTypes, number: int) -> Any:
    """Return an argument leaf, by its number, without a weak type; its gradient gets the type that the function's own has.

    The transpose of JAX's conversion would make the gradient as weakly typed as the argument.
    """
    return _primitive.bind(x, types=types, number=number)
