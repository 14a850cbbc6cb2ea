"""1F1B: a pipeline and its tail in one loop (`unity.exec.pipelines.half_ticks`) that fills and drains in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from unity.base.errors import OptionError
from unity.exec.pipelines.gpipe import Arrays, pipelined, summed
from unity.exec.pipelines.half_ticks import HalfTickLoop, PipelinePair, batch_of
from unity.exec.saved_gradients import in_order, restored, restored_flags, saved, saved_flags
from unity.pcg.parallel.stages import schedule_of
from unity.pcg.types.varying_axes import vary, varying

FURTHER = (
    "expected gradients of the plan's first result alone, since a pipeline by 1F1B computes the loss's gradients only, but another"
    " result is differentiated, too.\n    Return the sum of what is differentiated as the first result, or plan with"
    " pipeline=unity.PipelineShape(..., schedule='gpipe') or pipelines=False. (docs: pipelines#schedules)"
)


def alternated(pair: PipelinePair, operands: Sequence[Any]) -> list[Any]:
    """Run a pipeline with its tail by 1F1B, inside of `shard_map`, and return the tail's results.

    `operands` are one device's pieces of the pair's operands.
    """
    n, schedule = len(pair.pipeline.operands), schedule_of(pair.pipeline).flushed
    real = [k for k, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]
    others = {k: x for k, x in enumerate(operands) if k not in real}

    @jax.custom_vjp
    def call(values: Sequence[Any], rest: dict[int, Any]) -> Arrays:
        leaves = in_order(real, values, rest)
        return tuple(summed(pair.tail, [*leaves[n:], *pipelined(pair.pipeline, leaves[:n], pair.step)], pair.end))

    def forward(values: Sequence[Any], rest: dict[int, Any]) -> tuple[Arrays, tuple[list[Any], list[Any]]]:
        leaves = in_order(real, [x.value for x in values], {k: x.value for k, x in rest.items()})
        active = {k for k, x in zip(real, values, strict=True) if x.perturbed}
        loop = HalfTickLoop(pair, ((0, batch_of(pair, leaves)),), schedule, pair.active(frozenset(active)))
        (sums,) = loop.run(schedule.loop_ticks).sums
        gradients = loop.gradients(sums)
        auxiliary = [k in loop.active.results and k != pair.loss for k in range(len(pair.tail.tensors))]
        return loop.sums_of_results(sums), (saved(gradients, real), saved_flags(auxiliary))

    def backward(residuals: tuple[list[Any], list[Any]], cotangents: Arrays) -> tuple[list[Any], None]:
        gradients, auxiliary = residuals
        if any(flag and not isinstance(x, SymbolicZero) for flag, x in zip(restored_flags(auxiliary), cotangents, strict=True)):
            raise OptionError(FURTHER)
        each = scaled(restored(gradients), cotangents[pair.loss], pair.replicated_axes)
        return [None if g is None else g.astype(operands[k].dtype) for k, g in zip(real, each, strict=True)], None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return list(call([operands[k] for k in real], others))


def scaled(gradients: Sequence[Any], by: Any, over: tuple[str, ...]) -> list[Any]:
    """Multiply gradients by a number, which is a partial sum along the axes `over`. None stays None.

    JAX may take the number to vary along axes where it is equal on all devices. Along those where a gradient does not vary, the
    number of one device is used.
    """
    if isinstance(by, SymbolicZero):
        return [None] * len(gradients)
    alike = sorted({name for g in gradients if g is not None for name in varying(by) - varying(g)}.difference(over))
    if alike:
        first = sum(lax.axis_index(name) for name in alike) == 0
        by = jnp.where(first, by, 0)
    if alike or over:
        by = lax.psum(by, (*alike, *over))
    return [None if g is None else g * vary(by, varying(g)).astype(g.dtype) for g in gradients]
