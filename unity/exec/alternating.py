"""1F1B as it runs: a pipeline and its tail in one loop, after the timetable in `unity.pcg.timetable`.

The last stage computes the tail of what it has just finished: the loss of that micro-batch, and its gradient if the loss's own
gradient is one. That goes back through the stages while other micro-batches go on. What a stage keeps for a micro-batch's backward
pass lies in a ring of as many places as there are stages, and is overwritten then. So the loop computes the sums and all gradients
together; the true gradient of the loss is a number by which these are multiplied.

After each half of a tick neighbours exchange, and nothing else is sent. A device has a place for each of three things: what it
works on, by turns a sample's values, which go on, and their gradient, which goes back; what passes by, by turns a sample that is
not its own, on its way down to stage 0, and the gradient of one, on its way home; and what the tail reads, which goes on with the
sample and comes back as a gradient. What goes on and what comes back are alike, so that both are one message. At both ends what
comes turns round: on the last stage a sample becomes its loss's gradient, on stage 0 a sample that has come down begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from unity.exec.guarded import Pullback, Zeros, taken_in, zeros_of
from unity.exec.parallel import vary, varying
from unity.exec.pipeline import Arrays, Step, parts_of, pipelined, put, shifted, stage_of, summed, taken
from unity.pcg.gradients import gradients
from unity.pcg.graph import PCG, Node, Value
from unity.pcg.stages import Schedule, ends_of, names_of, schedule_of
from unity.pcg.timetable import HALVES, back, coming, forth, going, home, pairs


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

    def moving(self, wanted: frozenset[int]) -> tuple[frozenset[int], tuple[bool, ...]]:
        """Where gradients flow if those of some operands, of the pipeline and then of the tail, are wanted: to which of these; and
        to which of what stages hand on."""
        assert self.pipeline.inside is not None
        before = ends_of(self.tail).carried.start
        given = [Node("input", (), (v.tensor,)) for v in (*self.pipeline.operands, *self.tail.operands[:before])]
        values, n = tuple(map(Value, given)), len(self.pipeline.operands)
        pipeline = replace(self.pipeline, operands=values[:n])
        carried = tuple(Value(pipeline, v.index) for v in self.tail.operands[before:])
        tail = replace(self.tail, operands=(*values[n:], *carried))
        flow = gradients(PCG(tuple(given), tail.results), wanted, (self.loss,))
        inside = self.pipeline.inside.inputs
        return (
            frozenset(k for k, v in enumerate(values) if flow(v)),
            tuple(flow(Value(inside[p])) for p in ends_of(self.pipeline).sampled),
        )


def alternated(pair: Pair, operands: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """The results of the tail of a pipeline; called inside `shard_map`, with one device's pieces of the pipeline's operands, and
    what more the tail reads."""
    every, n = [*operands, *more], len(operands)
    real = [k for k, x in enumerate(every) if jnp.issubdtype(x.dtype, jnp.inexact)]
    others = {k: x for k, x in enumerate(every) if k not in real}

    def whole(values: Sequence[Any], rest: dict[int, Any]) -> list[Any]:
        found = rest | dict(zip(real, values, strict=True))
        return [found[k] for k in range(len(every))]

    @jax.custom_vjp
    def call(values: Sequence[Any], rest: dict[int, Any]) -> Arrays:
        given = whole(values, rest)
        return tuple(summed(pair.tail, [*given[n:], *pipelined(pair.pipeline, given[:n], pair.step)], pair.end))

    def forward(values: Sequence[Any], rest: dict[int, Any]) -> tuple[Arrays, list[Any]]:
        given = whole([x.value for x in values], {k: x.value for k, x in rest.items()})
        wanted = {k for k, x in zip(real, values, strict=True) if x.perturbed}
        flowing, moving = pair.moving(frozenset(wanted))
        sums, found = _Loop(pair, given[:n], given[n:], flowing, moving).run()
        return sums, [found.get(k) for k in real]

    def backward(found: list[Any], cotangents: Arrays) -> tuple[list[Any], None]:
        return scaled(found, cotangents[pair.loss]), None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return list(call([every[k] for k in real], others))


def scaled(found: Sequence[Any], by: Any) -> list[Any]:
    """Gradients (None: not wanted) times a number. JAX may take it to differ where it is the same on all devices: along axes on
    which some gradient is known to be the same, one device's is taken."""
    if isinstance(by, SymbolicZero):
        return [None] * len(found)
    alike = sorted({name for g in found if g is not None for name in varying(by) - varying(g)})
    if alike:
        first = sum(lax.axis_index(name) for name in alike) == 0
        by = lax.psum(jnp.where(first, by, 0), tuple(alike))
    return [None if g is None else g * vary(by, varying(g)).astype(g.dtype) for g in found]


class _State(NamedTuple):
    """What goes on from tick to tick, on one device. Rows have a place for each of its own micro-batches, the ring one for each
    that is between its forward and its backward pass."""

    working: Arrays  # what the stage hands on: the values of a sample before a forward pass, their gradient before a backward one
    passing: Arrays  # the same of a sample on its way down, or home
    item: Arrays  # what the tail reads of the sample that the stage works on
    ring: Arrays
    home: Arrays  # rows of gradients of samples
    item_home: Arrays
    sums: Arrays
    totals: tuple[Arrays, Arrays, Arrays]  # gradients of constants, weights, and constants of the tail, of all micro-batches


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


@dataclass
class _Loop:
    """The loop of one step. `wanted`: of which operands, by position, the gradient is wanted; `moving`: which of those that stages
    hand on have one."""

    pair: Pair
    operands: Sequence[Any]
    more: Sequence[Any]
    wanted: frozenset[int]
    moving: tuple[bool, ...]
    pullback: Pullback = field(default_factory=Pullback)
    results: list[Zeros] = field(default_factory=list)  # in the place of the tail's results, where there are none

    def __post_init__(self) -> None:
        self.constants, read, carried, self.weights = parts_of(self.pair.pipeline, self.operands)
        self.parts = (*read, *carried)
        c = len(ends_of(self.pair.tail).constants)
        self.fixed, self.read = tuple(self.more[:c]), tuple(self.more[c:])
        self.schedule: Schedule = schedule_of(self.pair.pipeline)
        self.names, self.last = names_of(self.pair.pipeline), self.schedule.stages - 1
        self.stage = stage_of(self.pair.pipeline, self.pair.step)
        self.carry = len(read)  # where what is carried begins among the parts
        self.inner = _Chosen(self.moving)

    @cached_property
    def chosen(self) -> tuple[_Chosen, ...]:
        """Which have a gradient: of constants, of parts, of weights, of the tail's constants, of what it reads."""
        found, start = [], 0
        for xs in (self.constants, self.parts, self.weights, self.fixed, self.read):
            found.append(_Chosen(tuple(start + k in self.wanted for k in range(len(xs)))))
            start += len(xs)
        return tuple(found)

    def run(self) -> tuple[Arrays, dict[int, Any]]:
        """The tail's results, and gradients by the operand's position."""
        me = lax.axis_index(self.names)

        def tick(s: _State, t: jax.Array) -> tuple[_State, None]:
            for half in HALVES:
                s = self.half(s, _Moment(t, half, me, me % 2 == half))
            return s, None

        s, _ = lax.scan(tick, self.start(), jnp.arange(self.schedule.turns))
        found = (s.totals[0], s.home, s.totals[1], s.totals[2], s.item_home)
        return s.sums, dict(zip(sorted(self.wanted), (g for some in found for g in some), strict=True))

    def start(self) -> _State:
        """Before the first tick: stage 0 has its first micro-batch."""
        constants, parts, weights, fixed, read = self.chosen
        first = taken(self.parts, jnp.asarray(0))
        nothing, item = _zeros(first), _zeros(taken(self.read, jnp.asarray(0)))
        # traced to know what is kept, and what comes out
        jax.eval_shape(self.stage_forward, nothing, self.constants, self.weights)
        jax.eval_shape(self.tail_both, nothing, item, self.fixed)
        ring = tuple(_rows(zeros(), self.schedule.held) for zeros in self.pullback.kept)
        totals = (_zeros(constants.of(self.constants)), _zeros(weights.of(self.weights)), _zeros(fixed.of(self.fixed)))
        return _State(
            first, nothing, item, ring, _zeros(parts.of(self.parts)), _zeros(read.of(self.read)),
            tuple(zeros() for zeros in self.results), totals,
        )  # fmt: skip

    def half(self, s: _State, at: _Moment) -> _State:
        """Half a tick: a forward or a backward pass, and what neighbours exchange after it."""
        parts, read = self.chosen[1], self.chosen[4]
        s = self.joined(s, at)
        found, ring, totals = self.work(s, at)
        s = s._replace(ring=ring, totals=(*totals, s.totals[2]))
        working, passing, item = found, s.passing, s.item
        ended: tuple[Arrays, Arrays] | None = None
        if at.half == self.last % 2:
            s, ended = self.ended(s, at, found)
        working = self.exchanged(working, at.half, self.inner, up=True)
        passing = self.exchanged(passing, at.half, parts, up=False)
        item = self.exchanged(item, at.half, read, up=True)
        if ended is not None:
            working = _where(at.me == self.last, self.inner.into(working, ended[0]), working)
            item = _where(at.me == self.last, read.into(item, ended[1]), item)
        if at.half == 1:  # stage 0 is done with one sample, and begins the next
            working = _where(at.me == 0, s.passing, working)
            passing = _where(at.me == 0, parts.into(passing, parts.of(found)), passing)
        return self.brought(s._replace(working=working, passing=passing, item=item), at)

    def joined(self, s: _State, at: _Moment) -> _State:
        """Samples of a device's own, where it is their turn to go, and the gradient of what the tail has read of one."""
        number = forth(at.tick, at.me)
        mine, row = self.mine(number, at)
        item = _where(mine & at.onward, taken(self.read, row), s.item)
        mine, row = self.mine(coming(at.tick, at.me), at)
        passing = _where(mine & ~at.onward, taken(self.parts, row), s.passing)
        mine, row = self.mine(back(at.tick, at.me, self.schedule.stages), at)
        item_home = _kept(mine & ~at.onward, s.item_home, self.chosen[4].of(s.item), row)
        return s._replace(item=item, passing=passing, item_home=item_home)

    def brought(self, s: _State, at: _Moment) -> _State:
        """Gradients that have come home."""
        mine, row = self.mine(going(at.tick, at.me, self.schedule.stages), at)
        return s._replace(home=_kept(mine & ~at.onward, s.home, self.chosen[1].of(s.passing), row))

    def mine(self, number: jax.Array, at: _Moment) -> tuple[jax.Array, jax.Array]:
        """Whether there is a micro-batch of this number, and it is stored here; in which row."""
        stage, row = home(number, self.schedule.stages, self.schedule.rounds)
        return (stage == at.me) & self.there(number), row

    def there(self, number: jax.Array) -> jax.Array:
        return (number >= 0) & (number < self.schedule.micro_batches)

    def exchanged(self, xs: Sequence[Any], half: int, chosen: _Chosen, up: bool) -> Arrays:
        """What neighbours have sent: what is chosen goes both ways, the rest only up, or only down."""
        onward = pairs(self.schedule.stages, half)
        backward = [(b, a) for a, b in onward]
        ways = [onward + backward if flag else onward if up else backward for flag in chosen.flags]
        return tuple(shifted((x,), self.names, way)[0] if way else x for x, way in zip(xs, ways, strict=True))

    def work(self, s: _State, at: _Moment) -> tuple[Arrays, Arrays, tuple[Arrays, Arrays]]:
        """A forward or a backward pass, or nothing: what is handed on, the ring, and gradients of constants and weights."""
        schedule = self.schedule
        number = jnp.where(at.onward, forth(at.tick, at.me), back(at.tick, at.me, schedule.stages))
        place = number % schedule.held
        which = jnp.where(self.there(number), jnp.where(at.onward, 1, 2), 0)

        def idle(working: Arrays, ring: Arrays, totals: tuple[Arrays, Arrays]) -> Any:
            return working, tuple(zeros() for zeros in self.pullback.kept), totals

        def forward(working: Arrays, ring: Arrays, totals: tuple[Arrays, Arrays]) -> Any:
            return *self.stage_forward(working, self.constants, self.weights), totals

        def backward(working: Arrays, ring: Arrays, totals: tuple[Arrays, Arrays]) -> Any:
            pull = self.pullback.together(taken(ring, place), dict(enumerate((*self.constants, *self.weights))))
            found, *more = pull(self.inner.of(working))
            nothing = tuple(zeros() for zeros in self.pullback.kept)
            return self.inner.into(working, found), nothing, tuple(map(_added, totals, more))

        with taken_in(schedule.ticks, 2 * schedule.turns):
            found, kept, totals = lax.switch(which, (idle, forward, backward), s.working, s.ring, s.totals[:2])
        # where there was no forward pass this is nothing, and what lay in the place is not needed any more
        return found, put(s.ring, kept, place), totals

    def stage_forward(self, start: Arrays, constants: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        """A stage's work on a micro-batch, and what is kept for its backward pass."""
        inner, (chosen, _, stepped, _, _) = self.inner, self.chosen

        def differentiable(a: Arrays, b: Arrays, c: Arrays) -> tuple[Arrays, Arrays]:
            found = self.stage(inner.into(start, a), chosen.into(constants, b), stepped.into(weights, c))
            return inner.of(found), found

        values = (inner.of(start), chosen.of(constants), stepped.of(weights))
        _, pull, found = jax.vjp(differentiable, *values, has_aux=True)
        return found, tuple(self.pullback.apart(pull, [*constants, *weights]))

    def ended(self, s: _State, at: _Moment, found: Arrays) -> tuple[_State, tuple[Arrays, Arrays]]:
        """The tail of a half tick, where the last stage has one; gradients of what that has found, and of what the tail reads."""
        read = self.chosen[4]
        idle = [self.results, *([zeros_of(x) for x in xs] for xs in (self.inner.of(found), read.of(s.item), s.totals[2]))]

        def idling(found: Arrays, item: Arrays, fixed: Arrays) -> tuple[Arrays, ...]:
            return tuple(tuple(zeros() for zeros in some) for some in idle)

        works = (at.me == self.last) & self.there(forth(at.tick, at.me))
        with taken_in(self.schedule.micro_batches, self.schedule.turns):
            results, own, item, more = lax.cond(works, self.tail_both, idling, found, s.item, self.fixed)
        s = s._replace(sums=_added(s.sums, results), totals=(*s.totals[:2], _added(s.totals[2], more)))
        return s, (own, item)

    def tail_both(self, found: Arrays, item: Arrays, fixed: Arrays) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """The tail of a micro-batch: its results, and the gradients of what the last stage gave, of what is read, of constants."""
        inner, (_, _, _, chosen, read) = self.inner, self.chosen

        def differentiable(a: Arrays, b: Arrays, c: Arrays) -> tuple[Any, Arrays]:
            arrived = inner.into(found, a)[self.carry :]
            results = tuple(self.pair.end(*chosen.into(fixed, c), *read.into(item, b), *arrived))
            return results[self.pair.loss], results

        loss, pull, results = jax.vjp(differentiable, inner.of(found), read.of(item), chosen.of(fixed), has_aux=True)
        self.results = [zeros_of(x) for x in results]
        a, b, c = pull(vary(jnp.ones(loss.shape, loss.dtype), varying(loss)))
        return results, a, b, c


def _zeros(xs: Sequence[Any]) -> Arrays:
    return tuple(zeros_of(x)() for x in xs)


def _rows(x: Any, n: int) -> Any:
    return jnp.broadcast_to(x[None], (n, *x.shape))


def _added(xs: Sequence[Any], ys: Sequence[Any]) -> Arrays:
    return tuple(x + y for x, y in zip(xs, ys, strict=True))


def _where(test: jax.Array, xs: Sequence[Any], ys: Sequence[Any]) -> Arrays:
    return tuple(jnp.where(test, x, y) for x, y in zip(xs, ys, strict=True))


def _kept(test: jax.Array, rows: Sequence[Any], xs: Sequence[Any], place: jax.Array) -> Arrays:
    """Rows, with something in one place if this is so."""
    return put(rows, _where(test, xs, taken(rows, place)), place)
