"""1F1B as it runs: a pipeline and its tail in one loop (`unity.exec.pipelines.half_ticks`), which fills and drains in every
step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from unity.exec.pipelines.gpipe import Arrays, pipelined, summed
from unity.exec.pipelines.half_ticks import Loop, Pair, batch_of
from unity.pcg.parallel.stages import schedule_of
from unity.pcg.types.varying_axes import vary, varying


def alternated(pair: Pair, operands: Sequence[Any]) -> list[Any]:
    """The results of the tail of a pipeline; called inside `shard_map`, with one device's pieces of the operands of the pair."""
    n, schedule = len(pair.pipeline.operands), schedule_of(pair.pipeline).flushed
    real = [k for k, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]
    others = {k: x for k, x in enumerate(operands) if k not in real}

    def whole(values: Sequence[Any], rest: dict[int, Any]) -> list[Any]:
        found = rest | dict(zip(real, values, strict=True))
        return [found[k] for k in range(len(operands))]

    @jax.custom_vjp
    def call(values: Sequence[Any], rest: dict[int, Any]) -> Arrays:
        given = whole(values, rest)
        return tuple(summed(pair.tail, [*given[n:], *pipelined(pair.pipeline, given[:n], pair.step)], pair.end))

    def forward(values: Sequence[Any], rest: dict[int, Any]) -> tuple[Arrays, list[Any]]:
        given = whole([x.value for x in values], {k: x.value for k, x in rest.items()})
        wanted = {k for k, x in zip(real, values, strict=True) if x.perturbed}
        loop = Loop(pair, ((0, batch_of(pair, given)),), schedule, *pair.moving(frozenset(wanted)))
        (sums,) = loop.run(schedule.turns).sums
        found = loop.gradients(sums)
        return sums.results, [found.get(k) for k in real]

    def backward(found: list[Any], cotangents: Arrays) -> tuple[list[Any], None]:
        return scaled(found, cotangents[pair.loss], pair.repeated), None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return list(call([operands[k] for k in real], others))


def scaled(found: Sequence[Any], by: Any, over: tuple[str, ...]) -> list[Any]:
    """Gradients (None: not wanted) times a number, which is a partial sum along the axes `over`. JAX may take it to differ where it
    is the same on all devices: along axes on which some gradient is known to be the same, one device's is taken."""
    if isinstance(by, SymbolicZero):
        return [None] * len(found)
    alike = sorted({name for g in found if g is not None for name in varying(by) - varying(g)}.difference(over))
    if alike:
        first = sum(lax.axis_index(name) for name in alike) == 0
        by = jnp.where(first, by, 0)
    if alike or over:
        by = lax.psum(by, (*alike, *over))
    return [None if g is None else g * vary(by, varying(g)).astype(g.dtype) for g in found]
