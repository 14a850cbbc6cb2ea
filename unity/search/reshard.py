"""What it costs to change types: the sequence of `pcg.resharding`, priced for all pairs of types at once.

Every step is one collective whose time is alpha + beta · bytes, so a change costs a + b · (bytes of the whole tensor), with
coefficients that depend on the two types only. They are computed once for a set of types and used for every tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from unity.pcg.axis import Axis
from unity.pcg.resharding import IMPOSSIBLE, SLICING
from unity.pcg.state import Digit, Type, digits
from unity.search.collectives import table
from unity.search.machine import Machine

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Changes:
    """Coefficients for every pair (from, to). Seconds are `alpha + beta · nbytes` with the whole tensor's bytes."""

    forward: tuple[Array, Array]
    backward: tuple[Array, Array]
    gathers: tuple[Array, Array]  # the forward all-gathers alone: what gathering again costs
    size: Array  # what one device holds afterwards, as a fraction of the tensor; 0 where no new buffer is made
    gathered: Array  # whether anything is gathered
    possible: Array


@cache
def changes(machine: Machine, before: tuple[Type, ...], after: tuple[Type, ...]) -> Changes:
    """The coefficients of all changes between two sets of types on a machine's axes."""
    return _Pricing(machine, before, after).run()


U, R, S, P = range(4)
KIND = {"U": U, "R": R, "S": S, "P": P}
FROM = {"partition": (U, R), "reduce_partition": (S,), "combine_partition": (P,)}
LATE = ("reduce_partition", "partition", "combine_partition")


class _Pricing:
    """Follows all pairs through `pcg.resharding.steps`. A pair is a column; `rows` are the pairs that take part in a step."""

    def __init__(self, machine: Machine, before: tuple[Type, ...], after: tuple[Type, ...]) -> None:
        self.machine, axes = machine, machine.axes
        self.axes = range(len(axes))
        numbers: dict[Digit, int] = {}
        old, new = _codes(before, axes, numbers), _codes(after, axes, numbers)
        self.shape = (len(before), len(after))
        self.pairs = len(before) * len(after)
        self.kind, self.held = (np.repeat(x, len(after), axis=1) for x in old)
        self.goal_kind, self.goal = (np.tile(x, (1, len(before))) for x in new)
        self.start = (self.kind.copy(), self.held.copy())
        self.bits, self.clash = _bits(list(numbers))
        self.sizes = np.array([a.size for a in axes], float)
        self.levels = np.array([a.level for a in axes])
        self.fraction = np.prod(np.where(self.kind == P, 1 / self.sizes[:, None], 1.0), axis=0)
        self.cost = {name: [np.zeros(self.pairs), np.zeros(self.pairs)] for name in ("forward", "backward", "gathers")}
        self.gathered = np.zeros(self.pairs, bool)

    def run(self) -> Changes:
        possible = np.ones(self.pairs, bool)
        for a, b in IMPOSSIBLE:
            possible &= ~((self.kind == KIND[a]) & (self.goal_kind == KIND[b])).any(0)
        rows = np.flatnonzero(possible & ~self.done(np.arange(self.pairs)).all(0))
        everything = rows
        while len(rows):
            self.slice_all(rows)
            rows = self.gather_what_is_in_the_way(rows)
        self.finish(everything)
        kind, held = self.start
        moved = ((kind != self.goal_kind) | (held != self.goal)) & ~((kind == U) & (self.goal_kind == R))
        f, b, g = ((x[0].reshape(self.shape), x[1].reshape(self.shape)) for x in self.cost.values())
        size = np.where(moved.any(0), self.fraction, 0.0)
        return Changes(f, b, g, size.reshape(self.shape), self.gathered.reshape(self.shape), possible.reshape(self.shape))

    def slice_all(self, rows: Array) -> None:
        """Slices, reduce-scatters and all-to-alls, as long as any pair has an axis that is free to move."""
        while len(rows := rows[self.free(rows).any(0)]):
            kind, goal = self.kind[:, rows], self.goal_kind[:, rows] == P
            sliced, summed = (self.outermost((kind == k) & goal) for k in (U, S))
            late = sliced < np.where(summed == NOWHERE, -1, summed)
            for chosen, order in ((rows[~late], SLICING), (rows[late], LATE)):
                for name in order:
                    self.slice(name, chosen)

    def slice(self, name: str, rows: Array) -> None:
        chosen = self.free(rows) & np.isin(self.kind[:, rows], FROM[name])
        rows, chosen = rows[chosen.any(0)], chosen[:, chosen.any(0)]
        if name == "partition":
            replicated = self.kind[:, rows] == R
            self.become(rows, chosen & replicated, P)
            self.add("backward", "all-gather", rows, chosen & ~replicated)
            self.become(rows, chosen & ~replicated, P)
        elif name == "reduce_partition":
            self.add("forward", "reduce-scatter", rows, chosen)
            self.add("backward", "all-gather", rows, chosen)
            self.become(rows, chosen, P)
        else:
            self.add("forward", "all-to-all", rows, chosen)
            self.add("backward", "all-to-all", rows, chosen)
            self.become(rows, chosen, P)

    def gather_what_is_in_the_way(self, rows: Array) -> Array:
        """One gather for each pair that is stuck; those pairs."""
        done = self.done(rows)
        wanted = self.union(np.where(done, -1, self.goal[:, rows]))
        stuck = ~done & (self.kind[:, rows] == P) & (self.clash[self.held[:, rows]] & wanted).any(-1)
        rows, stuck = rows[stuck.any(0)], stuck[:, stuck.any(0)]
        order = self.levels * len(self.levels) + np.array(self.axes)
        last = np.argmax(np.where(stuck, order[:, None], -1), axis=0) if len(rows) else np.zeros(0, int)
        chosen = np.arange(len(self.levels))[:, None] == last
        to_unused = chosen & (self.goal_kind[:, rows] == U)
        self.gather(rows, to_unused, U)
        self.gather(rows, chosen & ~to_unused, R)
        return rows

    def finish(self, rows: Array) -> None:
        chosen = (self.kind[:, rows] == S) & (self.goal_kind[:, rows] != S)
        self.add("forward", "all-reduce", rows, chosen)
        self.become(rows, chosen, U)
        chosen = (self.kind[:, rows] == U) & (self.goal_kind[:, rows] == R)
        self.add("backward", "all-reduce", rows, chosen)
        self.become(rows, chosen, R)
        held = self.kind[:, rows] == P
        to_r, to_u = held & (self.goal_kind[:, rows] == R), held & (self.goal_kind[:, rows] == U)
        first = self.outermost(to_u) < self.outermost(to_r)
        self.gather(rows, to_u & first, U)
        self.gather(rows, to_r, R)
        self.gather(rows, to_u & ~first, U)

    def done(self, rows: Array) -> Array:
        return (self.kind[:, rows] == self.goal_kind[:, rows]) & (self.held[:, rows] == self.goal[:, rows])

    def free(self, rows: Array) -> Array:
        """`pcg.resharding.free` for every axis, [axes, rows]."""
        held = self.union(self.held[:, rows])
        wants = (self.goal_kind[:, rows] == P) & ~self.done(rows)
        return wants & ~(self.clash[self.goal[:, rows]] & held).any(-1)

    def union(self, places: Array) -> Array:
        """Sets of slice positions as bits, [rows, words], from their numbers [axes, rows]."""
        return np.bitwise_or.reduce(self.bits[places], axis=0)

    def outermost(self, chosen: Array) -> Array:
        """The slowest level among the chosen axes of every pair."""
        return np.where(chosen, self.levels[:, None], NOWHERE).min(0, initial=NOWHERE)

    def add(self, name: str, kind: str, rows: Array, chosen: Array) -> None:
        alpha, beta = table(self.machine, kind)
        mask = (chosen.astype(np.int64) << np.array(self.axes)[:, None]).sum(0)
        self.cost[name][0][rows] += alpha[mask]
        self.cost[name][1][rows] += beta[mask] * self.fraction[rows]

    def become(self, rows: Array, chosen: Array, kind: int) -> None:
        was = self.kind[:, rows] == P
        size = self.sizes[:, None]
        change = np.where(chosen & ~was, 1 / size, 1.0) if kind == P else np.where(chosen & was, size, 1.0)
        self.fraction[rows] *= change.prod(0)
        self.kind[:, rows] = np.where(chosen, kind, self.kind[:, rows])
        self.held[:, rows] = np.where(chosen, self.goal[:, rows] if kind == P else -1, self.held[:, rows])

    def gather(self, rows: Array, chosen: Array, kind: int) -> None:
        rows, chosen = rows[chosen.any(0)], chosen[:, chosen.any(0)]
        self.become(rows, chosen, kind)
        self.add("forward", "all-gather", rows, chosen)
        self.add("gathers", "all-gather", rows, chosen)
        if kind == R:
            self.add("backward", "reduce-scatter", rows, chosen)
        self.gathered[rows] = True


NOWHERE = 1 << 30  # a level beyond all levels


def _codes(types: Sequence[Type], axes: Sequence[Axis], numbers: dict[Digit, int]) -> tuple[Array, Array]:
    """Kinds, and numbered slice positions (-1: none), both [axes, types]."""
    kinds = np.array([[KIND[s.kind] for s in t] for t in types], np.int8).reshape(len(types), len(axes))
    found = [[-1 if d is None else numbers.setdefault(d, len(numbers)) for d in digits(t, axes)] for t in types]
    return kinds.T, np.array(found, np.int16).reshape(len(types), len(axes)).T


def _bits(found: list[Digit]) -> tuple[Array, Array]:
    """Every slice position as a set of one, and the set of those that it overlaps; both [positions + 1, words], the last empty."""
    words = len(found) // 64 + 1
    single, clash = (np.zeros((len(found) + 1, words), np.uint64) for _ in range(2))
    for i, a in enumerate(found):
        single[i, i // 64] = np.uint64(1 << i % 64)
    for i, a in enumerate(found):
        clash[i] = np.bitwise_or.reduce([single[j] for j, b in enumerate(found) if a.overlaps(b)], axis=0)
    return single, clash
