"""Loops whose elements each have a predicate, which `vmap` makes, as loops with one, which is all that may be written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend import core


def predicates(eqn: core.JaxprEqn) -> int:
    """How many dimensions the predicate of a `while` loop has; 0 for any other equation."""
    return eqn.params["cond_jaxpr"].jaxpr.outvars[0].aval.ndim if eqn.primitive.name == "while" else 0


def with_one_predicate(eqn: core.JaxprEqn) -> Callable[..., Sequence[Any]]:
    """A loop as JAX lowers it: it goes on as long as any element does, and an element that is done stays as it is."""
    params, rank = eqn.params, predicates(eqn)
    test, step = core.jaxpr_as_fun(params["cond_jaxpr"]), core.jaxpr_as_fun(params["body_jaxpr"])
    a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def run(*operands: Any) -> Sequence[Any]:
        def going(carry: Sequence[Any]) -> Any:
            return test(*operands[:a], *carry)[0]

        def again(carry: Sequence[Any]) -> Sequence[Any]:
            still, new = going(carry), step(*operands[a:b], *carry)
            spread = [lax.broadcast_in_dim(still, x.shape, range(rank)) for x in carry]
            return [lax.select(s, n, x) for s, n, x in zip(spread, new, carry, strict=True)]

        return lax.while_loop(lambda carry: lax.reduce_or(going(carry), range(rank)), again, list(operands[b:]))

    return run
