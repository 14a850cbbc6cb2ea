"""Second derivatives of calls with derivative rules.

A rule may call functions with rules of their own, often the one that it belongs to: `lambda x: (f(x), x)`. On pieces these are
replaced by their programs (`first_order`), so what differentiates the rule differentiates them without their rules. The values
are the same where those rules are derivatives, and others where they are not, as of a straight-through estimator. So each is
compared when a rule is differentiated, which is seldom.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unity.base.errors import PlanError
from unity.pcg.jaxprs.jaxprs import CUSTOM_JVP, callable_of, called, chosen_of, floating, merged
from unity.pcg.jaxprs.precision import precision_of
from unity.pcg.operators.kernel_trials import relative_difference


def once(values: Sequence[Any], calls: Sequence[core.JaxprEqn], place: str) -> list[Any]:
    """Return values that are differentiated only if the rules of some calls are derivatives.

    Args:
        values: what a derivative rule reads, on this device.
        calls: the calls with rules in it.
        place: the line of the call that the rule belongs to.
    Raises:
        PlanError: while the values are differentiated.
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
                f"{place}: a second derivative of a call whose derivative rule calls a function with a rule of its own, which is"
                " not the function's derivative (or fails on random numbers). A plan differentiates by that rule once.\n"
                "    Take second derivatives of the original function, or state in the rule what the called one does."
                " (docs: capture#derivative-rules)"
            )
        return primals, tangents

    return list(same(*values))


@lru_cache(maxsize=1024)
def _has_true_rule(call: core.JaxprEqn) -> bool:
    """Return whether the rule of a call and its program have the same derivative at random numbers; False if either has none."""
    with ThreadPoolExecutor(1) as thread:  # outside of the trace that asks
        return thread.submit(_agrees, call).result()


def _agrees(call: core.JaxprEqn) -> bool:
    types: list[Any] = [v.aval for v in call.invars]
    results: list[Any] = [v.aval for v in call.outvars]
    derivative = _pushed if call.primitive.name in CUSTOM_JVP else _pulled
    rng = np.random.default_rng(0)
    with precision_of([*types, *results]):
        operands, directions = ([_random(rng, t) for t in types] for _ in range(2))
        cotangents = [_random(rng, t) for t in results]
        try:
            ruled, plain = (
                derivative(function, operands, directions, cotangents)
                for function in (callable_of(call), core.jaxpr_as_fun(called(call.params)))
            )
        except Exception:  # a rule may read values, and a loop has no reverse-mode derivative but by a rule
            return False
    limits = (sqrt(float(jnp.finfo(x.dtype).eps)) for x in plain)
    return all(relative_difference(x, y) <= limit for x, y, limit in zip(plain, ruled, limits, strict=True))


def _random(rng: np.random.Generator, type_: Any) -> Any:
    """Return random numbers, or zeros in the place of what has no derivative."""
    if jnp.issubdtype(type_.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), type_.shape)
    return jnp.asarray(rng.normal(size=type_.shape) if floating(type_) else np.zeros(type_.shape), type_.dtype)


def _pushed(function: Any, operands: Sequence[Any], directions: Sequence[Any], _: Any) -> list[Any]:
    flags = tuple(map(floating, operands))
    others = chosen_of(flags, operands, False)
    run = jax.jit(lambda chosen: [x for x in function(*merged(flags, chosen, others)) if floating(x)])
    return jax.jvp(run, (chosen_of(flags, operands),), (chosen_of(flags, directions),))[1]


def _pulled(function: Any, operands: Sequence[Any], _: Any, cotangents: Sequence[Any]) -> list[Any]:
    flags = tuple(map(floating, operands))
    others = chosen_of(flags, operands, False)
    run = jax.jit(lambda chosen: [x for x in function(*merged(flags, chosen, others)) if floating(x)])
    return jax.vjp(run, chosen_of(flags, operands))[1]([c for c in cotangents if floating(c)])[0]
