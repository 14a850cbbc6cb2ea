"""The price of changing one type into another, for many pairs of types at once.

All pairs are followed together through the sequence that `pcg.resharding.steps` gives for one: a pair is a column, and every step
adds its collective's alpha and beta to the pairs that take part in it. Types are rows of codes, one for each axis: U, R, S, or
P + name · OUTERS + the number of its outer, where names are those that `search.reshard` gives the dimensions of a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce

import numpy as np

from unity.pcg.resharding import IMPOSSIBLE, SLICING
from unity.pcg.state import Digit
from unity.search.collectives import table
from unity.search.machine import Machine

Array = np.ndarray

FIRST = 0  # the name of the first dimension
U, R, S, P = range(4)
KIND = {"U": U, "R": R, "S": S, "P": P}
FROM = {"partition": (U, R), "reduce_partition": (S,), "combine_partition": (P,)}
LATE = ("reduce_partition", "partition", "combine_partition")
OUTERS = 1 << 10  # inner digits that a code can tell apart
FIELDS = 8  # of a priced change
NOWHERE = 1 << 30  # a level beyond all levels


class Pricing:
    """Follows all pairs through `pcg.resharding.steps`. A pair is a column; `rows` are the pairs that take part in a step."""

    def __init__(self, machine: Machine, outers: Sequence[int], old: Array, new: Array, pairs: Array) -> None:
        self.machine, axes = machine, machine.axes
        self.axes = range(len(axes))
        self.pairs = pairs.shape[1]
        self.sizes = np.array([a.size for a in axes], float)
        self.levels = np.array([a.level for a in axes])
        found, kinds = [], []
        for codes in (old, new):
            kind, digit = _digits(codes, outers, [a.size for a in axes])
            kinds.append(kind)
            found.append(digit)
        places = np.unique(np.concatenate([d[d >= 0] for d in found]))
        held, goal = (np.where(d >= 0, np.searchsorted(places, d), -1).T for d in found)
        self.kind, self.goal_kind = kinds[0].T[:, pairs[0]], kinds[1].T[:, pairs[1]]
        self.held, self.goal = held[:, pairs[0]], goal[:, pairs[1]]
        self.start = (self.kind.copy(), self.held.copy())
        self.turning = np.append(places >> 48 != FIRST, False)  # by position; the last is none
        self.bits, self.clash = _bits(tuple(places.tolist()))
        self.fraction = np.prod(np.where(self.kind == P, 1 / self.sizes[:, None], 1.0), axis=0)
        self.cost = {name: [np.zeros(self.pairs), np.zeros(self.pairs)] for name in ("forward", "backward")}
        self.merged = np.zeros(self.pairs)
        self.gathered = np.zeros(self.pairs, bool)

    def run(self) -> Array:
        """The fields of `reshard.Changes`, [FIELDS, pairs]."""
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
        size = np.where(moved.any(0), self.fraction, 0.0)
        return np.stack([*(x for line in self.cost.values() for x in line), self.merged, size, self.gathered, possible])

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
        chosen = self.free(rows) & reduce(np.logical_or, (self.kind[:, rows] == kind for kind in FROM[name]))
        rows, chosen = rows[chosen.any(0)], chosen[:, chosen.any(0)]
        if name == "partition":
            replicated = self.kind[:, rows] == R
            self.become(rows, chosen & replicated, P)
            turned = self.turned(self.goal, rows, chosen & ~replicated)
            self.add("backward", "all-gather", rows, chosen & ~replicated, turned)
            self.become(rows, chosen & ~replicated, P)
        elif name == "reduce_partition":
            turned = self.turned(self.goal, rows, chosen)
            self.add("forward", "reduce-scatter", rows, chosen, turned)
            self.add("backward", "all-gather", rows, chosen, turned)
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
        self.merged[rows] += table(self.machine, "all-reduce")[0][self.mask(chosen)]
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

    def add(self, name: str, kind: str, rows: Array, chosen: Array, turned: Array | bool = False) -> None:
        """Adds a collective over the chosen axes of every row. `turned`: for each row, whether it is one that turns."""
        mask, turned = self.mask(chosen), np.asarray(turned, int)
        both = (table(self.machine, kind, t) for t in (False, True))
        alpha, beta = (np.stack(column)[turned, mask] for column in zip(*both, strict=True))
        self.cost[name][0][rows] += alpha
        self.cost[name][1][rows] += beta * self.fraction[rows]

    def turned(self, positions: Array, rows: Array, chosen: Array) -> Array:
        """For each row, whether a chosen axis has its position along another dimension than the first: `resharding.turned`."""
        return np.any(chosen & self.turning[positions[:, rows]], axis=0)

    def mask(self, chosen: Array) -> Array:
        """The chosen axes of every pair as bits."""
        return (chosen.astype(np.int64) << np.array(self.axes, np.int64)[:, None]).sum(0)

    def become(self, rows: Array, chosen: Array, kind: int) -> None:
        was = self.kind[:, rows] == P
        size = self.sizes[:, None]
        change = np.where(chosen & ~was, 1 / size, 1.0) if kind == P else np.where(chosen & was, size, 1.0)
        self.fraction[rows] *= change.prod(0)
        self.kind[:, rows] = np.where(chosen, kind, self.kind[:, rows])
        self.held[:, rows] = np.where(chosen, self.goal[:, rows] if kind == P else -1, self.held[:, rows])

    def gather(self, rows: Array, chosen: Array, kind: int) -> None:
        rows, chosen = rows[chosen.any(0)], chosen[:, chosen.any(0)]
        turned = self.turned(self.held, rows, chosen)
        self.become(rows, chosen, kind)
        self.add("forward", "all-gather", rows, chosen, turned)
        if kind == R:
            self.add("backward", "reduce-scatter", rows, chosen, turned)
        self.gathered[rows] = True


def _digits(codes: Array, outers: Sequence[int], sizes: Sequence[int]) -> tuple[Array, Array]:
    """Kinds, and slice positions made absolute and packed into a number (-1: none), both [types, axes]."""
    codes = codes.astype(np.int64)
    kind = np.minimum(codes, P).astype(np.int8)
    name, outer = np.divmod(np.maximum(codes - P, 0), OUTERS)
    absolute = np.array(outers, np.int64)[outer]
    for k in range(codes.shape[1]):
        for j in range(k):
            absolute[:, k] *= np.where(codes[:, j] == codes[:, k], sizes[j], 1)
    return kind, np.where(kind == P, name << 48 | absolute << 16 | np.array(sizes, np.int64), -1)


@lru_cache(maxsize=64)
def _bits(places: tuple[int, ...]) -> tuple[Array, Array]:
    """Slice positions (packed) as sets of one, and the sets of those that they overlap; both [positions + 1, words], the last
    empty."""
    found = [Digit(p >> 48, p >> 16 & 0xFFFFFFFF, p & 0xFFFF) for p in places]
    words = len(found) // 64 + 1
    single, clash = (np.zeros((len(found) + 1, words), np.uint64) for _ in range(2))
    for i in range(len(found)):
        single[i, i // 64] = np.uint64(1 << i % 64)
    for i, a in enumerate(found):
        clash[i] = np.bitwise_or.reduce([single[j] for j, b in enumerate(found) if a.overlaps(b)], axis=0)
    return single, clash
