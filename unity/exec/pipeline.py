"""A pipeline as it runs: every device is one stage, and all stages work on different micro-batches at the same time.

Samples stay where they are until they are wanted. A device keeps its own micro-batches in a row of places; stage 0 takes one of
its own in every tick, and then everyone hands what lies in that place to the stage before, so that when stage 0 comes to the place
again, the next device's lies there. What leaves the last stage goes the same way back. With S stages and m places on each device,
micro-batch r m + q starts in place q of device r, is taken by stage 0 in tick r m + q, and leaves the last stage S - 1 ticks later.

The gradient of all this, which JAX derives, is the same pipeline backwards: GPipe. A stage without work does none (`guarded`), so
that nothing is computed from what is no sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from unity.exec.guarded import guarded
from unity.pcg.graph import Node
from unity.pcg.stages import Schedule, ends_of, names_of, schedule_of

Arrays = tuple[Any, ...]
Step = Callable[..., Sequence[Any]]  # of constants, what is read, what is carried and one step's weights: what is carried on


def pipelined(node: Node, operands: Sequence[Any], step: Step) -> list[Any]:
    """The results of a pipeline on one device's pieces; called inside `shard_map`, with a step's local program."""
    ends, schedule = ends_of(node), schedule_of(node)
    constants, read, carried, weights = (
        tuple(operands[p] for p in found) for found in (ends.constants, ends.read, ends.carried, ends.stepped)
    )

    def stage(parts: Arrays, constants: Arrays, weights: Arrays) -> Arrays:
        seen = parts[: len(read)]

        def one(carry: Arrays, own: Sequence[Any]) -> tuple[Arrays, None]:
            return tuple(step(*constants, *seen, *carry, *own)), None

        length = schedule.steps // schedule.stages
        return (*seen, *lax.scan(one, parts[len(read) :], weights, length, unroll=node.attributes["unroll"])[0])

    def run(works: jax.Array, parts: Arrays) -> Arrays:
        return guarded(stage, works, parts, constants, weights)

    return list(_ticks((*read, *carried), len(read), run, schedule, names_of(node)))


def _ticks(
    places: Arrays, read: int, stage: Callable[[jax.Array, Arrays], Arrays], schedule: Schedule, names: tuple[str, ...]
) -> Arrays:
    """What is carried, when all is done. `places`: of all that has samples, first what is only read, which does not come back."""
    me, last, rows = lax.axis_index(names), schedule.stages - 1, schedule.micro_batches // schedule.stages
    onward = [(k, k + 1) for k in range(last)]
    back = [(k + 1, k) for k in range(last)]

    def moved(xs: Sequence[Any], pairs: list[tuple[int, int]]) -> Arrays:
        return tuple(lax.ppermute(x, names, pairs) for x in xs)

    def tick(state: tuple[Any, Any, Any], t: jax.Array) -> tuple[tuple[Any, Any, Any], None]:
        arrived, waiting, done = state
        wanted, free = t % rows, (t - last) % rows
        own = _taken(waiting, wanted)
        start = tuple(jnp.where(me == 0, a, b) for a, b in zip(own, arrived, strict=True))
        found = stage((t >= me) & (t < me + schedule.micro_batches), start)
        waiting = _put(waiting, moved(own, back), wanted)
        passing = moved(_taken(done, free), back)
        left = tuple(jnp.where(me == last, a, b) for a, b in zip(found[read:], passing, strict=True))
        return (moved(found, onward), waiting, _put(done, left, free)), None

    nothing = tuple(jnp.zeros_like(x) for x in places)
    state = (_taken(nothing, jnp.asarray(0)), places, nothing[read:])
    (_, _, done), _ = lax.scan(tick, state, jnp.arange(schedule.ticks))
    return done


def _taken(rows: Sequence[Any], place: jax.Array) -> Arrays:
    return tuple(lax.dynamic_index_in_dim(x, place, keepdims=False) for x in rows)


def _put(rows: Sequence[Any], parts: Sequence[Any], place: jax.Array) -> Arrays:
    return tuple(lax.dynamic_update_index_in_dim(x, part, place, 0) for x, part in zip(rows, parts, strict=True))
