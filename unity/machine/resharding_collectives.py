"""The collectives of changes from one type to another: one vectorized pass over many pairs of types.

All pairs go together through the steps that `pcg.parallel.resharding.steps` lists for one pair. Each pair is a column, and a
step adds its collective to the columns that take part in it. A type is a row of codes, one for each axis: U, R, S, or P + name ·
OUTERS + the number of its inner digit, with the names that `resharding_tables` gives the dimensions of a pair.

A collective is a number too, of what its price depends on (`CollectiveNumbers`), and a pair's collectives forward and backward are
columns of such numbers. What they take is looked up for the bytes of each tensor, because libraries choose by size how they send.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce

import numpy as np

from unity.machine.collectives import KINDS, group_sizes, most_merged, table
from unity.machine.machine import Machine
from unity.pcg.parallel.resharding import SLICING
from unity.pcg.types.parallel_type import Digit

Array = np.ndarray

FIRST = 0  # the name of the first dimension
U, R, S, P = range(4)
UNPLACED = (U, R, S)
KIND = {"U": U, "R": R, "S": S, "P": P}
# The states from which a step leads to a partitioned one, and the order of such steps where slicing is late.
FROM = {"partition": (U, R), "reduce_partition": (S,), "combine_partition": (P,)}
LATE = ("reduce_partition", "partition", "combine_partition")
OUTERS = 1 << 10  # inner digits that a code can tell apart
NOWHERE = 1 << 30  # a level beyond all levels


class CollectiveNumbers:
    """Numbers for the collectives of changes, which say all that prices depend on; 0 stands for none.

    That is the kind, whether it turns the tensor, whether it sends partial sums, the group's size on each level, and the parts that
    the tensor is in meanwhile.

    Args:
        machine: the machine.
        growth: the factor by which partial sums are larger (`pcg.types.accumulation`).
    """

    def __init__(self, machine: Machine, growth: float = 1.0) -> None:
        self.machine, self.growth = machine, growth
        sizes = [
            group_sizes(machine, (a for k, a in enumerate(machine.axes) if mask >> k & 1)) for mask in range(1 << len(machine.axes))
        ]
        first = {group: mask for mask, group in reversed(list(enumerate(sizes)))}
        self.group = np.array([first[group] for group in sizes])  # the first set of axes with the same sizes, for each
        self.parts = machine.devices + 1

    def number(self, kind: str, group: Array, parts: Array, turned: Array, summed: Array) -> Array:
        """Return the numbers of collectives of one kind over sets of axes, 0 over none. `parts`: those of the tensor meanwhile."""
        flags = (KINDS.index(kind) * 2 + turned) * 2 + summed
        number = (flags * len(self.group) + self.group[group]) * self.parts + parts
        return np.where(group == 0, 0, number)

    def seconds(self, numbers: Array, nbytes: int) -> Array:
        """Return the seconds of collectives alone, and merged with others, [2, collectives].

        Args:
            numbers: their numbers.
            nbytes: the bytes of the whole tensor.
        """
        rest, parts = np.divmod(numbers, self.parts)
        flags, group = np.divmod(rest, len(self.group))
        size = np.where(flags % 2 == 1, self.growth, 1.0) * nbytes / np.maximum(parts, 1)
        result, most = np.zeros((2, len(numbers))), most_merged(self.machine)
        for flag in np.unique(flags):
            kind, turned, rows = KINDS[flag >> 2], bool(flag >> 1 & 1), flags == flag
            prices = table(self.machine, kind, turned)
            result[0, rows] = prices.seconds(group[rows], size[rows])
            result[1, rows] = prices.merged_seconds(group[rows], size[rows], most)
        return np.where(numbers == 0, 0.0, result)


class ChangePass:
    """A pass of all pairs through `pcg.parallel.resharding.steps`.

    A pair is a column of every array; `rows` are the numbers of the pairs that take part in a step.

    Args:
        collectives: the numbers of collectives.
        outers: the inner digits, by the numbers that codes contain.
        old, new: the codes of the types before and after, [types, axes].
        pairs: the numbers of the old and the new type of each pair, [2, pairs].
    """

    def __init__(self, collectives: CollectiveNumbers, outers: Sequence[int], old: Array, new: Array, pairs: Array) -> None:
        self.collectives, axes = collectives, collectives.machine.axes
        self.axes = range(len(axes))
        self.pairs = pairs.shape[1]
        self.sizes = np.array([a.size for a in axes], np.int64)
        self.levels = np.array([a.level for a in axes])
        digits = [_digits(codes, outers, [a.size for a in axes]) for codes in (old, new)]
        places = np.unique(np.concatenate([d[d >= 0] for d in digits]))
        now, goal = (np.where(d >= 0, np.searchsorted(places, d), d).T for d in digits)
        self.now, self.goal = now.take(pairs[0], 1), goal.take(pairs[1], 1)  # the state of each axis now, and its goal
        self.start = self.now.copy()
        self.turning = np.append(places >> 48 != FIRST, [False] * len(UNPLACED))
        self.bits, self.clash = _bits(tuple(places.tolist()))
        self.parts = np.prod(np.where(self.now >= 0, self.sizes[:, None], 1), axis=0)
        self.sent = {name: np.zeros((most_collectives(axes), self.pairs), np.int64) for name in ("forward", "backward")}
        self.count = {name: np.zeros(self.pairs, int) for name in self.sent}
        self.merged = np.zeros(self.pairs, np.int64)
        self.gathered = np.zeros(self.pairs, np.int64)

    def run(self) -> Array:
        """Run all pairs. Returns the fields of their changes, [fields, pairs].

        They are the numbers of the collectives forward, of those backward, and of the one of these that may be merged; the parts
        that the tensor is in afterwards, 0 where no new buffer is made; and whether some step gathers.
        """
        rows = np.flatnonzero((self.now != self.goal).any(0))
        everything = rows
        while len(rows):
            self.slice_all(rows)
            rows = self.gather_blocking_axes(rows)
        self.finish(everything)
        unused, replicated = ((_are(self.start, a) & _are(self.goal, b)) for a, b in ((U, R), (R, U)))
        moved = (self.start != self.goal) & ~unused & ~replicated
        parts = np.where(moved.any(0), self.parts, 0)
        sent = (np.sort(numbers, axis=0) for numbers in self.sent.values())
        return np.concatenate([*sent, np.stack([self.merged, parts, self.gathered])])

    def slice_all(self, rows: Array) -> None:
        """Make slices, reduce-scatters and all-to-alls as long as any pair has an axis that is free to be partitioned."""
        while len(rows := rows[self.free(rows).any(0)]):
            now, goal = self.now.take(rows, 1), self.goal.take(rows, 1) >= 0
            sliced, summed = (self.outermost(_are(now, k) & goal) for k in (U, S))
            late = sliced < np.where(summed == NOWHERE, -1, summed)
            for chosen, order in ((rows[~late], SLICING), (rows[late], LATE)):
                for name in order:
                    self.slice(name, chosen)

    def slice(self, name: str, rows: Array) -> None:
        """Make one kind of step that partitions axes, wherever an axis is free."""
        if not len(rows):
            return
        now = self.now.take(rows, 1)
        chosen = self.free(rows) & reduce(np.logical_or, (_are(now, kind) for kind in FROM[name]))
        some = np.flatnonzero(chosen.any(0))
        rows, chosen = rows[some], chosen.take(some, 1)
        if name == "partition":
            replicated = _are(now.take(some, 1), R)
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

    def gather_blocking_axes(self, rows: Array) -> Array:
        """Gather along one axis of each pair in which a slice is in the way of others. Returns these pairs."""
        now, goal = self.now.take(rows, 1), self.goal.take(rows, 1)
        done = now == goal
        stuck = ~done & (now >= 0) & self.overlap(now, np.where(done, ~U, goal))
        some = np.flatnonzero(stuck.any(0))
        rows, stuck = rows[some], stuck.take(some, 1)
        order = self.levels * len(self.levels) + np.array(self.axes)
        last = np.argmax(np.where(stuck, order[:, None], -1), axis=0) if len(rows) else np.zeros(0, int)
        chosen = np.arange(len(self.levels))[:, None] == last
        goal = self.goal.take(rows, 1)
        to_unused, to_sum = chosen & _are(goal, U), chosen & _are(goal, S)
        self.gather(rows, to_unused, U)
        self.gather(rows, chosen & ~to_unused & ~to_sum, R)
        self.become(rows, to_sum, S)
        return rows

    def finish(self, rows: Array) -> None:
        """Reduce partial sums, and gather or replicate whatever is not to stay partitioned."""
        goal = self.goal.take(rows, 1)
        chosen = _are(self.now.take(rows, 1), S) & ~_are(goal, S)
        self.add("forward", "all-reduce", rows, chosen)
        self.become(rows, chosen, U)
        self.become(rows, _are(self.now.take(rows, 1), R) & _are(goal, U), U)
        chosen = _are(self.now.take(rows, 1), U) & _are(goal, R)
        self.become(rows, chosen, R)
        self.merged[rows] = self.add("backward", "all-reduce", rows, chosen)
        now = self.now.take(rows, 1) >= 0
        to_r, to_u = now & _are(goal, R), now & _are(goal, U)
        first = self.outermost(to_u) < self.outermost(to_r)
        self.gather(rows, to_u & first, U)
        self.gather(rows, to_r, R)
        self.gather(rows, to_u & ~first, U)
        self.become(rows, ~_are(self.now.take(rows, 1), S) & _are(goal, S), S)

    def free(self, rows: Array) -> Array:
        """Return `pcg.parallel.resharding.free` for every axis, [axes, rows]."""
        now, goal = self.now.take(rows, 1), self.goal.take(rows, 1)
        return (goal >= 0) & (now != goal) & ~self.overlap(goal, now)

    def overlap(self, positions: Array, others: Array) -> Array:
        """Return whether each slice position overlaps one of the others in its row, [axes, rows]."""
        overlaps = np.zeros(positions.shape, bool)
        for single, clash in zip(self.bits, self.clash, strict=True):
            overlaps |= (clash[positions] & np.bitwise_or.reduce(single[others], axis=0)) != 0
        return overlaps

    def outermost(self, chosen: Array) -> Array:
        """Return the slowest level among the chosen axes of every pair."""
        return np.where(chosen, self.levels[:, None], NOWHERE).min(0, initial=NOWHERE)

    def add(self, name: str, kind: str, rows: Array, chosen: Array, turned: Array | bool = False) -> Array:
        """Add a collective over the chosen axes of every row. Returns its numbers. `turned`: whether it turns the tensor, by row.

        Call it while the affected axes are in the state of the partial sum: before a change in the forward pass, and after they
        have become replicated in the backward pass.
        """
        if not len(rows):
            return np.zeros(0, np.int64)
        turned = np.asarray(turned, np.int64)
        summed = np.asarray(_are(self.now.take(rows, 1), S if name == "forward" else R).any(0))
        numbers = self.collectives.number(kind, self.mask(chosen), self.parts[rows], turned, summed)
        self.sent[name][self.count[name][rows], rows] = numbers
        self.count[name][rows] += numbers != 0
        return numbers

    def turned(self, positions: Array, rows: Array, chosen: Array) -> Array:
        """Return for each row whether a chosen axis partitions another dimension than the first (`resharding.turned`)."""
        return np.any(chosen & self.turning[positions.take(rows, 1)], axis=0)

    def mask(self, chosen: Array) -> Array:
        """Return the chosen axes of every pair as bits."""
        return (chosen.astype(np.int64) << np.array(self.axes, np.int64)[:, None]).sum(0)

    def become(self, rows: Array, chosen: Array, kind: int) -> None:
        """Set the state of the chosen axes, for P to the goal, and update the number of the tensor's parts."""
        if not len(rows):
            return
        now, size = self.now.take(rows, 1), self.sizes[:, None]
        changed = np.where(chosen & ((now < 0) if kind == P else (now >= 0)), size, 1).prod(0)
        self.parts[rows] = self.parts[rows] * changed if kind == P else self.parts[rows] // changed
        self.now[:, rows] = np.where(chosen, self.goal.take(rows, 1) if kind == P else ~kind, now)

    def gather(self, rows: Array, chosen: Array, kind: int) -> None:
        """Gather along the chosen axes, which become unused or replicated."""
        some = np.flatnonzero(chosen.any(0))
        rows, chosen = rows[some], chosen.take(some, 1)
        turned = self.turned(self.now, rows, chosen)
        self.become(rows, chosen, kind)
        self.add("forward", "all-gather", rows, chosen, turned)
        if kind == R:
            self.add("backward", "reduce-scatter", rows, chosen, turned)
        self.gathered[rows] = True


def most_collectives(axes: Sequence[object]) -> int:
    """Return the most collectives that a change sends in one direction: an axis takes part in two at most."""
    return 2 * len(axes) + 1


def _are(now: Array, kind: int) -> Array:
    """Return which axes are in a state of a kind. A slice position is a number from 0, another state the complement of its kind."""
    return now >= 0 if kind == P else now == ~kind


def _digits(codes: Array, outers: Sequence[int], sizes: Sequence[int]) -> Array:
    """Pack absolute slice positions into numbers, and other states into the complements of their codes, [types, axes]."""
    codes = codes.astype(np.int64)
    name, outer = np.divmod(np.maximum(codes - P, 0), OUTERS)
    absolute = np.array(outers, np.int64)[outer]
    for k in range(codes.shape[1]):
        for j in range(k):
            absolute[:, k] *= np.where(codes[:, j] == codes[:, k], sizes[j], 1)
    return np.where(codes >= P, name << 48 | absolute << 16 | np.array(sizes, np.int64), ~codes)


@lru_cache(maxsize=64)
def _bits(places: tuple[int, ...]) -> tuple[Array, Array]:
    """Return each packed slice position as a bit set, and the bit set of the positions it overlaps.

    Both are [words, positions + UNPLACED]; the last columns, of the states without a position, are empty.
    """
    digits = [Digit(p >> 48, p >> 16 & 0xFFFFFFFF, p & 0xFFFF) for p in places]
    words = len(digits) // 64 + 1
    single, clash = (np.zeros((words, len(digits) + len(UNPLACED)), np.uint64) for _ in range(2))
    for i in range(len(digits)):
        single[i // 64, i] = np.uint64(1 << i % 64)
    for i, a in enumerate(digits):
        clash[:, i] = np.bitwise_or.reduce([single[:, j] for j, b in enumerate(digits) if a.overlaps(b)], axis=0)
    return single, clash
