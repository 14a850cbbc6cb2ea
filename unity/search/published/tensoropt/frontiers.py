"""Cost frontiers, and what TensorOpt does with them (section 3.2): product, union and reduce.

A table holds a frontier for every configuration of an operator, F(o_i, s), or for every pair of configurations at the ends of an
edge, F(e_ij, s, p). `combined` is product, union and reduce in one, named like an einsum: "hi,ij->hj" takes the product where the
configurations of i agree, and the union over them. Equations (4) to (7) and line 6 of algorithm 3 are such combinations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unity.search.problem import Array, Cost

CHUNK = 4_000_000  # strategy tuples that are looked at together: some hundred megabytes
CELLS = 64  # parts into which the memory of an entry's tuples is cut, to leave most of them out before they are sorted
SORTED = 20_000  # tuples that are sorted at once without that


@dataclass(frozen=True, eq=False)
class Frontiers:
    """A frontier for each entry of a table: strategy tuples, entry after entry, in each by ascending memory and descending time.

    `time` in seconds and `memory` in bytes on one device, [tuples]. `back` says for unrolling what each tuple was made of, an array
    [tuples] for each table: its tuple there. Of what nothing was eliminated from (`initial`), it is the alternative that was taken.
    Tables with equal keys are equal.
    """

    key: str
    shape: tuple[int, ...]
    entry: Array  # [tuples], of the flattened table
    time: Array
    memory: Array
    back: tuple[Array, ...]

    def __len__(self) -> int:
        return len(self.entry)

    @cached_property
    def at(self) -> tuple[Array, ...]:
        """Where each tuple is, an index for every axis."""
        return np.unravel_index(self.entry, self.shape) if self.shape else ()

    @cached_property
    def feasible(self) -> Array:
        """Which entries have any tuple."""
        found = np.zeros(int(np.prod(self.shape, dtype=int)), bool)
        found[self.entry] = True
        return found.reshape(self.shape)


def named(*parts: object) -> str:
    """A key for what is made of these."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def initial(cost: Cost, most: int | None) -> Frontiers:
    """The frontiers of one of the problem's tables (initialization): of each entry, the alternatives that no other beats."""
    alternative, *where = np.nonzero(np.isfinite(cost.time))
    entry = np.ravel_multi_index(where, cost.sizes)
    rows = (alternative, *where)
    time, memory = cost.time[rows], cost.memory[rows]
    kept = thinned(entry, memory, reduced(entry, time, memory, int(np.prod(cost.sizes))), most)
    return Frontiers(named(cost.key, most), cost.sizes, entry[kept], time[kept], memory[kept], (alternative[kept],))


def one() -> Frontiers:
    """A table without axes, of one strategy that costs nothing."""
    zero = np.zeros(1)
    return Frontiers("one", (), np.zeros(1, np.int64), zero, zero, ())


def reduced(entry: Array, time: Array, memory: Array, entries: int) -> Array:
    """The positions of the tuples that no other of their entry beats (algorithm 1), by entry and ascending memory.

    Of equal tuples the first is kept. Sorting is what takes time, so most of many tuples are left out before: those that are no
    faster than one of their entry that needs less memory, by more than a cell of it.
    """
    left = np.arange(len(entry))
    if len(entry) > SORTED:
        left = left[~_beaten(entry, time, memory, entries)]
        entry, time, memory = entry[left], time[left], memory[left]
    order = np.lexsort((time, memory, entry))
    # The running minimum of the time must start anew at every entry: as ranks, later entries are lower throughout.
    rank = np.empty(len(order), np.int64)
    rank[np.argsort(time[order], kind="stable")] = np.arange(len(order))  # of equal times the first is the lowest
    number = np.cumsum(np.diff(entry[order], prepend=-1) > 0)
    level = rank - number * (len(rank) + 1)
    keep = np.ones(len(level), bool)
    keep[1:] = level[1:] < np.minimum.accumulate(level)[:-1]
    return left[order[keep]]


def _beaten(entry: Array, time: Array, memory: Array, entries: int) -> Array:
    """Some of the tuples that others beat: a cell of higher memory begins where all of a lower one's end."""
    low, high = np.full(entries, np.inf), np.full(entries, -np.inf)
    np.minimum.at(low, entry, memory)
    np.maximum.at(high, entry, memory)
    scale = np.zeros(entries)
    np.divide(CELLS * (1 - 1e-9), high - low, out=scale, where=high > low)
    cell = ((memory - low[entry]) * scale[entry]).astype(np.int64)
    best = np.full((entries, CELLS + 1), np.inf)
    np.minimum.at(best.reshape(-1), entry * (CELLS + 1) + cell + 1, time)
    return time >= np.minimum.accumulate(best, axis=1)[entry, cell]


def thinned(entry: Array, memory: Array, kept: Array, most: int | None) -> Array:
    """Of the tuples at `kept`, as `reduced` gives them, at most so many of each entry, its first and its last among them."""
    if most is None or not len(kept):
        return kept
    of = entry[kept]
    start = np.flatnonzero(np.diff(of, prepend=-1) > 0)
    count = np.diff(start, append=len(of))
    if count.max() <= most:
        return kept
    first, size = np.repeat(start, count), np.repeat(count, count)
    position = np.arange(len(of)) - first
    steps = np.maximum(size - 1, 1)
    even = (position * (most - 1)) // steps > ((position - 1) * (most - 1)) // steps
    return kept[(size <= most) | (position == 0) | even]


def combined(a: Frontiers, b: Frontiers, axes: str, most: int | None) -> Frontiers:
    """The product of the entries of two tables that agree on the axes they share, and the union over axes that the result lacks.

    `axes`: as in "hi,ij->hj". Each entry keeps at most `most` tuples, evenly spread between the leanest and the fastest.
    """
    given, result = axes.split("->")
    of_a, of_b = given.split(",")
    shape = tuple(a.shape[of_a.index(x)] if x in of_a else b.shape[of_b.index(x)] for x in result)
    stride = {x: int(np.prod(shape[k + 1 :], dtype=np.int64)) for k, x in enumerate(result)}
    base_a = _weighted(a, of_a, {x: stride[x] for x in of_a if x in stride})
    base_b = _weighted(b, of_b, {x: stride[x] for x in of_b if x in stride and x not in of_a})
    entries, found = int(np.prod(shape, dtype=np.int64)), list[tuple[Array, ...]]()
    for left, right in _agreeing(a, of_a, b, of_b, np.argsort(base_a, kind="stable")):
        entry = base_a[left] + base_b[right]
        time, memory = a.time[left] + b.time[right], a.memory[left] + b.memory[right]
        kept = reduced(entry, time, memory, entries)
        found.append((entry[kept], time[kept], memory[kept], left[kept], right[kept]))
    entry, time, memory, left, right = (np.concatenate(part) for part in zip(*found, strict=True))
    kept = reduced(entry, time, memory, entries) if len(found) > 1 else np.arange(len(entry))
    kept = thinned(entry, memory, kept, most)
    key = named(a.key, b.key, axes, most)
    return Frontiers(key, shape, entry[kept], time[kept], memory[kept], (left[kept], right[kept]))


def _weighted(table: Frontiers, axes: str, strides: dict[str, int]) -> Array:
    """Of every tuple, the sum of its indices on some axes, each times its stride."""
    total = np.zeros(len(table), np.int64)
    for x, stride in strides.items():
        total += table.at[axes.index(x)] * stride
    return total


def _agreeing(a: Frontiers, of_a: str, b: Frontiers, of_b: str, order: Array) -> Iterator[tuple[Array, Array]]:
    """All pairs of tuples that agree on the axes that both have, a chunk at a time; `order`: in which those of a are taken."""
    sizes = {x: a.shape[of_a.index(x)] for x in of_a if x in of_b}
    strides, keys = dict[str, int](), 1
    for x, n in sizes.items():
        strides[x], keys = keys, keys * n
    key_a, key_b = _weighted(a, of_a, strides)[order], _weighted(b, of_b, strides)
    sorted_b = np.argsort(key_b, kind="stable")
    count_b = np.bincount(key_b, minlength=keys)
    start_b = np.cumsum(count_b) - count_b
    pairs = count_b[key_a]
    total = np.cumsum(pairs)
    cuts = np.searchsorted(total, np.arange(CHUNK, int(total[-1]) if len(total) else 0, CHUNK))
    for some in np.split(np.arange(len(order)), np.unique(cuts)):
        n = pairs[some]
        left = np.repeat(some, n)
        within = np.arange(len(left)) - np.repeat(np.cumsum(n) - n, n)
        yield order[left], sorted_b[start_b[key_a[left]] + within]


def chosen(table: Frontiers, axes: Sequence[int | None]) -> Frontiers:
    """The part of a table where some axes have a given index; those axes are gone."""
    keep = np.ones(len(table), bool)
    for axis, index in enumerate(axes):
        keep &= True if index is None else table.at[axis] == index
    rows = np.flatnonzero(keep)
    left = [k for k, index in enumerate(axes) if index is None]
    shape = tuple(table.shape[k] for k in left)
    entry = np.ravel_multi_index([table.at[k][rows] for k in left], shape) if left else np.zeros(len(rows), np.int64)
    return Frontiers(named(table.key, tuple(axes)), shape, entry, table.time[rows], table.memory[rows], (rows,))


def expanded(table: Frontiers, axis: int, index: Array) -> Frontiers:
    """The table whose entries along an axis are those at `index`, in that order; an entry may come any number of times."""
    moved = np.moveaxis(np.arange(int(np.prod(table.shape))).reshape(table.shape), axis, 0)[index]
    old = np.moveaxis(moved, 0, axis)
    count = np.bincount(table.entry, minlength=int(np.prod(table.shape)))
    first = np.cumsum(count) - count
    n = count[old.reshape(-1)]
    entry = np.repeat(np.arange(old.size), n)
    rows = np.repeat(first[old.reshape(-1)], n) + np.arange(len(entry)) - np.repeat(np.cumsum(n) - n, n)
    key = named(table.key, axis, hashlib.blake2b(np.ascontiguousarray(index).tobytes(), digest_size=12).hexdigest())
    return Frontiers(key, old.shape, entry, table.time[rows], table.memory[rows], (rows,))
