"""The loop of half ticks that runs a pipeline together with its tail, by the timetable in `unity.pcg.parallel.timetable`.

The last stage runs the tail of the micro-batch that it has just finished: its loss, and the loss's gradient for a cotangent of one.
The gradient goes back through the stages while other micro-batches go forward. A stage stores the residuals of a micro-batch in a
ring buffer with one slot for each stage. The loop thus computes the sums and all gradients together; afterwards the gradients are
multiplied by the loss's true cotangent.

Neighbours exchange once after each half tick, and nothing else is sent. A device has three registers:

- `working`: in turn the values of a sample, which go to the next stage, and their gradient, which goes to the stage before;
- `passing`: in turn another device's sample on its way down to stage 0, and the gradient of one on its way home;
- `item`: what the tail reads of the sample in `working`, and its gradient on the way back.

Both directions have the same shapes, so one message serves both. At the ends the direction turns: on the last stage a sample
becomes its loss's gradient, on stage 0 a sample from `passing` begins.

A batch has an *age*. Micro-batches of the newest batch, of age 0, begin in this run. Those of the batch before, of age 1, began in
the run before and have the numbers -M to -1. Each micro-batch uses the operands that came with its batch, older weights included,
and each batch has its own sums. 1F1B has one batch, which begins and ends in one run; 2BW (`unity.exec.two_buffered_weights`) has
two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from unity.exec.pipelines.gpipe import Arrays, Step, own_of, parts_of, put, shifted, stage_of, taken
from unity.exec.pipelines.guarded import Pullback, Zeros, taken_scope, zeros_of
from unity.pcg.ir.gradient_flow import gradients
from unity.pcg.ir.graph import PCG, Node, Value, reserved_axes
from unity.pcg.ir.payloads import PipelineTail
from unity.pcg.local import varying_loops as loops
from unity.pcg.local.collectives import contribute
from unity.pcg.parallel.stages import Schedule, ends_of, entering
from unity.pcg.parallel.timetable import (
    HALVES,
    backward_micro_batch,
    forward_micro_batch,
    home,
    incoming_micro_batch,
    pairs,
    returning_micro_batch,
)
from unity.pcg.types.accumulation import accumulator
from unity.pcg.types.parallel_type import REPLICATED
from unity.pcg.types.varying_axes import vary, varying


class ActiveValues(NamedTuple):
    """The values of a pipeline and its tail that are active for differentiation.

    Attributes:
        operands: the operands of the pair whose gradients are computed.
        forwarded: whether each value that stages forward has a gradient.
        results: the results of the tail that depend on what is differentiated: the loss, and auxiliary ones.
    """

    operands: frozenset[int]
    forwarded: tuple[bool, ...]
    results: frozenset[int]


@dataclass(frozen=True)
class PipelinePair:
    """A pipeline and its tail, with the local programs of a step (`step`) and of the tail (`end`)."""

    pipeline: Node
    tail: Node
    step: Step
    end: Step

    @property
    def loss(self) -> int:
        """The number of the tail's result that has a gradient."""
        return self.tail.of(PipelineTail).loss

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """The mesh axes along which the loss is replicated for use, so that its gradient is a partial sum."""
        assert self.tail.inside is not None
        types = zip(self.tail.inside.axes, self.tail.types[self.loss], strict=True)
        return tuple(axis.name for axis, state in types if state == REPLICATED)

    @property
    def operands(self) -> tuple[Value, ...]:
        """The operands of the pair: the pipeline's, followed by those that only the tail reads."""
        return (*self.pipeline.operands, *self.tail.operands[: ends_of(self.tail).carried.start])

    def active(self, differentiated: frozenset[int]) -> ActiveValues:
        """Return the values of the pair that are active for differentiation.

        `differentiated` are the operands whose gradients are computed.
        """
        assert self.pipeline.inside is not None
        inputs = [Node("input", (), (v.tensor,)) for v in self.operands]
        values, n = tuple(map(Value, inputs)), len(self.pipeline.operands)
        pipeline = replace(self.pipeline, operands=values[:n])
        carried = tuple(Value(pipeline, v.index) for v in self.tail.operands[len(values) - n :])
        tail = replace(self.tail, operands=(*values[n:], *carried))
        flow = gradients(PCG(tuple(inputs), tail.results), differentiated, (self.loss,))
        inside = self.pipeline.inside.inputs
        return ActiveValues(
            frozenset(k for k, v in enumerate(values) if flow(v)),
            tuple(flow(Value(inside[p])) for p in ends_of(self.pipeline).sampled),
            frozenset(k for k, v in enumerate(tail.results) if flow.has_tangent(v)),
        )


class Batch(NamedTuple):
    """The operands of a pipeline and its tail for one batch, on one device."""

    constants: Arrays
    parts: Arrays  # rows of samples that enter stage 0; empty for an older batch
    weights: Arrays
    fixed: Arrays  # the tail's constants
    read: Arrays  # rows of samples that the tail alone reads


class BatchSums(NamedTuple):
    """The sums over one batch: the tail's results, and the gradients of the active fields of its `Batch`.

    Sums over micro-batches are in their accumulation types, as partial sums are; rows of samples are in their own types.
    """

    results: Arrays
    constants: Arrays
    parts: Arrays
    weights: Arrays
    fixed: Arrays
    read: Arrays


Totals = tuple[tuple[Arrays, ...], ...]  # for each batch, some fields of its `BatchSums`


class LoopState(NamedTuple):
    """The carry of the loop over ticks, on one device.

    Rows have a slot for each of the device's own micro-batches; the ring buffer has one for each micro-batch between its forward
    and its backward pass.
    """

    working: Arrays  # a sample's values before a forward pass, their gradient before a backward pass
    passing: Arrays  # another device's sample on its way to stage 0, or its gradient on the way home
    item: Arrays  # what the tail reads of the sample in `working`
    ring: Arrays
    sums: tuple[BatchSums, ...]  # for each batch


class _Moment(NamedTuple):
    """One half tick on one device."""

    tick: jax.Array
    half: int
    me: jax.Array
    onward: jax.Array  # whether the device runs a forward pass in it, rather than a backward pass


@dataclass(frozen=True)
class _Selection:
    """A mask that selects the arrays that have a gradient."""

    flags: tuple[bool, ...]

    def of(self, xs: Sequence[Any]) -> Arrays:
        """Return the selected arrays."""
        return tuple(x for x, flag in zip(xs, self.flags, strict=True) if flag)

    def into(self, xs: Sequence[Any], values: Sequence[Any]) -> Arrays:
        """Return all arrays, with `values` in the place of the selected ones."""
        rest = iter(values)
        return tuple(next(rest) if flag else x for x, flag in zip(xs, self.flags, strict=True))


class _ActiveFields(NamedTuple):
    """The mask of arrays with a gradient, for each field of a `Batch`."""

    constants: _Selection
    parts: _Selection
    weights: _Selection
    fixed: _Selection
    read: _Selection


def batch_of(pair: PipelinePair, operands: Sequence[Any]) -> Batch:
    """Return the operands of a pair, sorted by their role."""
    n = len(pair.pipeline.operands)
    constants, read, carried, weights = parts_of(pair.pipeline, operands[:n])
    c = n + len(ends_of(pair.tail).constants)
    return Batch(constants, (*read, *carried), weights, tuple(operands[n:c]), tuple(operands[c:]))


@dataclass
class HalfTickLoop:
    """The loop over ticks of a pipeline and its tail.

    Attributes:
        pair: the pipeline and its tail.
        batches: the batches in flight with their ages, the newest first.
        schedule: the pipeline's schedule.
        active: the values of the pair that have a gradient.
        pullback: the structure of a stage's pullback.
        results: zeros that stand for the tail's results.
    """

    pair: PipelinePair
    batches: tuple[tuple[int, Batch], ...]
    schedule: Schedule
    active: ActiveValues
    pullback: Pullback = field(default_factory=Pullback)
    results: list[Zeros] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names, self.last = reserved_axes(self.pair.pipeline), self.schedule.stages - 1
        self.stage = stage_of(self.pair.pipeline, self.pair.step)
        ends, first = ends_of(self.pair.pipeline), entering(self.pair.pipeline)
        self.enters = [p in first for p in ends.sampled]  # whether each part enters at stage 0
        self.first_carry = len(ends.read)  # among the parts
        self.active_values = _Selection(self.active.forwarded)

    @cached_property
    def active_fields(self) -> _ActiveFields:
        """The mask of arrays with a gradient, for each field of a batch."""
        first, tail, n = ends_of(self.pair.pipeline), ends_of(self.pair.tail), len(self.pair.pipeline.operands)
        places = (first.constants, first.sampled, first.stepped, [n + p for p in tail.constants], [n + p for p in tail.read])
        return _ActiveFields(*(_Selection(tuple(p in self.active.operands for p in some)) for some in places))

    def gradients(self, sums: BatchSums) -> dict[int, Any]:
        """Return the gradients of one batch, by the number of the pair's operand, in the accumulation type where they are sums."""
        gradients = (g for field in (sums.constants, sums.parts, sums.weights, sums.fixed, sums.read) for g in field)
        return dict(zip(sorted(self.active.operands), gradients, strict=True))

    def sums_of_results(self, sums: BatchSums) -> Arrays:
        """Return the tail's results of one batch, each sum rounded to its own type."""
        return tuple(x.astype(zeros.dtype) for x, zeros in zip(sums.results, self.results, strict=True))

    def run(self, ticks: int, before: LoopState | None = None) -> LoopState:
        """Run the first `ticks` ticks. `before` is the state after the run before, if any, with the sums of older batches."""
        return self.run_ticks(self.initial_state(before, lax.axis_index(self.names)), range(ticks))

    def run_ticks(self, state: LoopState, ticks: range) -> LoopState:
        """Run these ticks from the state before them."""
        me = lax.axis_index(self.names)

        def tick(s: LoopState, t: jax.Array) -> tuple[LoopState, None]:
            for half in HALVES:
                s = self.half_tick(s, _Moment(t, half, me, me % 2 == half))
            return s, None

        return loops.scan(tick, state, jnp.arange(ticks.start, ticks.stop))[0]

    def initial_state(self, before: LoopState | None, me: jax.Array) -> LoopState:
        """Return the state before the first tick, in which stage 0 has the first micro-batch of a new batch."""
        age, new = self.batches[0]
        if before is None:
            nothing, item = _zeros(taken(new.parts, jnp.asarray(0))), _zeros(taken(new.read, jnp.asarray(0)))
            before = LoopState(nothing, nothing, item, (), ())
        # traced so that the shapes of residuals and of the tail's results are known
        jax.eval_shape(self.stage_forward, before.working, new.constants, own_of(self.pair.pipeline, new.weights))
        jax.eval_shape(self.tail_with_gradients, before.working, before.item, new.fixed)
        ring = before.ring or tuple(_stack(zeros(), self.schedule.buffered_micro_batches) for zeros in self.pullback.residuals)
        if age:
            return before._replace(ring=ring)
        working = _where(me == 0, taken(new.parts, jnp.asarray(0)), before.working)
        return before._replace(working=working, ring=ring, sums=(self.zero_sums(new), *before.sums))

    def zero_sums(self, batch: Batch) -> BatchSums:
        """Return the sums of a batch before its first pass."""
        constants, parts, weights, fixed, read = (chosen.of(xs) for chosen, xs in zip(self.active_fields, batch, strict=True))
        return BatchSums(
            _zero_sums(self.results),
            constants=_zero_sums(map(zeros_of, constants)),
            parts=_zeros(parts),
            weights=_zero_sums(map(zeros_of, weights)),
            fixed=_zero_sums(map(zeros_of, fixed)),
            read=_zeros(read),
        )

    def half_tick(self, s: LoopState, at: _Moment) -> LoopState:
        """Run half a tick: a forward or a backward pass, and the exchange with neighbours after it."""
        parts, read = self.active_fields.parts, self.active_fields.read
        s = self.load_samples(s, at)
        results, s = self.run_stage(s, at)
        working, passing, item = results, s.passing, s.item
        ended: tuple[Arrays, Arrays] | None = None
        if at.half == self.last % 2:
            s, ended = self.run_tail(s, at, results)
        working = self.exchange(working, at.half, self.active_values, up=True)
        passing = self.exchange(passing, at.half, parts, up=False, of=self.enters)
        item = self.exchange(item, at.half, read, up=True)
        if ended is not None:
            working = _where(at.me == self.last, self.active_values.into(working, ended[0]), working)
            item = _where(at.me == self.last, read.into(item, ended[1]), item)
        if at.half == 1:  # stage 0 is done with one sample, and begins the next
            working = _where(at.me == 0, s.passing, working)
            passing = _where(at.me == 0, parts.into(passing, parts.of(results)), passing)
        return self.store_gradients(s._replace(working=working, passing=passing, item=item), at)

    def load_samples(self, s: LoopState, at: _Moment) -> LoopState:
        """Load the device's own samples when it is their turn, and store the gradient of a sample that the tail has read."""
        item, passing, sums = s.item, s.passing, list[BatchSums]()
        for (age, batch), own in zip(self.batches, s.sums, strict=True):
            mine, row = self.stored_here(forward_micro_batch(at.tick, at.me), age, at)
            item = _where(mine & at.onward, taken(batch.read, row), item)
            if not age:  # all micro-batches of an older batch have begun
                mine, row = self.stored_here(incoming_micro_batch(at.tick, at.me), age, at)
                passing = _where(mine & ~at.onward, taken(batch.parts, row), passing)
            mine, row = self.stored_here(backward_micro_batch(at.tick, at.me, self.schedule.stages), age, at)
            sums.append(own._replace(read=_put_where(mine & ~at.onward, own.read, self.active_fields.read.of(s.item), row)))
        return s._replace(item=item, passing=passing, sums=tuple(sums))

    def store_gradients(self, s: LoopState, at: _Moment) -> LoopState:
        """Store the gradients of samples that have arrived at the device that stores them."""
        sums = []
        for (age, _), own in zip(self.batches, s.sums, strict=True):
            mine, row = self.stored_here(returning_micro_batch(at.tick, at.me, self.schedule.stages), age, at)
            sums.append(own._replace(parts=_put_where(mine & ~at.onward, own.parts, self.active_fields.parts.of(s.passing), row)))
        return s._replace(sums=tuple(sums))

    def stored_here(self, number: jax.Array, age: int, at: _Moment) -> tuple[jax.Array, jax.Array]:
        """Return whether a micro-batch belongs to the batch of this age and is stored on this device, and its slot there."""
        stage, row = home(number + age * self.schedule.micro_batches, self.schedule.stages, self.schedule.rounds)
        return (stage == at.me) & self.belongs(number, age), row

    def belongs(self, number: jax.Array, age: int) -> jax.Array:
        """Return whether the micro-batch with this number belongs to the batch of this age."""
        first = -age * self.schedule.micro_batches
        return (number >= first) & (number < first + self.schedule.micro_batches)

    def batch_number(self, number: jax.Array) -> jax.Array:
        """Return the number, from 1, of the batch that a micro-batch belongs to; 0 if it belongs to none."""
        return sum((jnp.where(self.belongs(number, age), k + 1, 0) for k, (age, _) in enumerate(self.batches)), jnp.asarray(0))

    def exchange(self, xs: Sequence[Any], half: int, chosen: _Selection, up: bool, of: Sequence[bool] | None = None) -> Arrays:
        """Exchange arrays with neighbours after a half tick.

        Args:
            xs: the arrays.
            half: the half of the tick.
            chosen: the arrays that are sent in both directions.
            up: whether the others are sent to the next stage, and not to the stage before.
            of: whether each array is sent at all; by default all are.
        """
        onward = pairs(self.schedule.stages, half)
        backward = [(b, a) for a, b in onward]
        flags = zip(chosen.flags, of or [True] * len(chosen.flags), strict=True)
        ways = [[] if not sent else onward + backward if both else onward if up else backward for both, sent in flags]
        return tuple(shifted((x,), self.names, way)[0] if way else x for x, way in zip(xs, ways, strict=True))

    def run_stage(self, s: LoopState, at: _Moment) -> tuple[Arrays, LoopState]:
        """Run the stage's forward or backward pass, or neither. Return the results, and the state with new ring and gradients."""
        schedule, many = self.schedule, len(self.batches)
        number = jnp.where(at.onward, forward_micro_batch(at.tick, at.me), backward_micro_batch(at.tick, at.me, schedule.stages))
        place, batch = number % schedule.buffered_micro_batches, self.batch_number(number)
        which = jnp.where(batch > 0, batch + jnp.where(at.onward, 0, many), 0)

        def idle(working: Arrays, ring: Arrays, totals: Totals) -> Any:
            return working, tuple(zeros() for zeros in self.pullback.residuals), totals

        branches = (
            idle,
            *(self.forward_branch(b) for _, b in self.batches),
            *(self.backward_branch(k, place) for k in range(many)),
        )
        totals = tuple((one.constants, one.weights) for one in s.sums)
        with taken_scope(schedule.ticks, 2 * schedule.loop_ticks * many):
            results, kept, totals = loops.switch(which, branches, s.working, s.ring, totals)
        sums = (one._replace(constants=a, weights=b) for one, (a, b) in zip(s.sums, totals, strict=True))
        # without a forward pass zeros are stored: the residuals in that slot are not needed any more
        return results, s._replace(ring=put(s.ring, kept, place), sums=tuple(sums))

    def forward_branch(self, batch: Batch) -> Callable[..., Any]:
        """Return the function of the forward pass of a micro-batch of a batch."""

        def forward(working: Arrays, ring: Arrays, totals: Totals) -> Any:
            return *self.stage_forward(working, batch.constants, own_of(self.pair.pipeline, batch.weights)), totals

        return forward

    def backward_branch(self, k: int, place: jax.Array) -> Callable[..., Any]:
        """Return the function of the backward pass of a micro-batch of the k-th batch, with its residuals in a slot of the ring."""
        batch = self.batches[k][1]

        def backward(working: Arrays, ring: Arrays, totals: Totals) -> Any:
            operands = (*batch.constants, *own_of(self.pair.pipeline, batch.weights))
            gradients, constants, weights = self.pullback.join(taken(ring, place), dict(enumerate(operands)))(
                self.active_values.of(working)
            )
            weights = tuple(g.reshape(total.shape) for g, total in zip(weights, totals[k][1], strict=True))
            zero_residuals = tuple(zeros() for zeros in self.pullback.residuals)
            return self.active_values.into(working, gradients), zero_residuals, _added_to(totals, k, (constants, weights))

        return backward

    def stage_forward(self, start: Arrays, constants: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        """Run a stage on a micro-batch. Return its results, and the residuals of its backward pass."""
        inner, chosen, stepped = self.active_values, self.active_fields.constants, self.active_fields.weights

        def differentiable(a: Arrays, b: Arrays, c: Arrays) -> tuple[Arrays, Arrays]:
            results = self.stage(inner.into(start, a), chosen.into(constants, b), stepped.into(weights, c))
            return inner.of(results), results

        values = (inner.of(start), chosen.of(constants), stepped.of(weights))
        _, pull, results = jax.vjp(differentiable, *values, has_aux=True)
        return results, tuple(self.pullback.split(pull, [*constants, *weights]))

    def run_tail(self, s: LoopState, at: _Moment, results: Arrays) -> tuple[LoopState, tuple[Arrays, Arrays]]:
        """Run the tail on the last stage, if it has finished a micro-batch in this half tick.

        Return the gradients of the stage's results and of what the tail reads.
        """
        idle = [[zeros_of(x) for x in xs] for xs in (self.active_values.of(results), self.active_fields.read.of(s.item))]

        def idling(results: Arrays, item: Arrays, totals: Totals) -> Any:
            return *(tuple(zeros() for zeros in some) for some in idle), totals

        number = forward_micro_batch(at.tick, at.me)
        which = jnp.where(at.me == self.last, self.batch_number(number), 0)
        branches = (idling, *(self.tail_branch(k) for k in range(len(self.batches))))
        totals = tuple((one.results, one.fixed) for one in s.sums)
        with taken_scope(self.schedule.micro_batches, self.schedule.loop_ticks * len(self.batches)):
            own, item, totals = loops.switch(which, branches, results, s.item, totals)
        sums = (one._replace(results=a, fixed=b) for one, (a, b) in zip(s.sums, totals, strict=True))
        return s._replace(sums=tuple(sums)), (own, item)

    def tail_branch(self, k: int) -> Callable[..., Any]:
        """Return the function that runs the tail of a micro-batch of the k-th batch."""
        fixed = self.batches[k][1].fixed

        def close(finished: Arrays, item: Arrays, totals: Totals) -> Any:
            results, own, read, more = self.tail_with_gradients(finished, item, fixed)
            return own, read, _added_to(totals, k, (results, more))

        return close

    def tail_with_gradients(self, finished: Arrays, item: Arrays, fixed: Arrays) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """Run the tail of a micro-batch, forward and backward.

        Return its results, and the gradients of the last stage's results, of what the tail reads, and of its constants.
        """
        inner, chosen, read = self.active_values, self.active_fields.fixed, self.active_fields.read

        def differentiable(a: Arrays, b: Arrays, c: Arrays) -> tuple[Any, Arrays]:
            arrived = inner.into(finished, a)[self.first_carry :][: len(ends_of(self.pair.tail).carried)]
            results = tuple(self.pair.end(*chosen.into(fixed, c), *read.into(item, b), *arrived))
            return results[self.pair.loss], results

        loss, pull, results = jax.vjp(differentiable, inner.of(finished), read.of(item), chosen.of(fixed), has_aux=True)
        self.results = [zeros_of(x) for x in results]
        one = vary(jnp.ones(loss.shape, loss.dtype), varying(loss))
        a, b, c = pull(contribute(one, self.pair.replicated_axes))
        return results, a, b, c


def _zeros(xs: Sequence[Any]) -> Arrays:
    return tuple(zeros_of(x)() for x in xs)


def _stack(x: Any, n: int) -> Any:
    return jnp.broadcast_to(x[None], (n, *x.shape))


def _zero_sums(values: Iterable[Zeros]) -> Arrays:
    """Return the sums of no arrays, in the types in which arrays like `values` are added up."""
    return tuple(replace(zeros, dtype=accumulator(zeros.dtype))() for zeros in values)


def _added(xs: Sequence[Any], ys: Sequence[Any]) -> Arrays:
    return tuple(x + y.astype(x.dtype) for x, y in zip(xs, ys, strict=True))


def _added_to(totals: Totals, k: int, more: Sequence[Arrays]) -> Totals:
    """Return the totals, with `more` added to those of the k-th batch."""
    mine = tuple(_added(xs, ys) for xs, ys in zip(totals[k], more, strict=True))
    return (*totals[:k], mine, *totals[k + 1 :])


def _where(test: jax.Array, xs: Sequence[Any], ys: Sequence[Any]) -> Arrays:
    return tuple(jnp.where(test, x, y) for x, y in zip(xs, ys, strict=True))


def _put_where(test: jax.Array, rows: Sequence[Any], xs: Sequence[Any], place: jax.Array) -> Arrays:
    """Return the rows, with new content in one slot where `test` holds."""
    return put(rows, _where(test, xs, taken(rows, place)), place)
