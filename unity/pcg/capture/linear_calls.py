"""Calls of functions with a transpose of their own (`jax.custom_derivatives.linear_call`), and what they are differentiated by.

Such a call is linear in its linear arguments, and JAX has no derivative in the others: an assertion without a message says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import jax
from jax.extend import core

from unity.base.errors import CaptureError
from unity.base.formatting import short
from unity.pcg.ir.nested_programs import bodies
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.jaxprs import floating
from unity.pcg.jaxprs.weak_types import struct_of

LINEAR_CALL = "linear_call"


def check_linear_calls(closed: core.ClosedJaxpr, body: Body, differentiated: Collection[int]) -> None:
    """Raise CaptureError, naming the user's line, if a linear call is differentiated by an argument in which it is not linear.

    Args:
        closed: the function's program.
        body: the same program as a body, which has the user's lines.
        differentiated: the arguments that are differentiated, by number.
    """
    lines = dict.fromkeys(_lines(body))
    active = [k for k in sorted(differentiated) if floating(closed.in_avals[k])]
    if not lines or not active:
        return
    program = core.jaxpr_as_fun(closed)

    def differentiate(*operands: Any) -> Any:
        def results(*chosen: Any) -> list[Any]:
            values = dict(enumerate(operands)) | dict(zip(active, chosen, strict=True))
            return [x for x in program(*values.values()) if floating(x)]

        return jax.vjp(results, *(operands[k] for k in active))[0]

    try:
        # a function may have no derivative for another reason, which JAX tells where one is taken
        with suppress(NotImplementedError, TypeError, ValueError):
            jax.eval_shape(differentiate, *map(struct_of, closed.in_avals))
    except AssertionError as error:
        where = " or ".join(lines)
        raise CaptureError(
            f"{where}: a jax.custom_derivatives.linear_call is differentiated by its residual arguments, in which JAX has no"
            " derivative: it is linear in its linear arguments alone.\n"
            "    Pass them through jax.lax.stop_gradient, or write a jax.custom_vjp. (docs: capture#derivative-rules)"
        ) from error


def _lines(body: Body) -> Iterator[str]:
    """Yield the user's line of each linear call in a program, in nested programs, too."""
    for e in body.equations:
        if e.name == LINEAR_CALL:
            yield short(e.source)
        for program in bodies(e):
            yield from _lines(program)
