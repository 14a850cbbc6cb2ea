"""Scans as the compiler sees them: a step that no loop runs is written out.

JAX writes out the steps of `lax.scan(..., unroll=n)` that do not fill a loop of at least two rounds, and XLA removes a loop of one
round. The compiler then drops parts of single steps that a loop would run, such as the gradient of the initial carry, or a last
carry that nothing reads. A captured program therefore has a loop where the compiled one has, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.extend.core import primitives

from unity.pcg.jaxprs.jaxprs import SCANNED, equations, with_equations, with_nested
from unity.pcg.jaxprs.loops import constants_and_carry
from unity.pcg.jaxprs.trace_contexts import without_mesh
from unity.pcg.jaxprs.weak_types import struct_of

LARGEST = 4096  # equations of written-out steps: a scan with more stays a loop, as planning so many operators takes minutes


def with_straight_scans(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Write out the steps that no loop runs, of every scan of a program and of its nested programs."""
    return with_equations(program, _straight)


def _straight(eqn: core.JaxprEqn) -> core.JaxprEqn:
    eqn = with_nested(eqn, _straight)
    looped = _looped_steps(eqn) if eqn.primitive.name in SCANNED else None
    if looped is None:
        return eqn
    with without_mesh():
        program = jax.make_jaxpr(_written_out(eqn, looped))(*(struct_of(v.aval) for v in eqn.invars))
    return eqn.replace(primitive=primitives.closed_call_p, params={"call_jaxpr": program}, effects=program.effects)


def _looped_steps(scan: core.JaxprEqn) -> int | None:
    """Return how many steps of a scan remain in a loop; None if all do, or the others are too many equations."""
    length = scan.params["length"]
    unroll = scan.params["unroll"] or max(length, 1)  # 0 writes out all steps
    looped = length // unroll * unroll if length >= 2 * unroll else 0
    written = (length - looped) * sum(1 for _ in equations(scan))
    return looped if looped < length and written <= LARGEST else None


def _written_out(scan: core.JaxprEqn, looped: int) -> Callable[..., Sequence[Any]]:
    """Return a scan as a function of its operands that runs a number of steps in a loop, then the others one by one."""
    params, (consts, carried) = scan.params, constants_and_carry(scan.params)
    step, reverse = core.jaxpr_as_fun(params["jaxpr"]), params["reverse"]
    sizes = [looped, *[1] * (params["length"] - looped)] if looped else [1] * params["length"]

    def run(*operands: Any) -> Sequence[Any]:
        constants, carry, stacks = operands[:consts], operands[consts : consts + carried], operands[consts + carried :]
        pieces = [lax.split(x, sizes[::-1] if reverse else sizes) for x in stacks]
        results = []
        for k in range(len(sizes)):
            xs = [parts[-1 - k if reverse else k] for parts in pieces]
            if looped and not k:
                out = scan.primitive.bind(*constants, *carry, *xs, **{**params, "length": looped})
                carry, ys = out[:carried], out[carried:]
            else:
                out = step(*constants, *carry, *(lax.squeeze(x, (0,)) for x in xs))
                carry, ys = out[:carried], [lax.expand_dims(y, (0,)) for y in out[carried:]]
            results.append(ys)
        ordered = results[::-1] if reverse else results
        return [*carry, *(jnp.concatenate(ys) for ys in zip(*ordered, strict=True))]

    return run
