"""Exact variable elimination in the (min, +) semiring: the best strategies for many objectives at once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from math import prod

import numpy as np

from unity.base.errors import UnityError
from unity.search.solver.bounds import Energy
from unity.search.solver.domains import Domains
from unity.search.solver.elimination_order import Choose, Eliminate, EliminationSchedule, InputTable, Operation, Slice, schedule
from unity.search.solver.minplus import product
from unity.search.solver.problem import Array, Point, Problem, best_alternatives, points, score

# Entries of the largest table that exact elimination may compute for one weight: 160 MB.
BUDGET = 20_000_000
# Entries of all tables that may be live at once, 1 GB; weights are processed in batches that stay below.
RESIDENT = 125_000_000
# Entries of a temporary: less than a megabyte, so that it stays in the cache.
TEMPORARY = 100_000
# Terms of a minimum from which on looking for a neighbour that separates the others pays.
WHOLE = 1_000_000
Labelled = dict[tuple[int, ...], Array]  # labels of the axes (see `Eliminate`), and a table [weights, *axes]


class Infeasible(UnityError):
    """Heuristic elimination fixed variables such that no solution is left, and exact elimination would be too large."""

    docs = "search"


class TableCache:
    """A cache of the tables that eliminations compute, keyed by the content that they are computed from.

    Similar programs share most of their tables. The cache is bounded by the entries of its tables, and evicts the oldest first.
    """

    def __init__(self, entries: int = BUDGET) -> None:
        self.tables: dict[bytes, Array] = {}
        self.left = entries

    def of(self, key: bytes, make: Callable[[], Array]) -> Array:
        """Return the table of a key, computed by `make` if it is not in the cache."""
        table = self.tables.get(key)
        if table is None:
            table = self.tables[key] = make()
            self.left -= table.size
            while self.left < 0:
                self.left += self.tables.pop(next(iter(self.tables))).size
        return table


class Elimination:
    """A problem on some of its values, prepared for any number of objectives. `solved` is a cache shared with other problems."""

    def __init__(self, problem: Problem, domains: Domains, budget: int = BUDGET, solved: TableCache | None = None) -> None:
        self.problem = problem
        self.domains = domains
        self.budget = budget
        self.solved = solved

    @cached_property
    def schedule(self) -> EliminationSchedule:
        """The order in which variables are eliminated."""
        return schedule(self.problem, self.domains, self.budget)

    def solve(self, directions: Array) -> list[Point]:
        """Return the best point in every direction, [directions, 2] (see `problem.direction`); no points without a solution."""
        entries = max(1, sum(map(prod, self.schedule.shapes)))
        batch = max(1, RESIDENT // entries)
        solutions: list[Point] = []
        for start in range(0, len(directions), batch):
            chunk = directions[start : start + batch]
            values = self._values(chunk)
            if values is None:
                return self._with_more_budget(directions)
            alternatives = best_alternatives(self.problem, values, chunk)
            solutions += points(self.problem, values, alternatives, self.schedule.exact)
        return solutions

    def _with_more_budget(self, directions: Array) -> list[Point]:
        if self.schedule.exact:
            return []
        if self.budget > RESIDENT:
            raise Infeasible(
                f"the graph of {len(self.problem.sizes)} variables is too dense to be solved exactly, and the variables "
                "that were fixed to simplify it left no solution: give variables fewer values, or fewer edges"
            )
        return Elimination(self.problem, self.domains, 8 * max(1, self.budget), self.solved).solve(directions)

    def energy(self, direction: Array) -> Energy:
        """Return the problem's tables in one direction."""
        once = {leaf.operation: leaf for leaf in self.schedule.leaves}
        tables = {number: self._table(self.schedule.operations[number], (), [], direction[None])[0] for number in once}
        unary = [np.zeros(n) for n in self.domains.sizes]
        pairs: dict[tuple[int, int], Array] = {}
        for leaf in self.schedule.leaves:
            table = tables[leaf.operation]
            if len(leaf.scope) == 1:
                unary[leaf.scope[0]] = unary[leaf.scope[0]] + table
            else:
                pair = leaf.scope[0], leaf.scope[1]
                pairs[pair] = pairs[pair] + table if pair in pairs else table
        return Energy(unary, pairs)

    def _values(self, directions: Array) -> Array | None:
        """Return the best value of every variable in every direction; None if the problem has no solution."""
        tables = self.tables(directions)
        total = sum(tables[constant.operation] for constant in self.schedule.constants)
        if not np.isfinite(total).all():
            return None
        positions = self._decode(tables, len(directions))
        columns = [values[positions[:, v]] for v, values in enumerate(self.domains.values)]
        return np.stack(columns, axis=1) if columns else positions

    def tables(self, directions: Array) -> list[Array]:
        """Return the table of every operation in every direction, [directions, *shape]."""
        tables: list[Array] = []
        for number, (operation, shape) in enumerate(zip(self.schedule.operations, self.schedule.shapes, strict=True)):
            if self.solved is None or len(directions) > 1:
                tables.append(self._table(operation, shape, tables, directions))
            else:
                key = directions.tobytes() + self.keys[number]
                tables.append(self.solved.of(key, partial(self._table, operation, shape, tables, directions)))
        return tables

    @cached_property
    def keys(self) -> list[bytes]:
        """For every operation a hash of everything that its table depends on, except the objective."""
        values = {name: digest(v.tobytes()) for name, v in zip(self.domains.names, self.domains.values, strict=True)}
        hashes: list[bytes] = []
        for operation in self.schedule.operations:
            match operation:
                case InputTable(key, names, transposed):
                    hashes.append(digest(repr((key, [values[name] for name in names], transposed)).encode()))
                case Eliminate(inputs) | Choose(inputs):
                    text = [(hashes[number], labels) for number, labels in inputs]
                    hashes.append(digest(repr((type(operation).__name__, text)).encode()))
                case Slice(table, axis, choice):
                    hashes.append(digest(repr((hashes[table], axis, hashes[choice])).encode()))
        return hashes

    def _table(self, operation: Operation, shape: tuple[int, ...], tables: list[Array], directions: Array) -> Array:
        match operation:
            case InputTable():
                return self._leaf(operation, directions)
            case Eliminate(inputs):
                return _eliminate(_merge_tables(inputs, tables), tuple(range(1, len(shape) + 1)))
            case Choose(inputs):
                costs = [table.min(axis=_others(labels)) for labels, table in _merge_tables(inputs, tables).items()]
                return np.argmin(sum(costs), axis=1)
            case Slice(table, axis, choice):
                return np.moveaxis(tables[table], axis + 1, 1)[np.arange(len(directions)), tables[choice]]

    def _leaf(self, leaf: InputTable, directions: Array) -> Array:
        scope, cost = self.problem.tables[leaf.table]
        cells = np.ix_(*(self.domains.values[v] for v in scope))
        best = np.full((len(directions), *(len(self.domains.values[v]) for v in scope)), np.inf)
        shaped = directions.reshape(len(directions), *(1 for _ in scope), 2)
        for time, memory in zip(cost.time, cost.memory, strict=True):
            np.minimum(best, score(time[cells], memory[cells], shaped), out=best)
        return np.ascontiguousarray(best.swapaxes(1, 2)) if leaf.transposed else best

    def _decode(self, tables: list[Array], weights: int) -> Array:
        """Return the best values by walking the eliminations backwards, so that a variable's neighbours are decided before it."""
        positions = np.zeros((weights, len(self.problem.sizes)), np.int64)
        every = np.arange(weights)[:, None]
        for step in reversed(self.schedule.steps):
            v = step.variable
            if step.chosen is not None:
                positions[:, v] = tables[step.chosen]
                continue
            own = np.arange(len(self.domains.values[v]))[None]
            total = np.zeros((weights, own.size))
            for factor in step.factors:
                entries = (own if u == v else positions[:, u, None] for u in factor.scope)
                total += tables[factor.operation][(every, *entries)]
            positions[:, v] = total.argmin(1)
        return positions


def digest(content: bytes) -> bytes:
    """Return a hash of content."""
    return hashlib.blake2b(content, digest_size=16).digest()


def _merge_tables(inputs: Sequence[tuple[int, tuple[int, ...]]], tables: list[Array]) -> Labelled:
    """Add up the tables on the same variables (edge elimination: OptCNN, section 5.2)."""
    merged: Labelled = {}
    for number, labels in inputs:
        merged[labels] = merged[labels] + tables[number] if labels in merged else tables[number]
    return merged


def _others(labels: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(axis + 1 for axis, label in enumerate(labels) if label != 0)


def _eliminate(tables: Labelled, order: tuple[int, ...]) -> Array:
    """Return the minimum over axis 0 of the sum of the tables, as a table [weights, *order]."""
    middle = tables.pop((0,), None)
    if middle is None:
        labels, table = next(iter(tables.items()))
        middle = np.zeros((len(table), table.shape[1 + labels.index(0)]))
    if not order:
        return middle.min(1)
    sizes = {label: n for labels, table in tables.items() for label, n in zip(labels, table.shape[1:], strict=True)}
    left, right = _split_neighbours(tables, sizes)
    if not right:
        between = _separator(tables, sizes) if middle.size * prod(sizes[label] for label in order) > WHOLE else None
        tables |= {(0,): middle}
        return _minimum(tables, order, sizes) if between is None else _minimum_by_value(tables, order, between, sizes[between])
    a, b = (_flattened_sum(_inside(tables, half), half, sizes, len(middle)) for half in (left, right))
    c = product(a, middle, b.swapaxes(1, 2))
    c = c.reshape(len(c), *(sizes[label] for label in (*left, *right)))
    return np.ascontiguousarray(c.transpose(0, *(1 + (*left, *right).index(label) for label in order)))


def _split_neighbours(scopes: Iterable[tuple[int, ...]], sizes: dict[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Split the neighbours into two sets that no table joins, of about the same number of entries; the second may be empty."""
    parts: list[set[int]] = []
    for labels in scopes:
        joined = {label for label in labels if label != 0}
        for part in [part for part in parts if part & joined]:
            joined |= part
            parts.remove(part)
        parts.append(joined)
    halves: tuple[set[int], set[int]] = (set(), set())
    for part in sorted(parts, key=lambda part: (-prod(sizes[label] for label in part), min(part))):
        min(halves, key=lambda half: prod(sizes[label] for label in half) if half else 0).update(part)
    return tuple(sorted(halves[0])), tuple(sorted(halves[1]))


def _separator(tables: Labelled, sizes: dict[int, int]) -> int | None:
    """Return the neighbour without which the others fall into two halves that no table joins; None if no neighbour does that.

    Of several, it is the one whose smaller half is largest.
    """
    smaller: dict[int, int] = {}
    for label in sorted(sizes.keys() - {0}):
        rest = [tuple(other for other in own if other != label) for own in tables]
        halves = _split_neighbours([own for own in rest if own != (0,)], sizes)
        if halves[1]:
            smaller[label] = min(prod(sizes[other] for other in half) for half in halves)
    return max(smaller, key=smaller.__getitem__, default=None)


def _without(tables: Labelled, label: int, value: int) -> Labelled:
    """Return the tables at one value of a neighbour; tables that are then on the same axes are added up."""
    cut: Labelled = {}
    for own, table in tables.items():
        rest = tuple(other for other in own if other != label)
        slice_ = table if rest == own else np.take(table, value, 1 + own.index(label))
        cut[rest] = cut[rest] + slice_ if rest in cut else slice_
    return cut


def _minimum_by_value(tables: Labelled, order: tuple[int, ...], label: int, count: int) -> Array:
    """Compute the minimum for each value of a neighbour separately, because the others are independent given it."""
    rest = tuple(other for other in order if other != label)
    return np.stack([_eliminate(_without(tables, label, value), rest) for value in range(count)], 1 + order.index(label))


def _inside(tables: Labelled, labels: tuple[int, ...]) -> Labelled:
    return {own: table for own, table in tables.items() if set(own) & set(labels)}


def _flattened_sum(tables: Labelled, labels: tuple[int, ...], sizes: dict[int, int], weights: int) -> Array:
    """Return the sum of tables as [weights, all entries of `labels`, axis 0]."""
    total = _sum(tables, (*labels, 0))
    shape = tuple(sizes[label] for label in (*labels, 0))
    return np.broadcast_to(total, (weights, *shape)).reshape(weights, -1, sizes[0])


def _sum(tables: Labelled, order: tuple[int, ...]) -> Array:
    """Return the sum of tables with its axes in the given order."""
    total: Array | None = None
    writable = False
    for own, table in tables.items():
        present = [label for label in order if label in own]
        aligned = table.transpose(0, *(1 + own.index(label) for label in present))
        missing = tuple(1 + axis for axis, label in enumerate(order) if label not in own)
        aligned = np.expand_dims(aligned, missing)
        if total is None:
            total = aligned
        elif writable and all(n in (1, m) for n, m in zip(aligned.shape, total.shape, strict=True)):
            total += aligned
        else:
            total, writable = total + aligned, True
    assert total is not None
    return total


def _minimum(tables: Labelled, order: tuple[int, ...], sizes: dict[int, int]) -> Array:
    """Compute the minimum over axis 0 of the sum, one block at a time.

    Axis 0 is the outermost: NumPy then compares whole rows, which is several times faster than comparing the entries of each.
    """
    weights = len(next(iter(tables.values())))
    least = np.empty((weights, *(sizes[label] for label in order)))
    for block in _blocks([sizes[label] for label in order], weights * sizes[0]):
        where = dict(zip(order, block, strict=False))
        cut = {own: table[(slice(None), *(where.get(label, slice(None)) for label in own))] for own, table in tables.items()}
        least[(slice(None), *block)] = _sum(cut, (0, *order)).min(1)
    return least


def _blocks(sizes: Sequence[int], depth: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices that cut a table into parts that stay in the cache, given `depth` terms for each entry.

    Outer axes are cut into single entries.
    """
    first = next(k for k in range(len(sizes)) if depth * prod(sizes[k + 1 :]) <= TEMPORARY or k == len(sizes) - 1)
    step = max(1, TEMPORARY // (depth * prod(sizes[first + 1 :])))
    for outer in np.ndindex(*sizes[:first]):
        for start in range(0, sizes[first], step):
            yield (*(slice(k, k + 1) for k in outer), slice(start, start + step))
