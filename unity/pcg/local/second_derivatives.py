"""Second derivatives of calls with derivative rules.

A rule may call functions with rules of their own, often the one that it belongs to: `lambda x: (f(x), x)`. On pieces these are
replaced by their programs (`first_order`), so a second derivative is that of the program, and not by the called function's rule.
The two are equal if the rule is the program's derivative, and differ for a straight-through estimator, say. They are compared when
a second derivative is taken, which is seldom.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unity.base.errors import PlanError
from unity.pcg.jaxprs.jaxprs import callable_of, called
from unity.pcg.jaxprs.trace_contexts import in_new_thread, precision_of
from unity.pcg.operators.kernel_primitive import pulled
from unity.pcg.operators.kernel_trials import relative_difference, sample


def with_checked_derivative(values: Sequence[Any], calls: Sequence[core.JaxprEqn], place: str) -> list[Any]:
    """Return the values that a derivative rule reads, such that a second derivative, which differentiates them, checks the rule.

    Args:
        values: pieces on this device.
        calls: the calls with rules of their own in the rule.
        place: the line of the call that the rule belongs to.

    Raises:
        PlanError: when the values are differentiated, if a call's rule is not the derivative of its program.
    """
    if not calls:
        return list(values)

    @jax.custom_jvp
    def same(*values: Any) -> Any:
        return values

    @same.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        if not all(map(_has_true_rule, calls)):
            raise PlanError(
                f"{place}: a second derivative of a call whose derivative rule is, or calls a function with, a rule that is"
                " not the function's derivative (or fails on random numbers). A plan differentiates by that rule once.\n"
                "    Take second derivatives of the original function, or state in the rule what the called one does."
                " (docs: capture#derivative-rules)"
            )
        return primals, tangents

    return list(same(*values))


def without_derivative(values: Sequence[Any], place: str) -> list[Any]:
    """Return the values that a derivative rule reads, such that a second derivative, which differentiates them, is refused.

    A maximum over devices has no derivative, since ties across devices would be counted twice.

    Args:
        values: pieces on this device.
        place: the line of the call that the rule belongs to.

    Raises:
        PlanError: when the values are differentiated.
    """

    @jax.custom_jvp
    def same(*values: Any) -> Any:
        return values

    @same.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        raise PlanError(
            f"{place}: a second derivative of a call whose derivative rule takes a maximum over devices, which has no derivative.\n"
            "    Take second derivatives of the original function. (docs: capture#derivative-rules)"
        )

    return list(same(*values))


@lru_cache(maxsize=1024)
def _has_true_rule(call: core.JaxprEqn) -> bool:
    """Return whether the rule of a call and its program have the same derivative at random numbers; False if either has none.

    Numbers between 0 and 1 are tried, too, since a function may be defined for these alone.
    """
    return all(in_new_thread(partial(_agree, call, positive)) for positive in (False, True))


def _agree(call: core.JaxprEqn, positive: bool) -> bool:
    types: list[Any] = [v.aval for v in call.invars]
    results: list[Any] = [v.aval for v in call.outvars]
    with precision_of([*types, *results]):
        operands = [sample(k, t.shape, t.dtype, positive) for k, t in enumerate(types)]
        cotangents = [sample(k, t.shape, t.dtype) for k, t in enumerate(results) if jnp.issubdtype(t.dtype, jnp.inexact)]
        try:
            # The program first: a `while` loop has no reverse-mode derivative, and might not end at random numbers.
            plain, ruled = (
                jax.jit(lambda *x, function=function: pulled(function, *x)[1](cotangents))(*operands)
                for function in (core.jaxpr_as_fun(called(call.params)), callable_of(call))
            )
        except Exception:  # a rule may read values
            return False
    return all(map(_is_close, plain, ruled))


def _is_close(x: jax.Array, y: jax.Array) -> bool:
    """Return whether two gradients are equal within the rounding of their type, and NaN or infinite at the same places."""
    odd_x, odd_y = (np.where(np.isfinite(value), 0, value) for value in (x, y))
    finite_x, finite_y = (jnp.where(jnp.isfinite(value), value, 0) for value in (x, y))
    limit = sqrt(float(jnp.finfo(x.dtype).eps))
    return np.array_equal(odd_x, odd_y, equal_nan=True) and relative_difference(finite_x, finite_y) <= limit
