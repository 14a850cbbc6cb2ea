"""The loop of half ticks in which a pipeline and its tail run, after the timetable in `unity.pcg.parallel.timetable`.

The last stage computes the tail of what it has just finished: the loss of that micro-batch, and its gradient if the loss's own
gradient is one. That goes back through the stages while other micro-batches go on. What a stage keeps for a micro-batch's backward
pass lies in a ring of as many places as there are stages, and is overwritten then. So the loop computes the sums and all gradients
together; the true gradient of the loss is a number by which these are multiplied.

After each half of a tick neighbours exchange, and nothing else is sent. A device has a place for each of three things: what it
works on, by turns a sample's values, which go on, and their gradient, which goes back; what passes by, by turns a sample that is
not its own, on its way down to stage 0, and the gradient of one, on its way home; and what the tail reads, which goes on with the
sample and comes back as a gradient. What goes on and what comes back are alike, so that both are one message. At both ends what
comes turns round: on the last stage a sample becomes its loss's gradient, on stage 0 a sample that has come down begins.

A batch has an *age*: micro-batches of the newest, of age 0, begin in this run; those of the one before, of age 1, began in the
run before, and are counted from minus their number to -1. Each finds the operands of its own batch, older weights too, and what is
added up is added up for each batch. 1F1B knows one batch, which comes and goes in one run; 2BW (`unity.exec.two_buffered_weights`)
two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from unity.exec.pipelines.gpipe import Arrays, Step, own_of, parts_of, put, shifted, stage_of, taken
from unity.exec.pipelines.guarded import Pullback, Zeros, taken_in, zeros_of
from unity.pcg.ir.gradient_flow import gradients
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.local import varying_loops as loops
from unity.pcg.local.collectives import contribute
from unity.pcg.parallel.stages import Schedule, ends_of, entering, names_of
from unity.pcg.parallel.timetable import HALVES, back, coming, forth, going, home, pairs
from unity.pcg.types.parallel_type import REPLICATED
from unity.pcg.types.varying_axes import vary, varying


@dataclass(frozen=True)
class Pair:
    """A pipeline and its tail, each with the local program of its inside."""

    pipeline: Node
    tail: Node
    step: Step
    end: Step

    @property
    def loss(self) -> int:
        """Which of the tail's results has a gradient."""
        return int(self.tail.attributes["loss"])

    @property
    def repeated(self) -> tuple[str, ...]:
        """The mesh axes along which the loss is replicated for use: its gradient is a partial sum there."""
        assert self.tail.inside is not None
        types = zip(self.tail.inside.axes, self.tail.types[self.loss], strict=True)
        return tuple(axis.name for axis, state in types if state == REPLICATED)

    @property
    def operands(self) -> tuple[Value, ...]:
        """The pipeline's operands, and what more the tail reads: "operands of the pair", by position."""
        return (*self.pipeline.operands, *self.tail.operands[: ends_of(self.tail).carried.start])

    def moving(self, wanted: frozenset[int]) -> tuple[frozenset[int], tuple[bool, ...]]:
        """Where gradients flow if those of some operands of the pair are wanted: to which of these; and to which of what stages
        hand on."""
        assert self.pipeline.inside is not None
        given = [Node("input", (), (v.tensor,)) for v in self.operands]
        values, n = tuple(map(Value, given)), len(self.pipeline.operands)
        pipeline = replace(self.pipeline, operands=values[:n])
        carried = tuple(Value(pipeline, v.index) for v in self.tail.operands[len(values) - n :])
        tail = replace(self.tail, operands=(*values[n:], *carried))
        flow = gradients(PCG(tuple(given), tail.results), wanted, (self.loss,))
        inside = self.pipeline.inside.inputs
        return (
            frozenset(k for k, v in enumerate(values) if flow(v)),
            tuple(flow(Value(inside[p])) for p in ends_of(self.pipeline).sampled),
        )


class Batch(NamedTuple):
    """What a pipeline and its tail find of one batch, on one device."""

    constants: Arrays
    parts: Arrays  # rows of what has samples, and is begun with; of an older batch there are none left
    weights: Arrays
    fixed: Arrays  # the tail's constants
    read: Arrays  # rows of what the tail reads


class Sums(NamedTuple):
    """What is there of one batch in the end: the tail's results, and gradients of what is chosen in a `Batch`."""

    results: Arrays
    constants: Arrays
    parts: Arrays
    weights: Arrays
    fixed: Arrays
    read: Arrays


Totals = tuple[tuple[Arrays, ...], ...]  # some fields of the `Sums` of each batch


class State(NamedTuple):
    """What goes on from tick to tick, on one device. Rows have a place for each of its own micro-batches, the ring one for each
    that is between its forward and its backward pass."""

    working: Arrays  # what the stage hands on: the values of a sample before a forward pass, their gradient before a backward one
    passing: Arrays  # the same of a sample on its way down, or home
    item: Arrays  # what the tail reads of the sample that the stage works on
    ring: Arrays
    sums: tuple[Sums, ...]  # of each batch


class _Moment(NamedTuple):
    """A half tick, on one device."""

    tick: jax.Array
    half: int
    me: jax.Array
    onward: jax.Array  # whether it has a forward pass here, and no backward pass


@dataclass(frozen=True)
class _Chosen:
    """Some of several arrays: those that have a gradient."""

    flags: tuple[bool, ...]

    def of(self, xs: Sequence[Any]) -> Arrays:
        return tuple(x for x, flag in zip(xs, self.flags, strict=True) if flag)

    def into(self, xs: Sequence[Any], values: Sequence[Any]) -> Arrays:
        rest = iter(values)
        return tuple(next(rest) if flag else x for x, flag in zip(xs, self.flags, strict=True))


class _Parted(NamedTuple):
    """Which have a gradient, of each part of a `Batch`."""

    constants: _Chosen
    parts: _Chosen
    weights: _Chosen
    fixed: _Chosen
    read: _Chosen


def batch_of(pair: Pair, operands: Sequence[Any]) -> Batch:
    """The operands of a pair by what they are."""
    n = len(pair.pipeline.operands)
    constants, read, carried, weights = parts_of(pair.pipeline, operands[:n])
    c = n + len(ends_of(pair.tail).constants)
    return Batch(constants, (*read, *carried), weights, tuple(operands[n:c]), tuple(operands[c:]))


@dataclass
class Loop:
    """Some ticks of a pair. `batches`: those that are there, with their ages, the newest first; `wanted`: of which operands of the
    pair the gradient is wanted; `moving`: which of those that stages hand on have one."""

    pair: Pair
    batches: tuple[tuple[int, Batch], ...]
    schedule: Schedule
    wanted: frozenset[int]
    moving: tuple[bool, ...]
    pullback: Pullback = field(default_factory=Pullback)
    results: list[Zeros] = field(default_factory=list)  # in the place of the tail's results, where there are none

    def __post_init__(self) -> None:
        self.names, self.last = names_of(self.pair.pipeline), self.schedule.stages - 1
        self.stage = stage_of(self.pair.pipeline, self.pair.step)
        self.begun_with = [p in entering(self.pair.pipeline) for p in ends_of(self.pair.pipeline).sampled]  # which parts are
        self.carry = len(ends_of(self.pair.pipeline).read)  # where what is carried begins among the parts
        self.inner = _Chosen(self.moving)

    @cached_property
    def chosen(self) -> _Parted:
        """Which have a gradient."""
        first, tail, n = ends_of(self.pair.pipeline), ends_of(self.pair.tail), len(self.pair.pipeline.operands)
        places = (first.constants, first.sampled, first.stepped, [n + p for p in tail.constants], [n + p for p in tail.read])
        return _Parted(*(_Chosen(tuple(p in self.wanted for p in some)) for some in places))

    def gradients(self, sums: Sums) -> dict[int, Any]:
        """The gradients of one batch, by the operand of the pair."""
        found = (g for some in (sums.constants, sums.parts, sums.weights, sums.fixed, sums.read) for g in some)
        return dict(zip(sorted(self.wanted), found, strict=True))

    def run(self, ticks: int, before: State | None = None) -> State:
        """So many ticks. `before`: what was on its way, with the sums of older batches; nothing if there were none."""
        return self.on(self.begun(before, lax.axis_index(self.names)), range(ticks))

    def on(self, state: State, ticks: range) -> State:
        """These ticks, from what is on its way before them."""
        me = lax.axis_index(self.names)

        def tick(s: State, t: jax.Array) -> tuple[State, None]:
            for half in HALVES:
                s = self.half(s, _Moment(t, half, me, me % 2 == half))
            return s, None

        return loops.scan(tick, state, jnp.arange(ticks.start, ticks.stop))[0]

    def begun(self, before: State | None, me: jax.Array) -> State:
        """Before the first tick: stage 0 has the first micro-batch of a new batch."""
        age, new = self.batches[0]
        if before is None:
            nothing, item = _zeros(taken(new.parts, jnp.asarray(0))), _zeros(taken(new.read, jnp.asarray(0)))
            before = State(nothing, nothing, item, (), ())
        # traced to know what is kept, and what comes out
        jax.eval_shape(self.stage_forward, before.working, new.constants, own_of(self.pair.pipeline, new.weights))
        jax.eval_shape(self.tail_both, before.working, before.item, new.fixed)
        ring = before.ring or tuple(_rows(zeros(), self.schedule.held) for zeros in self.pullback.kept)
        if age:
            return before._replace(ring=ring)
        working = _where(me == 0, taken(new.parts, jnp.asarray(0)), before.working)
        return before._replace(working=working, ring=ring, sums=(self.nothing(new), *before.sums))

    def nothing(self, batch: Batch) -> Sums:
        """The sums of a batch of which nothing is done."""
        gradients = (_zeros(chosen.of(xs)) for chosen, xs in zip(self.chosen, batch, strict=True))
        return Sums(tuple(zeros() for zeros in self.results), *gradients)

    def half(self, s: State, at: _Moment) -> State:
        """Half a tick: a forward or a backward pass, and what neighbours exchange after it."""
        parts, read = self.chosen.parts, self.chosen.read
        s = self.joined(s, at)
        found, s = self.work(s, at)
        working, passing, item = found, s.passing, s.item
        ended: tuple[Arrays, Arrays] | None = None
        if at.half == self.last % 2:
            s, ended = self.ended(s, at, found)
        working = self.exchanged(working, at.half, self.inner, up=True)
        passing = self.exchanged(passing, at.half, parts, up=False, of=self.begun_with)
        item = self.exchanged(item, at.half, read, up=True)
        if ended is not None:
            working = _where(at.me == self.last, self.inner.into(working, ended[0]), working)
            item = _where(at.me == self.last, read.into(item, ended[1]), item)
        if at.half == 1:  # stage 0 is done with one sample, and begins the next
            working = _where(at.me == 0, s.passing, working)
            passing = _where(at.me == 0, parts.into(passing, parts.of(found)), passing)
        return self.brought(s._replace(working=working, passing=passing, item=item), at)

    def joined(self, s: State, at: _Moment) -> State:
        """Samples of a device's own, where it is their turn to go, and the gradient of what the tail has read of one."""
        item, passing, sums = s.item, s.passing, list[Sums]()
        for (age, batch), own in zip(self.batches, s.sums, strict=True):
            mine, row = self.mine(forth(at.tick, at.me), age, at)
            item = _where(mine & at.onward, taken(batch.read, row), item)
            if not age:  # all of an older batch have begun
                mine, row = self.mine(coming(at.tick, at.me), age, at)
                passing = _where(mine & ~at.onward, taken(batch.parts, row), passing)
            mine, row = self.mine(back(at.tick, at.me, self.schedule.stages), age, at)
            sums.append(own._replace(read=_kept(mine & ~at.onward, own.read, self.chosen.read.of(s.item), row)))
        return s._replace(item=item, passing=passing, sums=tuple(sums))

    def brought(self, s: State, at: _Moment) -> State:
        """Gradients that have come home."""
        sums = []
        for (age, _), own in zip(self.batches, s.sums, strict=True):
            mine, row = self.mine(going(at.tick, at.me, self.schedule.stages), age, at)
            sums.append(own._replace(parts=_kept(mine & ~at.onward, own.parts, self.chosen.parts.of(s.passing), row)))
        return s._replace(sums=tuple(sums))

    def mine(self, number: jax.Array, age: int, at: _Moment) -> tuple[jax.Array, jax.Array]:
        """Whether a micro-batch of this number is one of the batch of this age, and it is stored here; in which row."""
        stage, row = home(number + age * self.schedule.micro_batches, self.schedule.stages, self.schedule.rounds)
        return (stage == at.me) & self.there(number, age), row

    def there(self, number: jax.Array, age: int) -> jax.Array:
        """Whether a micro-batch of this number is one of the batch of this age."""
        first = -age * self.schedule.micro_batches
        return (number >= first) & (number < first + self.schedule.micro_batches)

    def which(self, number: jax.Array) -> jax.Array:
        """The number of the batch, from 1, that a micro-batch is one of; 0 if there is no such micro-batch."""
        return sum((jnp.where(self.there(number, age), k + 1, 0) for k, (age, _) in enumerate(self.batches)), jnp.asarray(0))

    def exchanged(self, xs: Sequence[Any], half: int, chosen: _Chosen, up: bool, of: Sequence[bool] | None = None) -> Arrays:
        """What neighbours have sent: what is chosen goes both ways, the rest only up, or only down. `of`: which is sent at all."""
        onward = pairs(self.schedule.stages, half)
        backward = [(b, a) for a, b in onward]
        flags = zip(chosen.flags, of or [True] * len(chosen.flags), strict=True)
        ways = [[] if not sent else onward + backward if both else onward if up else backward for both, sent in flags]
        return tuple(shifted((x,), self.names, way)[0] if way else x for x, way in zip(xs, ways, strict=True))

    def work(self, s: State, at: _Moment) -> tuple[Arrays, State]:
        """A forward or a backward pass, or nothing: what is handed on; the ring and gradients of constants and weights are new."""
        schedule, many = self.schedule, len(self.batches)
        number = jnp.where(at.onward, forth(at.tick, at.me), back(at.tick, at.me, schedule.stages))
        place, batch = number % schedule.held, self.which(number)
        which = jnp.where(batch > 0, batch + jnp.where(at.onward, 0, many), 0)

        def idle(working: Arrays, ring: Arrays, totals: Totals) -> Any:
            return working, tuple(zeros() for zeros in self.pullback.kept), totals

        branches = (idle, *(self.onward(b) for _, b in self.batches), *(self.backward(k, place) for k in range(many)))
        totals = tuple((one.constants, one.weights) for one in s.sums)
        with taken_in(schedule.ticks, 2 * schedule.turns * many):
            found, kept, totals = loops.switch(which, branches, s.working, s.ring, totals)
        sums = (one._replace(constants=a, weights=b) for one, (a, b) in zip(s.sums, totals, strict=True))
        # where there was no forward pass what is kept is nothing, and what lay in the place is not needed any more
        return found, s._replace(ring=put(s.ring, kept, place), sums=tuple(sums))

    def onward(self, batch: Batch) -> Callable[..., Any]:
        """A forward pass of a micro-batch of a batch."""

        def forward(working: Arrays, ring: Arrays, totals: Totals) -> Any:
            return *self.stage_forward(working, batch.constants, own_of(self.pair.pipeline, batch.weights)), totals

        return forward

    def backward(self, k: int, place: jax.Array) -> Callable[..., Any]:
        """A backward pass of a micro-batch of the k-th batch, which lies in a place of the ring."""
        batch = self.batches[k][1]

        def backward(working: Arrays, ring: Arrays, totals: Totals) -> Any:
            given = (*batch.constants, *own_of(self.pair.pipeline, batch.weights))
            found, constants, weights = self.pullback.together(taken(ring, place), dict(enumerate(given)))(self.inner.of(working))
            weights = tuple(g.reshape(total.shape) for g, total in zip(weights, totals[k][1], strict=True))
            nothing = tuple(zeros() for zeros in self.pullback.kept)
            return self.inner.into(working, found), nothing, _added_to(totals, k, (constants, weights))

        return backward

    def stage_forward(self, start: Arrays, constants: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        """A stage's work on a micro-batch, and what is kept for its backward pass."""
        inner, chosen, stepped = self.inner, self.chosen.constants, self.chosen.weights

        def differentiable(a: Arrays, b: Arrays, c: Arrays) -> tuple[Arrays, Arrays]:
            found = self.stage(inner.into(start, a), chosen.into(constants, b), stepped.into(weights, c))
            return inner.of(found), found

        values = (inner.of(start), chosen.of(constants), stepped.of(weights))
        _, pull, found = jax.vjp(differentiable, *values, has_aux=True)
        return found, tuple(self.pullback.apart(pull, [*constants, *weights]))

    def ended(self, s: State, at: _Moment, found: Arrays) -> tuple[State, tuple[Arrays, Arrays]]:
        """The tail of a half tick, where the last stage has one; gradients of what that has found, and of what the tail reads."""
        idle = [[zeros_of(x) for x in xs] for xs in (self.inner.of(found), self.chosen.read.of(s.item))]

        def idling(found: Arrays, item: Arrays, totals: Totals) -> Any:
            return *(tuple(zeros() for zeros in some) for some in idle), totals

        number = forth(at.tick, at.me)
        which = jnp.where(at.me == self.last, self.which(number), 0)
        branches = (idling, *(self.closing(k) for k in range(len(self.batches))))
        totals = tuple((one.results, one.fixed) for one in s.sums)
        with taken_in(self.schedule.micro_batches, self.schedule.turns * len(self.batches)):
            own, item, totals = loops.switch(which, branches, found, s.item, totals)
        sums = (one._replace(results=a, fixed=b) for one, (a, b) in zip(s.sums, totals, strict=True))
        return s._replace(sums=tuple(sums)), (own, item)

    def closing(self, k: int) -> Callable[..., Any]:
        """The tail of a micro-batch of the k-th batch."""
        fixed = self.batches[k][1].fixed

        def close(found: Arrays, item: Arrays, totals: Totals) -> Any:
            results, own, read, more = self.tail_both(found, item, fixed)
            return own, read, _added_to(totals, k, (results, more))

        return close

    def tail_both(self, found: Arrays, item: Arrays, fixed: Arrays) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """The tail of a micro-batch: its results, and the gradients of what the last stage gave, of what is read, of constants."""
        inner, chosen, read = self.inner, self.chosen.fixed, self.chosen.read

        def differentiable(a: Arrays, b: Arrays, c: Arrays) -> tuple[Any, Arrays]:
            arrived = inner.into(found, a)[self.carry :][: len(ends_of(self.pair.tail).carried)]
            results = tuple(self.pair.end(*chosen.into(fixed, c), *read.into(item, b), *arrived))
            return results[self.pair.loss], results

        loss, pull, results = jax.vjp(differentiable, inner.of(found), read.of(item), chosen.of(fixed), has_aux=True)
        self.results = [zeros_of(x) for x in results]
        one = vary(jnp.ones(loss.shape, loss.dtype), varying(loss))
        a, b, c = pull(contribute(one, self.pair.repeated))
        return results, a, b, c


def _zeros(xs: Sequence[Any]) -> Arrays:
    return tuple(zeros_of(x)() for x in xs)


def _rows(x: Any, n: int) -> Any:
    return jnp.broadcast_to(x[None], (n, *x.shape))


def _added(xs: Sequence[Any], ys: Sequence[Any]) -> Arrays:
    return tuple(x + y for x, y in zip(xs, ys, strict=True))


def _added_to(totals: Totals, k: int, more: Sequence[Arrays]) -> Totals:
    """Totals, with something added to those of the k-th batch."""
    mine = tuple(_added(xs, ys) for xs, ys in zip(totals[k], more, strict=True))
    return (*totals[:k], mine, *totals[k + 1 :])


def _where(test: jax.Array, xs: Sequence[Any], ys: Sequence[Any]) -> Arrays:
    return tuple(jnp.where(test, x, y) for x, y in zip(xs, ys, strict=True))


def _kept(test: jax.Array, rows: Sequence[Any], xs: Sequence[Any], place: jax.Array) -> Arrays:
    """Rows, with something in one place if this is so."""
    return put(rows, _where(test, xs, taken(rows, place)), place)
