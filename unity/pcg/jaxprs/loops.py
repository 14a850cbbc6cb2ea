"""Loops of jaxprs: a scan's operands, and equal programs of scans without steps and of `while` loops with several predicates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core


def constants_and_carry(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of a scan's constants and of its carried operands, from its parameters. The others are scanned over.

    JAX 0.10 gives them as two numbers, later versions as a tree for each part.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carry, _ = params["ft_in"].unpack()
    return len(constants), len(carry)


def predicates(eqn: core.JaxprEqn) -> int:
    """Return the rank of the predicate of a `while` loop, 0 for any other equation."""
    return eqn.params["cond_jaxpr"].jaxpr.outvars[0].aval.ndim if eqn.primitive.name == "while" else 0


def equal_program(eqn: core.JaxprEqn) -> Callable[..., Sequence[Any]] | None:
    """Return the function to capture in the place of an equation; None if the equation is captured unchanged.

    A `while` loop under `vmap` gets one predicate for all elements (`with_one_predicate`), and a scan of no steps disappears.
    """
    if predicates(eqn):
        return with_one_predicate(eqn)
    stacked = eqn.outvars[constants_and_carry(eqn.params)[1] :] if eqn.primitive.name == "scan" else []
    if eqn.primitive.name != "scan" or eqn.params["length"] or any(_is_key(v.aval) for v in stacked):
        return None
    return without_steps(eqn)


def _is_key(aval: Any) -> bool:
    """Return whether the elements of an array are keys of random numbers, a type without zeros."""
    return jnp.issubdtype(aval.dtype, jax.dtypes.extended)


def without_steps(eqn: core.JaxprEqn) -> Callable[..., Sequence[Any]]:
    """Return a function that computes a scan of no steps: its carries unchanged, and empty stacks."""
    constants, carry = constants_and_carry(eqn.params)
    avals: list[Any] = [v.aval for v in eqn.outvars[carry:]]
    return lambda *operands: [*operands[constants : constants + carry], *(jnp.zeros(a.shape, a.dtype) for a in avals)]


def with_one_predicate(eqn: core.JaxprEqn) -> Callable[..., Sequence[Any]]:
    """Return a loop with a single predicate: it continues while any element does, and leaves finished elements unchanged.

    `propagation.row_loops` recognizes it.
    """
    params, rank = eqn.params, predicates(eqn)
    test, step = core.jaxpr_as_fun(params["cond_jaxpr"]), core.jaxpr_as_fun(params["body_jaxpr"])
    a, b = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def run(*operands: Any) -> Sequence[Any]:
        def more(carry: Sequence[Any]) -> Any:
            return test(*operands[:a], *carry)[0]

        def again(state: Sequence[Any]) -> Sequence[Any]:
            going, *carry = state
            spread = [lax.broadcast_in_dim(going, x.shape, range(rank)) for x in carry]
            new = [lax.select(s, n, x) for s, n, x in zip(spread, step(*operands[a:b], *carry), carry, strict=True)]
            return [lax.bitwise_and(going, more(new)), *new]

        first = [more(operands[b:]), *operands[b:]]
        return lax.while_loop(lambda state: lax.reduce_or(state[0], range(rank)), again, first)[1:]

    return run
