"""A pipeline as it runs: every device is one stage, and all stages work on different micro-batches at the same time.

Samples stay where they are until they are wanted. A device keeps its own micro-batches in a row of places; stage 0 takes one of
its own in every tick, and then everyone hands what lies in that place to the stage before, so that when stage 0 comes to the place
again, the next device's lies there. What leaves the last stage goes the same way back. With S stages and m places on each device,
micro-batch r m + q starts in place q of device r, is taken by stage 0 in tick r m + q, and leaves the last stage S - 1 ticks later.

The gradient of all this, which JAX derives, is the same pipeline backwards: GPipe. A stage without work does none (`guarded`), so
that nothing is computed from what is no sample. 1F1B is in `unity.exec.pipelines.one_forward_one_backward`; where no gradient is
wanted it is this, too, and every device computes the tail of its own samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from unity.exec.pipelines.guarded import guarded
from unity.pcg.ir.graph import Node
from unity.pcg.local import varying_loops as loops
from unity.pcg.parallel.stages import ends_of, entering, leaving, names_of, schedule_of

Arrays = tuple[Any, ...]
Step = Callable[..., Sequence[Any]]  # of constants, what is read, what is carried and one step's weights: what is carried on


def parts_of(node: Node, operands: Sequence[Any]) -> tuple[Arrays, Arrays, Arrays, Arrays]:
    """The operands of a pipeline, or a tail: constants, what is read, what is carried, what is taken in steps."""
    ends = ends_of(node)
    constants, read, carried, weights = (
        tuple(operands[p] for p in found) for found in (ends.constants, ends.read, ends.carried, ends.stepped)
    )
    return constants, read, carried, weights


def stage_of(node: Node, step: Step) -> Callable[[Arrays, Arrays, Arrays], Arrays]:
    """One stage's work on a micro-batch: of what has samples, constants and `own_of` the stage's weights. What is only read is
    handed on."""
    ends, schedule = ends_of(node), schedule_of(node)
    if schedule.slots == 1:
        return lambda parts, constants, weights: (*parts[: len(ends.read)], *step(*constants, *parts, *weights))

    def stage(parts: Arrays, constants: Arrays, weights: Arrays) -> Arrays:
        seen = parts[: len(ends.read)]

        def one(carry: Arrays, own: Sequence[Any]) -> tuple[Arrays, None]:
            return tuple(step(*constants, *seen, *carry, *own)), None

        return (*seen, *loops.scan(one, parts[len(seen) :], weights, schedule.slots, unroll=node.attributes["unroll"])[0])

    return stage


def own_of(node: Node, weights: Arrays) -> Arrays:
    """A stage's weights: for all of its steps, stacked; of an only one as it finds them, so that nothing is taken out in every
    tick."""
    return tuple(x.reshape(x.shape[1:]) for x in weights) if schedule_of(node).slots == 1 else weights


def pipelined(node: Node, operands: Sequence[Any], step: Step) -> list[Any]:
    """The results of a pipeline on one device's pieces; called inside `shard_map`, with a step's local program."""
    constants, read, carried, weights = parts_of(node, operands)
    stage, own = stage_of(node, step), own_of(node, weights)

    def run(works: jax.Array, parts: Arrays) -> Arrays:
        return guarded(stage, works, parts, constants, own)

    return list(_ticks((*read, *carried), run, node))[len(read) :]


def summed(node: Node, operands: Sequence[Any], step: Step) -> list[Any]:
    """The results of a tail where its pipeline is done: every device adds up its own micro-batches."""
    constants, read, arrived, _ = parts_of(node, operands)
    found = lax.scan(lambda _, parts: (None, tuple(step(*constants, *parts))), None, (*read, *arrived))[1]
    return [x.sum(0, dtype=x.dtype) for x in found]


def shifted(xs: Sequence[Any], names: tuple[str, ...], pairs: list[tuple[int, int]]) -> Arrays:
    """Pieces sent from device to device, in pairs of numbers along these axes."""
    return tuple(lax.ppermute(x, names, pairs) for x in xs)


def _ticks(places: Arrays, stage: Callable[[jax.Array, Arrays], Arrays], node: Node) -> Arrays:
    """All that has samples, when all is done: zeros for what does not come back. `places`: the same before."""
    schedule, names, start = schedule_of(node).flushed, names_of(node), ends_of(node).sampled.start
    me, last, rows = lax.axis_index(names), schedule.stages - 1, schedule.micro_batches // schedule.stages
    onward, back = [(k, k + 1) for k in range(last)], [(k + 1, k) for k in range(last)]
    ins, outs = (sorted(p - start for p in positions) for positions in (entering(node), leaving(node)))

    def tick(state: tuple[Any, Any, Any], t: jax.Array) -> tuple[tuple[Any, Any, Any], None]:
        arrived, waiting, done = state
        wanted, free = t % rows, (t - last) % rows
        own = taken(waiting, wanted)
        begun = dict(zip(ins, own, strict=True))
        begin = tuple(jnp.where(me == 0, begun[k], x) if k in begun else x for k, x in enumerate(arrived))
        found = stage((t >= me) & (t < me + schedule.micro_batches), begin)
        waiting = put(waiting, shifted(own, names, back), wanted)
        passing = shifted(taken(done, free), names, back)
        left = tuple(jnp.where(me == last, found[k], x) for k, x in zip(outs, passing, strict=True))
        return (shifted(found, names, onward), waiting, put(done, left, free)), None

    nothing = tuple(jnp.zeros_like(x) for x in places)
    state = (taken(nothing, jnp.asarray(0)), tuple(places[k] for k in ins), tuple(nothing[k] for k in outs))
    (_, _, done), _ = loops.scan(tick, state, jnp.arange(schedule.ticks))
    ended = dict(zip(outs, done, strict=True))
    return tuple(ended.get(k, x) for k, x in enumerate(nothing))


def taken(rows: Sequence[Any], place: jax.Array) -> Arrays:
    """What lies in one place of each row."""
    return tuple(lax.dynamic_index_in_dim(x, place, keepdims=False) for x in rows)


def put(rows: Sequence[Any], parts: Sequence[Any], place: jax.Array) -> Arrays:
    """The rows with these parts in one place."""
    return tuple(lax.dynamic_update_index_in_dim(x, part, place, 0) for x, part in zip(rows, parts, strict=True))
