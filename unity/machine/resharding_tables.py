"""Look-up of the prices of all changes between two sets of types; the collectives of each distinct change are found once.

What a change sends depends on the two types alone (`resharding_collectives`), and what that takes on the bytes of the tensor too.
All dimensions but the first are interchangeable: gathering dimension 1 to slice dimension 2 costs the same as the reverse. Changes
that differ only in the names of such dimensions are found once for a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from unity.base.lru_cache import LRUCache
from unity.machine.machine import Machine
from unity.machine.resharding_collectives import FIRST, KIND, OUTERS, ChangePass, CollectiveNumbers, P, most_collectives
from unity.pcg.parallel.resharding import stationary
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, State, Type

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Types:
    """A set of types: for each, the index of its state along every axis."""

    states: tuple[State, ...]
    rows: Array  # [types, axes]

    @staticmethod
    def of(types: Sequence[Type]) -> Types:
        """Build the set of these types, in this order."""
        codes: dict[State, int] = {}
        rows = [[codes.setdefault(s, len(codes)) for s in t] for t in types]
        return Types(tuple(codes), np.array(rows, np.int16).reshape(len(types), len(types[0]) if types else 0))

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def key(self) -> tuple[tuple[State, ...], tuple[int, ...], bytes]:
        """A key that equal sets share."""
        return self.states, self.rows.shape, np.ascontiguousarray(self.rows, np.int16).tobytes()

    def parts(self, axes: Sequence[Axis]) -> Array:
        """Return the fraction of a tensor that one device holds, for each type."""
        split = np.array([s.kind == "P" for s in self.states], bool)[self.rows]
        return np.prod(np.where(split, [1 / a.size for a in axes], 1.0), axis=1)

    def absolute(self, axes: Sequence[Axis], k: int) -> list[State]:
        """Return each type's state along axis k with its slice position made absolute (`pcg.parallel.resharding.absolute`)."""
        sizes = np.array([a.size for a in axes[:k]], int)
        before = np.where(self.rows[:, :k] == self.rows[:, k, None], sizes, 1).prod(1)
        states = (self.states[code] for code in self.rows[:, k])
        return [s._replace(outer=s.outer * int(n)) if s.kind == "P" else s for s, n in zip(states, before, strict=True)]

    def __getitem__(self, index: int) -> Type:
        return tuple(self.states[s] for s in self.rows[index])


@dataclass(frozen=True, eq=False)
class Changes:
    """Seconds of changes of a tensor's type, and what they leave in memory: arrays of one shape."""

    forward: Array
    backward: Array
    merged: Array  # seconds by which `backward` is shorter if the tensor is an argument (`machine.collectives`: merging)
    size: Array  # the fraction of the tensor that one device holds afterwards; 0 where no new buffer is made
    gathered: Array  # whether some step gathers

    def __getitem__(self, index: Array) -> Changes:
        return Changes(self.forward[index], self.backward[index], self.merged[index], self.size[index], self.gathered[index])


def changes(machine: Machine, before: Sequence[Type], after: Sequence[Type], nbytes: int, growth: float = 1.0) -> Changes:
    """Return the seconds of all changes between two sets of types on a machine's axes, [before, after].

    Args:
        machine: the machine.
        before, after: the types.
        nbytes: the bytes of the whole tensor.
        growth: the factor by which partial sums are larger than the tensor (`pcg.types.accumulation`).
    """
    distinct, index = distinct_changes(machine, Types.of(before), Types.of(after), nbytes, growth)
    return distinct[index]


def distinct_changes(machine: Machine, before: Types, after: Types, nbytes: int, growth: float = 1.0) -> tuple[Changes, Array]:
    """Return the distinct changes between two sets of types, and the number of each pair's change, [before, after]."""
    return _change_book(machine, growth).changes(before, after, nbytes)


def stationary_pairs(before: Types, after: Types, axes: Sequence[Axis], over: Sequence[int]) -> Array:
    """Return which changes are stationary along all axes `over` (`pcg.parallel.resharding.stationary`), [before, after]."""
    good = np.ones((len(before), len(after)), bool)
    for k in over:
        rows, columns = before.absolute(axes, k), after.absolute(axes, k)
        codes = {s: c for c, s in enumerate(dict.fromkeys((*rows, *columns)))}
        table = np.array([[stationary(s, t) for t in codes] for s in codes], bool)
        good &= table[np.ix_([codes[s] for s in rows], [codes[t] for t in columns])]
    return good


def contributing_pairs(before: Types, after: Types) -> Array:
    """Return which changes contribute a whole value to a partial sum along some axis, [before, after]."""
    old, new = (np.array([s == PARTIAL for s in types.states], bool)[types.rows] for types in (before, after))
    return np.any(~old[:, None] & new[None], axis=2)


@lru_cache(maxsize=8)
def _change_book(machine: Machine, growth: float) -> _ChangeBook:
    return _ChangeBook(machine, growth)


BLOCK = 1 << 15  # pairs that are run at once; each takes some hundred bytes of temporaries
RECENT = 128_000_000  # bytes of the cache of changes between two sets of types
SIZES = 64  # sizes of tensors for which what collectives take is remembered
# Odd factors of the fingerprints of changes; more than a change on any machine has fields.
FACTORS = np.random.default_rng(0).integers(1, 1 << 63, 256, np.uint64) * np.uint64(2) + np.uint64(1)


@dataclass(frozen=True, eq=False)
class _RenamedTypes:
    """A set of types after renaming dimensions.

    Attributes:
        codes: the distinct types, [types, axes] (see `machine.resharding_collectives`).
        ids: for each distinct type, a number that no other type of the book has.
        index: for each original type, the number of the distinct type that it has become.
    """

    codes: Array
    ids: Array
    index: Array


@dataclass(frozen=True, eq=False)
class _Distinct:
    """Distinct changes: the places of their collectives (`_ChangeBook.sent`), 0 for none, and the fields that no bytes change.

    Attributes:
        forward, backward: [changes, most collectives that one of them sends].
        merged: of the collective that may be merged, [changes].
        size, gathered: those of `Changes`.
    """

    forward: Array
    backward: Array
    merged: Array
    size: Array
    gathered: Array

    @staticmethod
    def of(fields: Array, most: int) -> _Distinct:
        """Read the fields of changes, [changes, fields], of which `most` are for collectives in each direction."""
        forward, backward = (part[:, part.any(0)] for part in (fields[:, :most], fields[:, most : 2 * most]))
        merged, parts, gathered = fields[:, 2 * most :].T
        return _Distinct(forward, backward, merged, np.where(parts > 0, 1 / np.maximum(parts, 1), 0.0), gathered > 0)

    def changes(self, seconds: Array, merged: Array) -> Changes:
        """Return what the changes take, by the seconds of collectives alone and merged with others."""
        saved = (seconds - merged)[self.merged]
        return Changes(seconds[self.forward].sum(1), seconds[self.backward].sum(1), saved, self.size, self.gathered)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return sum(a.nbytes for a in (self.forward, self.backward, self.merged, self.size, self.gathered))


class _ChangeBook:
    """All changes that have been met on a machine.

    Dimensions are named in the order in which they appear, first in the old type, then in the new one. The first dimension always
    has name 0, because collectives along it cost less than along others (`machine.collectives`: turning).
    """

    def __init__(self, machine: Machine, growth: float) -> None:
        self.collectives = CollectiveNumbers(machine, growth)
        self.most = most_collectives(machine.axes)  # in one direction
        self.outers: dict[int, int] = {}
        self.ids: dict[bytes, int] = {}
        self.recent = LRUCache[tuple, tuple[_Distinct, Array]](RECENT, lambda entry: entry[0].nbytes + entry[1].nbytes)
        self.distinct = np.zeros((0, 2 * self.most + 3), np.int64)  # the distinct changes' fields, and spare rows
        self.numbers: dict[bytes, int] = {}  # the row of each distinct change
        self.runs: list[tuple[Array, Array]] = []  # known pairs: ascending keys, and the row of each one's change
        self.sent = {0: 0}  # the collectives of all changes, by their number: their places in `seconds`
        self.prices = LRUCache[int, Array](SIZES, lambda entry: 1)  # by the bytes of a tensor, the seconds of all these

    def changes(self, before: Types, after: Types, nbytes: int) -> tuple[Changes, Array]:
        """Return `distinct_changes`, from the cache if possible: all tensors of a kind in a program have the same types."""
        key = (before.key, after.key)
        if key not in self.recent:
            fields, index = self.found(before, after)
            self.recent[key] = _Distinct.of(fields, self.most), index
        distinct, index = self.recent[key]
        return distinct.changes(*self.seconds(nbytes)), index

    def seconds(self, nbytes: int) -> Array:
        """Return `CollectiveNumbers.seconds` of all known collectives, from the cache if possible."""
        seconds = self.prices.get(nbytes)
        if seconds is None or seconds.shape[1] < len(self.sent):
            self.prices[nbytes] = seconds = self.collectives.seconds(np.array(list(self.sent), np.int64), nbytes)
        return seconds

    def found(self, before: Types, after: Types) -> tuple[Array, Array]:
        """Return the fields of the distinct changes between two sets of types, [changes, fields], and the number of each pair's
        change, [before, after]; only pairs that have not been met before are run.
        """
        old, new, naming = self.renamed(before, after)
        rows, columns = old.index[:, None], new.index[naming]
        present = np.zeros((len(old.ids), len(new.ids)), bool)
        present[rows, columns] = True
        pairs = np.stack(np.nonzero(present))
        keys = old.ids[pairs[0]] << 32 | new.ids[pairs[1]]
        change_rows, known = self.look_up(keys)
        if not known.all():
            more = self.run(old.codes, new.codes, pairs[:, ~known])
            change_rows[~known] = more
            self.add_run(keys[~known], more)
        is_used = np.zeros(len(self.numbers), bool)
        is_used[change_rows] = True
        used = np.flatnonzero(is_used)
        position = np.empty(len(is_used), np.int32)  # of each used row among the used ones
        position[used] = np.arange(len(used))
        number = np.zeros(present.shape, np.min_scalar_type(len(used)))
        number[tuple(pairs)] = position[change_rows]
        return self.distinct[used], number[rows, columns]

    def look_up(self, keys: Array) -> tuple[Array, Array]:
        """Return the row of each known pair's change, and which pairs are known."""
        rows, known = np.zeros(len(keys), np.int32), np.zeros(len(keys), bool)
        for run, run_rows in self.runs:
            at = np.minimum(np.searchsorted(run, keys), len(run) - 1)
            matches = run[at] == keys
            rows[matches] = run_rows[at[matches]]
            known |= matches
        return rows, known

    def run(self, old: Array, new: Array, pairs: Array) -> Array:
        """Run new pairs of two sets of types. Returns the row of each one's change."""
        outers = tuple(self.outers)
        blocks = np.array_split(pairs, -(-pairs.shape[1] // BLOCK), axis=1)
        passes = (ChangePass(self.collectives, outers, old, new, block) for block in blocks)
        return np.concatenate([self.numbered(each.run()) for each in passes])

    def numbered(self, fields: Array) -> Array:
        """Return the rows of the changes of pairs, [fields, pairs], after adding those that are new."""
        distinct, which = _distinct_columns(fields)
        sent, at = np.unique(distinct[:-2], return_inverse=True)
        places = np.array([self.sent.setdefault(number, len(self.sent)) for number in sent.tolist()], np.int64)
        distinct[:-2] = places[at.reshape(distinct[:-2].shape)]
        rows, known = _rows(np.ascontiguousarray(distinct.T)), len(self.numbers)
        new = {row: known + k for k, row in enumerate(row for row in rows if row not in self.numbers)}
        numbers = np.array([new[row] if row in new else self.numbers[row] for row in rows], np.int32)
        count = known + len(new)
        if count > len(self.distinct):
            spare = np.zeros((count, self.distinct.shape[1]), np.int64)
            self.distinct = np.concatenate([self.distinct[:known], spare])  # at least twice as many
        self.distinct[known:count] = distinct.T[numbers >= known]
        self.numbers.update(new)  # last, so that each number has its change even if Ctrl-C interrupts this
        return numbers[which]

    def add_run(self, keys: Array, numbers: Array) -> None:
        """Add a sorted run of keys. Runs of similar length are merged, so that each key moves only logarithmically often."""
        order = np.argsort(keys)
        self.runs.append((keys[order], numbers[order]))
        while len(self.runs) > 1 and len(self.runs[-2][0]) <= 2 * len(self.runs[-1][0]):
            (first, numbers), (second, more) = self.runs[-2:]
            both = np.concatenate([first, second])
            order = np.argsort(both, kind="stable")
            self.runs[-2:] = [(both[order], np.concatenate([numbers, more])[order])]

    def renamed(self, before: Types, after: Types) -> tuple[_RenamedTypes, _RenamedTypes, Array]:
        """Return both sets with dimensions renamed: the new types under every naming that some old type leads to, [namings, types].

        Returns also the number of the naming that each old type leads to.
        """
        dims = 1 + max(s.dim for s in (*before.states, *after.states, UNUSED_AT_0))
        unnamed = np.full((len(before), dims), -1)
        unnamed[:, 0] = FIRST
        own = _named(unnamed, before)
        namings, of = np.unique(own, axis=0, return_inverse=True)
        every = _named(np.repeat(namings[:, None], len(after), axis=1), after)
        return self.coded(before, own), self.coded(after, every), of.reshape(-1)

    def coded(self, types: Types, names: Array) -> _RenamedTypes:
        """Return types with their dimensions named by `names`, [..., types, dimensions]."""
        kind, dim, outer = (np.array(column)[types.rows] for column in zip(*map(self.described, types.states), strict=True))
        name = np.take_along_axis(names, np.broadcast_to(dim, (*names.shape[:-1], dim.shape[-1])), axis=-1)
        codes = np.where(kind == P, P + name * OUTERS + outer, kind).astype(np.uint16)
        local: dict[bytes, int] = {}
        index = [local.setdefault(row, len(local)) for row in _rows(codes)]
        ids = [self.ids.setdefault(row, len(self.ids)) for row in local]
        distinct = np.frombuffer(b"".join(local), np.uint16).reshape(len(local), codes.shape[-1])
        return _RenamedTypes(distinct, np.array(ids, np.int64), np.array(index).reshape(names.shape[:-1]))

    def described(self, state: State) -> tuple[int, int, int]:
        """Return a state as numbers: its kind, its dimension, and the number of its inner digit."""
        number = self.outers.setdefault(state.outer, len(self.outers))
        assert number < OUTERS, "more inner digits than a code can hold"
        return KIND[state.kind], max(state.dim, 0), number


def _distinct_columns(fields: Array) -> tuple[Array, Array]:
    """Return the distinct columns, and for each column the number of its equal among them.

    Columns are compared by fingerprints; if two different columns share one (this was never seen), by their content.
    """
    words = np.ascontiguousarray(fields).view(np.uint64)
    prints = np.zeros(words.shape[1], np.uint64)
    for row, factor in zip(words, FACTORS, strict=False):
        prints += (row ^ (row >> np.uint64(32))) * factor
    _, first, which = np.unique(prints, return_index=True, return_inverse=True)
    if not np.array_equal(words[:, first[which]], words):
        _, first, which = np.unique(words, axis=1, return_index=True, return_inverse=True)
    return fields[:, first], which.reshape(-1)


UNUSED_AT_0 = State("U", 0)


def _rows(codes: Array) -> list[bytes]:
    """Return every row of codes as bytes."""
    width = codes.shape[-1] * codes.itemsize
    count = codes.size // codes.shape[-1] if width else int(np.prod(codes.shape[:-1]))
    return codes.reshape(count, -1).view(np.dtype((np.void, width))).ravel().tolist() if width else [b""] * count


def _named(names: Array, types: Types) -> Array:
    """Name the dimensions that have no name yet (-1), in the order of the axes. `names` is [..., types, dimensions]."""
    dims = np.array([s.dim for s in types.states], int)[types.rows]
    following = names.max(-1) + 1
    rows = np.arange(len(types))
    for axis in range(dims.shape[1]):
        dim = dims[:, axis]
        new = (dim >= 0) & (names[..., rows, dim] < 0)
        names[..., rows, dim] = np.where(new, following, names[..., rows, dim])
        following = following + new
    return names
