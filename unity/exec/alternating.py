"""1F1B as it runs: a pipeline and its tail in one loop, in which every stage does one forward and one backward pass in a tick.

The last stage computes the tail of what it has just finished: the loss of that micro-batch, and its gradient if the loss's own
gradient is one. That goes back through the stages, one in a tick, while other micro-batches go on. What a stage keeps for a
micro-batch's backward pass lies in a ring of places, as many as micro-batches can be between the two, and is overwritten then.
So the loop computes the sums and all gradients together; the true gradient of the loss is a number by which these are multiplied.

Samples come to stage 0 as under GPipe (`unity.exec.pipeline`). What the tail reads comes to the last stage by a ring: with every
use of a place all that lie there move to the device before, and the first one's to the last. Gradients go home the same ways.

Three loops in a row: in the first stages only begin, in the last they only finish, so that nothing is sent that is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from unity.exec.guarded import Pullback, Zeros, zeros_of
from unity.exec.parallel import vary, varying
from unity.exec.pipeline import Arrays, Step, parts_of, pipelined, put, shifted, stage_of, summed, taken
from unity.pcg.graph import Node
from unity.pcg.stages import Schedule, ends_of, names_of, schedule_of


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
        sums, gradients = _Loops(pair, given[:n], given[n:], frozenset(wanted)).run()
        return sums, [gradients.get(k) for k in real]

    def backward(gradients: list[Any], cotangents: Arrays) -> tuple[list[Any], None]:
        return scaled(gradients, cotangents[pair.loss]), None

    call.defvjp(forward, backward, symbolic_zeros=True)
    return list(call([every[k] for k in real], others))


def scaled(gradients: Sequence[Any], by: Any) -> list[Any]:
    """Gradients (None: not wanted) times a number. JAX may take it to differ where it is the same on all devices: along axes on
    which some gradient is known to be the same, one device's is taken."""
    if isinstance(by, SymbolicZero):
        return [None] * len(gradients)
    alike = sorted({name for g in gradients if g is not None for name in varying(by) - varying(g)})
    if alike:
        first = sum(lax.axis_index(name) for name in alike) == 0
        by = lax.psum(jnp.where(first, by, 0), tuple(alike))
    return [None if g is None else g * vary(by, varying(g)).astype(g.dtype) for g in gradients]


class _State(NamedTuple):
    """What goes on from tick to tick, on one device. Rows have a place for each of its own micro-batches, the ring one for each
    that is between its forward and its backward pass."""

    arrived: Arrays  # what comes from the stage before
    waiting: Arrays  # rows of what has not started
    ring: Arrays
    returned: Arrays  # the gradient of what came from the stage before, which it does not have yet
    home: Arrays  # rows of gradients of what started
    read: Arrays  # rows of what the tail reads
    read_home: Arrays
    sums: Arrays
    totals: tuple[Arrays, Arrays, Arrays]  # gradients of constants, weights, and constants of the tail, of all micro-batches


@dataclass(frozen=True)
class _Chosen:
    """Some of several arrays: those that have a gradient."""

    flags: tuple[bool, ...]

    def of(self, xs: Sequence[Any]) -> Arrays:
        return tuple(x for x, flag in zip(xs, self.flags, strict=True) if flag)

    def into(self, xs: Sequence[Any], values: Sequence[Any]) -> Arrays:
        rest = iter(values)
        return tuple(next(rest) if flag else x for x, flag in zip(xs, self.flags, strict=True))


def _real(xs: Sequence[Any]) -> _Chosen:
    return _Chosen(tuple(jnp.issubdtype(x.dtype, jnp.inexact) for x in xs))


@dataclass
class _Loops:
    """The loops of one step. `wanted`: of which operands, by position, the gradient is wanted."""

    pair: Pair
    operands: Sequence[Any]
    more: Sequence[Any]
    wanted: frozenset[int]
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
        self.onward = [(k, k + 1) for k in range(self.last)]
        self.back = [(k + 1, k) for k in range(self.last)]
        self.round = [*self.back, (0, self.last)]

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
        last, micro_batches = self.last, self.schedule.micro_batches
        me = lax.axis_index(self.names)

        def beginning(s: _State, t: jax.Array) -> tuple[_State, None]:
            return self.ahead(s, t, me)[0], None

        def working(s: _State, t: jax.Array) -> tuple[_State, None]:
            s, found = self.ahead(s, t, me)
            s, own = self.ended(s, t, me, found)
            returned = shifted(s.returned, self.names, self.back)
            cotangents = tuple(jnp.where(me == last, a, b) for a, b in zip(own, returned, strict=True))
            return self.behind(s, t, me, cotangents), None

        def finishing(s: _State, t: jax.Array) -> tuple[_State, None]:
            return self.behind(s, t, me, shifted(s.returned, self.names, self.back)), None

        state, full = self.start(), last + micro_batches
        for tick, first, end in ((beginning, 0, last), (working, last, full), (finishing, full, full + last)):
            state, _ = lax.scan(tick, state, jnp.arange(first, end))
        totals = state.totals
        found = (totals[0], state.home, totals[1], totals[2], state.read_home)
        return state.sums, dict(zip(sorted(self.wanted), (g for some in found for g in some), strict=True))

    def start(self) -> _State:
        """Before the first tick."""
        constants, parts, weights, fixed, read = self.chosen
        row = tuple(zeros_of(x[0])() for x in self.parts)
        # traced to know what is kept, and what comes out
        jax.eval_shape(self.stage_forward, row, self.constants, self.weights)
        jax.eval_shape(self.tail_both, row, tuple(x[0] for x in self.read), self.fixed)
        held = self.schedule.held
        ring = tuple(_rows(zeros(), held) for zeros in self.pullback.kept)
        totals = (_zeros(constants.of(self.constants)), _zeros(weights.of(self.weights)), _zeros(fixed.of(self.fixed)))
        return _State(
            row, self.parts, ring, _real(row).of(row), _zeros(parts.of(self.parts)), self.read, _zeros(read.of(self.read)),
            tuple(zeros() for zeros in self.results), totals,
        )  # fmt: skip

    def ahead(self, s: _State, t: jax.Array, me: jax.Array) -> tuple[_State, Arrays]:
        """The forward pass of a tick, and what it gives."""
        place, number = t % self.schedule.rounds, t - me
        own = taken(s.waiting, place)
        start = tuple(jnp.where(me == 0, a, b) for a, b in zip(own, s.arrived, strict=True))
        works = (number >= 0) & (number < self.schedule.micro_batches)

        def idling(start: Arrays, constants: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
            return start, tuple(zeros() for zeros in self.pullback.kept)

        found, kept = lax.cond(works, self.stage_forward, idling, start, self.constants, self.weights)
        ring = put(s.ring, kept, number % self.schedule.held)  # what lay there is not needed any more, even if this is nothing
        waiting = put(s.waiting, shifted(own, self.names, self.back), place)
        arrived = shifted(found, self.names, self.onward)
        return s._replace(arrived=arrived, waiting=waiting, ring=ring), found

    def stage_forward(self, start: Arrays, constants: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
        """A stage's work on a micro-batch, and what is kept for its backward pass."""
        inner, (chosen, _, stepped, _, _) = _real(start), self.chosen

        def differentiable(a: Arrays, b: Arrays, c: Arrays) -> tuple[Arrays, Arrays]:
            found = self.stage(inner.into(start, a), chosen.into(constants, b), stepped.into(weights, c))
            return inner.of(found), found

        values = (inner.of(start), chosen.of(constants), stepped.of(weights))
        _, pull, found = jax.vjp(differentiable, *values, has_aux=True)
        return found, tuple(self.pullback.apart(pull, [*constants, *weights]))

    def behind(self, s: _State, t: jax.Array, me: jax.Array, cotangents: Arrays) -> _State:
        """The backward pass of a tick, from the gradient of what this stage has handed on."""
        number = t - 2 * self.last + me
        works = (number >= 0) & (number < self.schedule.micro_batches)
        idle = [[zeros_of(x) for x in xs] for xs in (cotangents, *s.totals[:2])]

        def working(kept: Arrays, cotangents: Arrays, given: Sequence[Any]) -> tuple[Arrays, ...]:
            return self.pullback.together(kept, dict(enumerate(given)))(cotangents)

        def idling(kept: Arrays, cotangents: Arrays, given: Sequence[Any]) -> tuple[Arrays, ...]:
            return tuple(tuple(zeros() for zeros in some) for some in idle)

        given = [*self.constants, *self.weights]
        kept = taken(s.ring, number % self.schedule.held)
        found, *more = lax.cond(works, working, idling, kept, cotangents, given)
        totals = (_added(s.totals[0], more[0]), _added(s.totals[1], more[1]), s.totals[2])
        place = (t - 2 * self.last) % self.schedule.rounds
        inner = _real(self.parts)
        wanted = self.chosen[1].of(inner.into(self.parts, found))
        left = tuple(jnp.where(me == 0, a, b) for a, b in zip(wanted, taken(s.home, place), strict=True))
        home = put(s.home, shifted(left, self.names, self.round), place)
        return s._replace(returned=found, home=home, totals=totals)

    def ended(self, s: _State, t: jax.Array, me: jax.Array, found: Arrays) -> tuple[_State, Arrays]:
        """The tail of a tick, and the gradient of what the last stage has found."""
        place = (t - self.last) % self.schedule.rounds
        item = shifted(taken(s.read, place), self.names, self.round)
        inner, read = _real(found), self.chosen[4]
        idle = [self.results, *([zeros_of(x) for x in xs] for xs in (inner.of(found), read.of(item), s.totals[2]))]

        def idling(found: Arrays, item: Arrays, fixed: Arrays) -> tuple[Arrays, ...]:
            return tuple(tuple(zeros() for zeros in some) for some in idle)

        results, cotangents, read_too, more = lax.cond(me == self.last, self.tail_both, idling, found, item, self.fixed)
        passing = shifted(taken(s.read_home, place), self.names, self.back)
        left = tuple(jnp.where(me == self.last, a, b) for a, b in zip(read_too, passing, strict=True))
        s = s._replace(read=put(s.read, item, place), read_home=put(s.read_home, left, place), sums=_added(s.sums, results))
        return s._replace(totals=(*s.totals[:2], _added(s.totals[2], more))), cotangents

    def tail_both(self, found: Arrays, item: Arrays, fixed: Arrays) -> tuple[Arrays, Arrays, Arrays, Arrays]:
        """The tail of a micro-batch: its results, and the gradients of what the last stage gave, of what is read, of constants."""
        inner, (_, _, _, chosen, read) = _real(found), self.chosen

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
