"""Programs of functions that the library writes itself, whatever mesh and precision the user has set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import jax
from jax import lax
from jax.extend import core

from unity.pcg.ir.program import Body, Equation, close
from unity.pcg.jaxprs.trace_contexts import precision_of, without_mesh


def trace(function: Callable[..., Any], operands: Iterable[jax.ShapeDtypeStruct], types: Iterable[Any] = ()) -> Body:
    """Return the program of a function of arrays.

    Args:
        function: a JAX function.
        operands: the types of its arguments.
        types: types that it computes with beside those. If any type has 64 bits, such types are enabled, which JAX truncates else.
    """
    structs = list(operands)
    with without_mesh(), precision_of([*structs, *types]):
        return close(jax.make_jaxpr(function)(*structs))


def stop_gradient(operand: int, result: int, line: str) -> Equation:
    """Return the equation of a `stop_gradient`, for the user's line."""
    return Equation(_stop_gradient(), {}, (operand,), (result,), line)


@cache
def _stop_gradient() -> core.Primitive:
    return jax.make_jaxpr(lax.stop_gradient)(0.0).eqns[0].primitive
