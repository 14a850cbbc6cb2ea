"""GPipe's schedule: every device is one stage, and all stages work on different micro-batches at the same time.

Every device stores its own micro-batches in a row of slots. In each tick stage 0 takes a micro-batch from one slot of its row, and
then every device sends the content of that slot to the stage before, so that stage 0 finds the next device's micro-batch when it
comes to the slot again. Results of the last stage return the same way. With S stages and m slots on each device, micro-batch
r m + q starts in slot q of device r, enters stage 0 in tick r m + q, and leaves the last stage S - 1 ticks later.

JAX derives the gradient, which is the same pipeline in reverse. A stage without a micro-batch computes nothing (`guarded`).
Without gradients 1F1B (`unity.exec.pipelines.one_forward_one_backward`) is this schedule, too, and every device runs the tail
for the samples that it stores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from unity.exec.pipelines.guarded import guarded
from unity.pcg.ir.graph import Node, reserved_axes
from unity.pcg.ir.payloads import Pipeline
from unity.pcg.local import varying_loops as loops
from unity.pcg.parallel.stages import ends_of, entering, leaving, schedule_of
from unity.pcg.types.accumulation import accumulator

Arrays = tuple[Any, ...]
Step = Callable[..., Sequence[Any]]  # from constants, read-only samples, carries and one step's weights to the new carries


def parts_of(node: Node, operands: Sequence[Any]) -> tuple[Arrays, Arrays, Arrays, Arrays]:
    """Return the operands of a pipeline or tail: constants, read-only samples, carries, and weights stacked by step."""
    ends = ends_of(node)
    constants, read, carried, weights = (
        tuple(operands[p] for p in positions) for positions in (ends.constants, ends.read, ends.carried, ends.stepped)
    )
    return constants, read, carried, weights


def stage_of(node: Node, step: Step) -> Callable[[Arrays, Arrays, Arrays], Arrays]:
    """Return one stage's program for a micro-batch, a function of samples, constants and `own_of` the stage's weights.

    Read-only samples are forwarded to the next stage.
    """
    ends, schedule = ends_of(node), schedule_of(node)
    if schedule.slots == 1:
        return lambda parts, constants, weights: (*parts[: len(ends.read)], *step(*constants, *parts, *weights))

    def stage(parts: Arrays, constants: Arrays, weights: Arrays) -> Arrays:
        read_only = parts[: len(ends.read)]

        def one(carry: Arrays, own: Sequence[Any]) -> tuple[Arrays, None]:
            return tuple(step(*constants, *read_only, *carry, *own)), None

        return (*read_only, *loops.scan(one, parts[len(read_only) :], weights, schedule.slots, unroll=node.of(Pipeline).unroll)[0])

    return stage


def own_of(node: Node, weights: Arrays) -> Arrays:
    """Return a stage's weights, stacked by step, or without that dimension if there is one step, so that no tick slices them."""
    return tuple(x.reshape(x.shape[1:]) for x in weights) if schedule_of(node).slots == 1 else weights


def pipelined(node: Node, operands: Sequence[Any], step: Step) -> list[Any]:
    """Run a pipeline on one device's pieces, inside of `shard_map`. `step` is the local program of one step."""
    constants, read, carried, weights = parts_of(node, operands)
    stage, own = stage_of(node, step), own_of(node, weights)
    wide, wide_own = _widened(constants), _widened(own)

    def run(works: jax.Array, parts: Arrays) -> Arrays:
        return guarded(stage, works, parts, _narrowed(wide, constants), _narrowed(wide_own, own))

    return list(_ticks((*read, *carried), run, node))[len(read) :]


def summed(node: Node, operands: Sequence[Any], step: Step) -> list[Any]:
    """Run a tail after its pipeline: every device adds up its own micro-batches."""
    constants, read, arrived, _ = parts_of(node, operands)
    wide = _widened(constants)

    def one(_: None, parts: Sequence[Any]) -> tuple[None, Arrays]:
        return None, tuple(step(*_narrowed(wide, constants), *parts))

    results = lax.scan(one, None, (*read, *arrived))[1]
    return [x.astype(accumulator(x.dtype)).sum(0, dtype=accumulator(x.dtype)).astype(x.dtype) for x in results]


def _widened(xs: Arrays) -> Arrays:
    """Convert operands of a loop to their accumulation types: JAX adds up gradients of all ticks in the type of the operand."""
    return tuple(x.astype(accumulator(x.dtype)) for x in xs)


def _narrowed(wide: Arrays, xs: Arrays) -> Arrays:
    """Convert widened operands back to the types of the operands `xs`, inside of the loop."""
    return tuple(x.astype(y.dtype) for x, y in zip(wide, xs, strict=True))


def shifted(xs: Sequence[Any], names: tuple[str, ...], pairs: list[tuple[int, int]]) -> Arrays:
    """Send arrays between the pairs of devices, numbered along the axes `names`."""
    return tuple(lax.ppermute(x, names, pairs) for x in xs)


def _ticks(places: Arrays, stage: Callable[[jax.Array, Arrays], Arrays], node: Node) -> Arrays:
    """Run all ticks on rows of samples, and return the rows after them, with zeros for those that do not return."""
    schedule, names, start = schedule_of(node).flushed, reserved_axes(node), ends_of(node).sampled.start
    me, last, rows = lax.axis_index(names), schedule.stages - 1, schedule.micro_batches // schedule.stages
    onward, back = [(k, k + 1) for k in range(last)], [(k + 1, k) for k in range(last)]
    ins, outs = (sorted(p - start for p in positions) for positions in (entering(node), leaving(node)))
    inactive = {p - start for p in node.of(Pipeline).inactive or ()}

    def without_gradients(xs: Arrays) -> Arrays:
        """Stop the gradients that are zero: in JAX's derivative of a tick, all that a stage reads has a gradient that is sent."""
        return tuple(lax.stop_gradient(x) if k in inactive else x for k, x in enumerate(xs))

    def tick(state: tuple[Any, Any, Any], t: jax.Array) -> tuple[tuple[Any, Any, Any], None]:
        arrived, waiting, done = state
        slot, vacant = t % rows, (t - last) % rows
        own = taken(waiting, slot)
        begun = dict(zip(ins, own, strict=True))
        begin = tuple(jnp.where(me == 0, begun[k], x) if k in begun else x for k, x in enumerate(arrived))
        results = without_gradients(stage((t >= me) & (t < me + schedule.micro_batches), begin))
        waiting = put(waiting, shifted(own, names, back), slot)
        passing = shifted(taken(done, vacant), names, back)
        left = tuple(jnp.where(me == last, results[k], x) for k, x in zip(outs, passing, strict=True))
        return (shifted(results, names, onward), waiting, put(done, left, vacant)), None

    places = without_gradients(places)
    nothing = tuple(jnp.zeros_like(x) for x in places)
    state = (taken(nothing, jnp.asarray(0)), tuple(places[k] for k in ins), tuple(nothing[k] for k in outs))
    (_, _, done), _ = loops.scan(tick, state, jnp.arange(schedule.ticks))
    returned = dict(zip(outs, done, strict=True))
    return tuple(returned.get(k, x) for k, x in enumerate(nothing))


def taken(rows: Sequence[Any], place: jax.Array) -> Arrays:
    """Return the content of one slot of each row."""
    return tuple(lax.dynamic_index_in_dim(x, place, keepdims=False) for x in rows)


def put(rows: Sequence[Any], parts: Sequence[Any], place: jax.Array) -> Arrays:
    """Return the rows with new content in one slot."""
    return tuple(lax.dynamic_update_index_in_dim(x, part, place, 0) for x, part in zip(rows, parts, strict=True))
