"""Cost frontiers, and TensorOpt's operations on them (section 3.2): product, union and reduce.

A table holds a frontier for every configuration of an operator, F(o_i, s), or for every pair of configurations at the ends of an
edge, F(e_ij, s, p). `combined` is product, union and reduce in one, with the notation of an einsum: "hi,ij->hj" takes the product
where the configurations of i agree, and the union over them. Equations (4) to (7) and line 6 of algorithm 3 are such combinations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unity.search.solver.problem import Array, Cost

CHUNK = 100_000  # tuples processed together: a few megabytes, which fit in a cache
CELLS = 64  # cells into which the memory range of an entry is cut, to remove most tuples before sorting
SORTED = 20_000  # up to this many tuples are sorted directly


@dataclass(frozen=True, eq=False)
class Frontiers:
    """A frontier for each entry of a table: tuples, entry after entry, and within an entry by ascending memory and descending time.

    Args:
        key: equal for equal tables.
        shape: the shape of the table.
        entry: the index in the flattened table of each tuple, [tuples].
        time: seconds, [tuples].
        memory: bytes on one device, [tuples].
        back: for unrolling, an array [tuples] for each table from which the tuples were made: the number of the tuple there. In an
            `initial` table it is the alternative that was chosen.
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
        """The position of each tuple, an index for every axis."""
        return np.unravel_index(self.entry, self.shape) if self.shape else ()

    @cached_property
    def first(self) -> Array:
        """The first, and so the leanest, tuple of each entry that has any."""
        return _firsts(self.entry)

    @cached_property
    def count(self) -> Array:
        """The number of tuples of each of these entries. The last one of an entry is the fastest."""
        return np.diff(self.first, append=len(self.entry))

    @cached_property
    def feasible(self) -> Array:
        """Whether each entry has any tuple."""
        mask = np.zeros(int(np.prod(self.shape, dtype=int)), bool)
        mask[self.entry] = True
        return mask.reshape(self.shape)


def named(*parts: object) -> str:
    """Return a key for a value computed from these parts."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def initial(cost: Cost, most: int | None) -> Frontiers:
    """Return the frontiers of one of the problem's tables: for each entry its nondominated alternatives."""
    by_entry = [np.moveaxis(x, 0, -1).reshape(-1, len(cost.time)) for x in (cost.time, cost.memory)]
    entry, alternative = np.nonzero(np.isfinite(by_entry[0]))
    time, memory = (x[entry, alternative] for x in by_entry)
    rows = thinned(entry, memory, reduced(entry, time, memory), most)
    return Frontiers(named(cost.key, most), cost.sizes, entry[rows], time[rows], memory[rows], (alternative[rows],))


def one() -> Frontiers:
    """Return a table without axes, with one strategy of zero cost."""
    zero = np.zeros(1)
    return Frontiers("one", (), np.zeros(1, np.int64), zero, zero, ())


def reduced(entry: Array, time: Array, memory: Array) -> Array:
    """Return the positions of the nondominated tuples of each entry (algorithm 1), by entry and ascending memory.

    `entry` is ascending. Of equal tuples the first stays. Sorting takes most of the time, so if there are many tuples, most are
    removed before: those at least as slow as one of their entry in a cell of less memory.
    """
    left, first = np.arange(len(entry)), _firsts(entry)
    if not len(entry):
        return left
    number = np.repeat(np.arange(len(first)), np.diff(first, append=len(entry)))
    if len(entry) > SORTED:
        left = left[~_beaten(first, number, time, memory)]
        number, time, memory = number[left], time[left], memory[left]
    order = np.argsort(memory, kind="stable")
    small = number.astype(np.min_scalar_type(number[-1]))  # integers of at most two bytes are radix-sorted
    order = order[np.argsort(small[order], kind="stable")]
    # The running minimum of the time must start anew at every entry. Complex numbers are compared by their real part first.
    after = np.empty(len(order), complex)
    after.real, after.imag = -number[order], time[order]
    faster = np.ones(len(order), bool)
    faster[1:] = after[1:] < np.minimum.accumulate(after)[:-1]
    front = order[faster]
    follows = (np.diff(number[front]) == 0) & (np.diff(memory[front]) == 0)  # of tuples with equal memory, the last is the fastest
    return left[front[~np.append(follows, False)]]


def _firsts(entry: Array) -> Array:
    """Return the positions at which another entry begins in an ascending list of entries."""
    new = np.ones(len(entry), bool)
    new[1:] = entry[1:] != entry[:-1]
    return np.flatnonzero(new)


def _beaten(first: Array, number: Array, time: Array, memory: Array) -> Array:
    """Return a mask of some dominated tuples: those at least as slow as one in a cell of less memory.

    `first` is where each entry begins, `number` is the entry of each tuple.
    """
    low, high = np.minimum.reduceat(memory, first), np.maximum.reduceat(memory, first)
    scale = np.zeros(len(first))
    np.divide(CELLS * (1 - 1e-9), high - low, out=scale, where=high > low)
    cell = ((memory - low[number]) * scale[number]).astype(np.int64)
    best = np.full((len(first), CELLS + 1), np.inf)
    np.minimum.at(best.reshape(-1), number * (CELLS + 1) + cell + 1, time)
    return time >= np.minimum.accumulate(best, axis=1)[number, cell]


def thinned(entry: Array, memory: Array, rows: Array, most: int | None) -> Array:
    """Return at most `most` of the tuples `rows` of each entry, its first and its last among them."""
    if most is None or not len(rows):
        return rows
    entries = entry[rows]
    start = _firsts(entries)
    count = np.diff(start, append=len(entries))
    if count.max() <= most:
        return rows
    first, size = np.repeat(start, count), np.repeat(count, count)
    position = np.arange(len(entries)) - first
    steps = np.maximum(size - 1, 1)
    even = (position * (most - 1)) // steps > ((position - 1) * (most - 1)) // steps
    return rows[(size <= most) | (position == 0) | even]


def combined(a: Frontiers, b: Frontiers, axes: str, most: int | None) -> Frontiers:
    """Return the product of two tables' entries that agree on their common axes, and the union over axes that the result lacks.

    `axes` is given as in "hi,ij->hj". Each entry keeps at most `most` tuples, evenly spread between the leanest and the fastest.
    """
    operands, result = axes.split("->")
    of_a, of_b = operands.split(",")
    shape = tuple(a.shape[of_a.index(x)] if x in of_a else b.shape[of_b.index(x)] for x in result)
    stride = {x: int(np.prod(shape[k + 1 :], dtype=np.int64)) for k, x in enumerate(result)}
    part_a = _weighted(a, of_a, {x: stride[x] for x in of_a if x in stride})
    part_b = _weighted(b, of_b, {x: stride[x] for x in of_b if x in stride and x not in of_a})
    chunks = list[tuple[Array, ...]]()
    left, right = _agreeing(a, of_a, b, of_b)
    into = part_a[left] + part_b[right]
    order = np.argsort(into, kind="stable")
    for entry, rows_a, rows_b in _products(a, b, left[order], right[order], into[order]):
        time, memory = a.time[rows_a] + b.time[rows_b], a.memory[rows_a] + b.memory[rows_b]
        rows = reduced(entry, time, memory)
        chunks.append((entry[rows], time[rows], memory[rows], rows_a[rows], rows_b[rows]))
    entry, time, memory, rows_a, rows_b = (np.concatenate(part) for part in zip(*chunks, strict=True))
    rows = reduced(entry, time, memory) if len(chunks) > 1 else np.arange(len(entry))
    rows = thinned(entry, memory, rows, most)
    key = named(a.key, b.key, axes, most)
    return Frontiers(key, shape, entry[rows], time[rows], memory[rows], (rows_a[rows], rows_b[rows]))


def _weighted(table: Frontiers, axes: str, strides: dict[str, int]) -> Array:
    """Return for every entry that has tuples the sum of its indices on some axes, each times its stride."""
    total = np.zeros(len(table.first), np.int64)
    for x, stride in strides.items():
        total += table.at[axes.index(x)][table.first] * stride
    return total


def _agreeing(a: Frontiers, of_a: str, b: Frontiers, of_b: str) -> tuple[Array, Array]:
    """Return all pairs of entries that agree on the axes of both tables. Entries are numbered among those that have tuples."""
    sizes = {x: a.shape[of_a.index(x)] for x in of_a if x in of_b}
    strides, keys = dict[str, int](), 1
    for x, n in sizes.items():
        strides[x], keys = keys, keys * n
    key_a, key_b = _weighted(a, of_a, strides), _weighted(b, of_b, strides)
    sorted_b, count_b = np.argsort(key_b, kind="stable"), np.bincount(key_b, minlength=keys)
    first, count = (np.cumsum(count_b) - count_b)[key_a], count_b[key_a]
    return np.repeat(np.arange(len(key_a)), count), sorted_b[_ranges(first, count)]


def _ranges(first: Array, count: Array) -> Array:
    """Return all numbers of some ranges, one range after the other."""
    end = np.cumsum(count)
    return np.repeat(first - (end - count), count) + np.arange(end[-1] if len(end) else 0)


def _products(a: Frontiers, b: Frontiers, left: Array, right: Array, into: Array) -> Iterator[tuple[Array, Array, Array]]:
    """Yield every pair of tuples for each pair of entries, and the entry of the result that it belongs to, a chunk at a time."""
    total = np.cumsum(a.count[left] * b.count[right])
    cuts = np.searchsorted(total, np.arange(CHUNK, int(total[-1]) if len(total) else 0, CHUNK))
    for some in np.split(np.arange(len(left)), np.unique(cuts)):
        pair = np.repeat(some, a.count[left[some]])
        count = b.count[right[pair]]
        rows_a = np.repeat(_ranges(a.first[left[some]], a.count[left[some]]), count)
        yield np.repeat(into[pair], count), rows_a, _ranges(b.first[right[pair]], count)


def chosen(table: Frontiers, axes: Sequence[int | None]) -> Frontiers:
    """Return the part of a table where some axes have a given index; those axes are removed."""
    keep = np.ones(len(table), bool)
    for axis, index in enumerate(axes):
        keep &= True if index is None else table.at[axis] == index
    rows = np.flatnonzero(keep)
    left = [k for k, index in enumerate(axes) if index is None]
    shape = tuple(table.shape[k] for k in left)
    entry = np.ravel_multi_index([table.at[k][rows] for k in left], shape) if left else np.zeros(len(rows), np.int64)
    return Frontiers(named(table.key, tuple(axes)), shape, entry, table.time[rows], table.memory[rows], (rows,))


def expanded(table: Frontiers, axis: int, index: Array) -> Frontiers:
    """Return the table whose entries along an axis are those at `index`, in that order, with repetitions."""
    moved = np.moveaxis(np.arange(int(np.prod(table.shape))).reshape(table.shape), axis, 0)[index]
    old = np.moveaxis(moved, 0, axis)
    count = np.bincount(table.entry, minlength=int(np.prod(table.shape)))
    first, n = (np.cumsum(count) - count)[old.reshape(-1)], count[old.reshape(-1)]
    entry, rows = np.repeat(np.arange(old.size), n), _ranges(first, n)
    key = named(table.key, axis, hashlib.blake2b(np.ascontiguousarray(index).tobytes(), digest_size=12).hexdigest())
    return Frontiers(key, old.shape, entry, table.time[rows], table.memory[rows], (rows,))
