"""The core of a problem for one objective: the variables that remain when everything that is cheap to decide has been decided.

A variable with one value, one neighbour, or two neighbours of few values is eliminated; a dominated value of a variable is removed
(dead-end elimination: Goldstein 1994, "Efficient rotamer elimination applied to protein side-chains"). Each step makes room for
more of the others. Nothing is lost: a best strategy of the core, extended by the best of what was eliminated, is a best strategy of
the whole.

Tables are cached by the content that they are computed from, so for a program that was rewritten in one place, only the tables
around that place are computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

import numpy as np

from unity.search.solver.bounds import Energy, Messages
from unity.search.solver.domains import Domains
from unity.search.solver.elimination import TableCache, digest
from unity.search.solver.minplus import product
from unity.search.solver.problem import Array, Cost, Edge, Problem, score

# Sums that the elimination of a variable, or a comparison of its values on one edge, may compute: about a millisecond.
CHEAP = 2_000_000
# Stands for minus infinity where infinity may be added to it; less than any sum of costs.
LOWEST = -1e300


class KeyedTable(NamedTuple):
    """Costs, and a hash of everything that they were computed from."""

    costs: Array
    key: bytes


@dataclass(frozen=True, eq=False)
class EliminatedVariable:
    """A variable that was eliminated: its own costs and its tables with neighbours, [neighbour, own], at that time."""

    variable: int
    values: Array
    own: Array
    tables: tuple[tuple[int, Array, Array], ...]  # a neighbour, its values, the table

    def best(self, strategy: Array) -> int:
        """Return the best value, given those of the neighbours."""
        total = self.own
        for neighbour, values, table in self.tables:
            total = total + table[np.searchsorted(values, strategy[neighbour])]
        return int(self.values[total.argmin()])


@dataclass(frozen=True, eq=False)
class Core:
    """The remaining problem for one objective, and the way back to the whole."""

    sizes: tuple[int, ...]  # the whole problem's
    variables: tuple[int, ...]  # their numbers in the whole problem, ascending
    values: tuple[Array, ...]  # the remaining values of each
    own: tuple[KeyedTable, ...]
    pairs: dict[tuple[int, int], KeyedTable]  # by positions in `variables`, the lower first
    constant: float  # the cost of everything decided
    decided: tuple[EliminatedVariable, ...]  # in the order of elimination

    @cached_property
    def energy(self) -> Energy:
        """The tables. A last, artificial variable has the cost of everything decided."""
        unary = [table.costs for table in self.own]
        return Energy([*unary, np.array([self.constant])], {ends: table.costs for ends, table in self.pairs.items()})

    @cached_property
    def problem(self) -> Problem:
        """The core as a problem whose time is the objective."""
        unary = [*map(_cost, self.own), Cost("", np.array([[self.constant]]), np.zeros((1, 1)))]
        edges = tuple(Edge(*ends, _cost(table)) for ends, table in self.pairs.items())
        return Problem((*map(len, self.values), 1), tuple(unary), edges)

    def whole(self, values: Sequence[int]) -> Array:
        """Extend a strategy of the core to the whole problem, with the best value of every eliminated variable."""
        strategy = np.zeros(len(self.variables) + len(self.decided), np.int64)
        for v, own, value in zip(self.variables, self.values, values, strict=False):
            strategy[v] = own[value]
        for step in reversed(self.decided):
            strategy[step.variable] = step.best(strategy)
        return strategy

    def outward(self, messages: Messages) -> Messages:
        """Translate messages between variables of the core to the whole problem: zero where that has more values."""
        translated: Messages = {}
        for (s, t), message in messages.items():
            all_values = np.zeros(self.sizes[self.variables[t]])
            all_values[self.values[t]] = np.where(np.isfinite(message), message, 0.0)  # with other values of s it may be allowed
            translated[self.variables[s], self.variables[t]] = all_values
        return translated

    def inward(self, messages: Messages) -> Messages:
        """Translate messages of the whole problem to the core: zero between variables that have no messages."""
        translated: Messages = {}
        for a, b in self.pairs:
            for s, t in ((a, b), (b, a)):
                message = messages.get((self.variables[s], self.variables[t]))
                values = self.values[t]
                translated[s, t] = (
                    np.zeros(len(values)) if message is None else np.where(np.isfinite(message[values]), message[values], 0.0)
                )
        return translated


def _cost(table: KeyedTable) -> Cost:
    return Cost(table.key.hex(), table.costs[None], np.zeros((1, *table.costs.shape)))


def core(problem: Problem, domains: Domains, direction: Array, solved: TableCache | None = None) -> Core | None:
    """Return the core of a problem on some of its values, for one objective (see `problem.direction`); None without a solution."""
    if domains.empty:
        return None
    reduction = _Reduction(_Tables(problem, domains, direction, solved or TableCache()))
    return reduction.core if reduction.run() else None


class _Tables:
    """A problem's tables in one direction, each computed once."""

    def __init__(self, problem: Problem, domains: Domains, direction: Array, solved: TableCache) -> None:
        self.problem, self.domains, self.solved = problem, domains, solved
        self.direction, self.prefix = direction, direction.tobytes()
        named = {name: digest(values.tobytes()) for name, values in zip(domains.names, domains.values, strict=True)}
        self.value_hashes = [named[name] for name in domains.names]
        self._leaves: dict[tuple[str, int, int, bool], KeyedTable] = {}
        self.free = KeyedTable(np.zeros(1), b"")  # the table of zero cost

    def leaf(self, scope: tuple[int, ...], cost: Cost) -> KeyedTable:
        """Return one of the problem's tables, with its axes by ascending variable."""
        names, transposed = self.domains.names, scope[0] > scope[-1]
        same = cost.key, names[scope[0]], names[scope[-1]], transposed
        if same not in self._leaves:
            key = digest(b"".join((self.prefix, cost.key.encode(), *(self.value_hashes[v] for v in scope), bytes([transposed]))))
            self._leaves[same] = self._cached(key, partial(self._leaf, scope, cost, transposed))
        return self._leaves[same]

    def _leaf(self, scope: tuple[int, ...], cost: Cost, transposed: bool) -> Array:
        cells = np.ix_(np.arange(len(cost.time)), *(self.domains.values[v] for v in scope))
        best = score(cost.time[cells], cost.memory[cells], self.direction).min(0)
        return np.ascontiguousarray(best.T) if transposed else best

    def _cached(self, key: bytes, make: Callable[[], Array]) -> KeyedTable:
        """Return the table of a key, computed by `make` if it is not in the cache."""
        return KeyedTable(self.solved.of(key, make), key)

    def sum_of(self, a: KeyedTable | None, b: KeyedTable) -> KeyedTable:
        """Return the sum of two tables on the same variables."""
        return b if a is None else self._cached(digest(b"+" + a.key + b.key), lambda: a.costs + b.costs)

    def restricted(self, table: KeyedTable, positions: Array, axis: int) -> KeyedTable:
        """Return the part of a table at some positions of an axis."""
        return self._cached(digest(b"%d" % axis + positions.tobytes() + table.key), lambda: np.take(table.costs, positions, axis))

    def eliminated_to_one(self, table: KeyedTable, own: KeyedTable) -> KeyedTable:
        """Return the least that a variable adds to each value of its only neighbour. `table`: [neighbour, own]."""
        return self._cached(digest(b"1" + table.key + own.key), lambda: (table.costs + own.costs).min(1))

    def eliminated_to_two(self, a: KeyedTable, own: KeyedTable, b: KeyedTable) -> KeyedTable:
        """Return the least that a variable adds to each pair of values of its two neighbours. `a`, `b`: [neighbour, own]."""
        key = digest(b"2" + a.key + own.key + b.key)
        return self._cached(key, lambda: product(a.costs[None], own.costs[None], b.costs.T[None])[0])

    def worst_difference(self, table: KeyedTable) -> KeyedTable:
        """Return, for each pair of values, the least by which the first is worse than the second, over all values of the neighbour.

        `table` is [neighbour, own]. A value that is forbidden everywhere is infinitely worse than all others.
        """
        return self._cached(digest(b"-" + table.key), lambda: _differences(table.costs.T))

    def undominated(self, own: KeyedTable, around: Sequence[KeyedTable]) -> Array:
        """Return the values of a variable that no other dominates; of equal values the lowest. `around`: [neighbour, own]."""
        key = digest(b"u" + own.key + b"".join(table.key for table in around))
        return self.solved.of(key, lambda: _undominated(own.costs, [self.worst_difference(table).costs for table in around]))


def _undominated(own: Array, worst_differences: Sequence[Array]) -> Array:
    """Return the values that no other dominates, from their costs and the worst differences to the others at each neighbour."""
    worst = own[:, None] - own
    for worst_difference in worst_differences:
        worst = worst + worst_difference
    np.fill_diagonal(worst, -np.inf)
    dominated = worst >= 0
    left = np.ones(len(own), bool)
    for value in np.flatnonzero(dominated.any(1))[::-1]:
        left[value] = not (dominated[value] & left).any()
    return np.flatnonzero(left)


def _differences(rows: Array) -> Array:
    """Return the minimum over k of rows[i, k] - rows[j, k], infinite where the first is forbidden."""
    other = np.where(np.isfinite(rows), -rows, LOWEST).T
    return product(rows[None], np.zeros((1, rows.shape[1])), other[None])[0]


class _Reduction:
    """The remaining tables while variables and values are removed."""

    def __init__(self, tables: _Tables) -> None:
        self.tables = tables
        self.values = list(tables.domains.values)
        self.alive = set(range(len(self.values)))
        self.around: list[set[int]] = [set() for _ in self.values]
        self.own: list[KeyedTable] = [tables.leaf((v,), cost) for v, cost in enumerate(tables.problem.unary)]
        self.pairs: dict[tuple[int, int], KeyedTable] = {}  # the lower variable first
        self.decided: list[EliminatedVariable] = []
        self.constant = 0.0
        self.changed = set(self.alive)  # variables whose tables have changed since they were last visited
        self.queue = sorted(self.changed)  # the same as a heap
        for edge in tables.problem.edges:
            ends = edge.first, edge.second
            self._join((min(ends), max(ends)), tables.leaf(ends, edge.cost))

    def run(self) -> bool:
        """Reduce as long as anything changes. Returns whether there is a solution."""
        while self.changed:
            visited: set[int] = set()
            while self.changed:
                v = heappop(self.queue)
                self.changed.remove(v)
                visited.add(v)
                if v in self.alive and not self._simplify(v):
                    return False
            for v in sorted(visited & self.alive):
                self._remove_dominated(v)
            if not self.changed:
                self._eliminate_between()
        return True

    def _mark(self, *variables: int) -> None:
        """Note that the tables of variables have changed, so that they are visited."""
        for v in variables:
            if v not in self.changed:
                self.changed.add(v)
                heappush(self.queue, v)

    @property
    def core(self) -> Core:
        """The remaining problem."""
        left = tuple(sorted(self.alive))
        place = {v: k for k, v in enumerate(left)}
        pairs = {(place[s], place[t]): table for (s, t), table in sorted(self.pairs.items())}
        own = tuple(self.own[v] for v in left)
        return Core(
            self.tables.problem.sizes, left, tuple(self.values[v] for v in left), own, pairs, self.constant, tuple(self.decided)
        )

    def _join(self, ends: tuple[int, int], table: KeyedTable) -> None:
        s, t = ends
        self.pairs[ends] = self.tables.sum_of(self.pairs.get(ends), table)
        self.around[s].add(t)
        self.around[t].add(s)

    def _toward(self, v: int, neighbour: int) -> KeyedTable:
        """Return the table of two variables as [neighbour, variable]."""
        if neighbour < v:
            return self.pairs[neighbour, v]
        costs, key = self.pairs[v, neighbour]
        return KeyedTable(costs.T, key + b"T")

    def _simplify(self, v: int) -> bool:
        """Remove forbidden values; eliminate the variable if it has one value or one neighbour. Returns whether a value is left."""
        allowed = np.flatnonzero(np.isfinite(self.own[v].costs))
        if not allowed.size:
            return False
        if allowed.size < len(self.values[v]):
            self._restrict(v, allowed)
        if allowed.size == 1 or len(self.around[v]) <= 1:
            self._eliminate(v)
        return True

    def _restrict(self, v: int, kept: Array) -> None:
        self.values[v] = self.values[v][kept]
        self.own[v] = self.tables.restricted(self.own[v], kept, 0)
        for n in self.around[v]:
            ends = min(v, n), max(v, n)
            self.pairs[ends] = self.tables.restricted(self.pairs[ends], kept, ends.index(v))
        self._mark(v, *self.around[v])

    def _eliminate(self, v: int) -> None:
        """Eliminate a variable with one value, or at most two neighbours."""
        around, own = sorted(self.around[v]), self.own[v]
        tables = [self._toward(v, n) for n in around]
        neighbours = tuple((n, self.values[n], t.costs) for n, t in zip(around, tables, strict=True))
        self.decided.append(EliminatedVariable(v, self.values[v], own.costs, neighbours))
        for n in around:
            del self.pairs[min(v, n), max(v, n)]
            self.around[n].discard(v)
        if not around:
            self.constant += float(own.costs.min())
        elif len(around) == 2 and len(self.values[v]) > 1:
            self._join((around[0], around[1]), self.tables.eliminated_to_two(tables[0], own, tables[1]))
        else:
            for k, (n, table) in enumerate(zip(around, tables, strict=True)):
                self.own[n] = self.tables.sum_of(
                    self.own[n], self.tables.eliminated_to_one(table, own if k == 0 else self.tables.free)
                )
        self.alive.discard(v)
        self._mark(*around)

    def _remove_dominated(self, v: int) -> None:
        """Remove dominated values; of equal values the lowest stays. Does nothing where the comparison would be expensive."""
        count = len(self.values[v])
        if any(count**2 * len(self.values[n]) > CHEAP for n in self.around[v]) or count == 1:
            return
        around = [self._toward(v, n) for n in sorted(self.around[v])]
        left = self.tables.undominated(self.own[v], around)
        if len(left) < count:
            self._restrict(v, left)

    def _eliminate_between(self) -> None:
        """Eliminate variables with two neighbours, the cheapest first, but no two that are neighbours of each other."""
        work = {v: prod(len(self.values[u]) for u in (v, *self.around[v])) for v in self.alive if len(self.around[v]) == 2}
        for v in sorted(work, key=lambda v: (work[v], v)):
            if work[v] <= CHEAP and v not in self.changed:
                self._eliminate(v)
