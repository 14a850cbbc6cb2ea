"""The core of a problem for one objective: the variables that are left when all that is cheap to decide is decided.

A variable with one value, one neighbour, or two of few values is eliminated; a value that another one of its variable is never
worse than is left out (dead-end elimination: Goldstein 1994, "Efficient rotamer elimination applied to protein side-chains"). Each
makes room for more of the others. Nothing is lost: the best strategy of the core, with the best of what was eliminated, is one of
the whole.

Tables are remembered by what they were made of, so that of a program that was rewritten in one place only that place is made anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import NamedTuple

import numpy as np

from unity.search.solver.bounds import Energy, Messages
from unity.search.solver.domains import Domains
from unity.search.solver.elimination import Solved
from unity.search.solver.minplus import product
from unity.search.solver.problem import Array, Cost, Edge, Problem, score

# Sums that the elimination of a variable may look at, or a comparison of its values on one edge: about a millisecond.
CHEAP = 2_000_000
# What stands for minus infinity where infinity is added to it: less than any sum of costs is.
LOWEST = -1e300


class Table(NamedTuple):
    """Costs, and a hash of all that they were made of."""

    costs: Array
    key: bytes


@dataclass(frozen=True, eq=False)
class Decided:
    """A variable that was eliminated: its own costs, and its tables with neighbours, [neighbour, own], at the values left then."""

    variable: int
    values: Array
    own: Array
    tables: tuple[tuple[int, Array, Array], ...]  # a neighbour, its values, the table

    def best(self, known: Array) -> int:
        """The best value, where those of the neighbours are known."""
        total = self.own
        for neighbour, values, table in self.tables:
            total = total + table[np.searchsorted(values, known[neighbour])]
        return int(self.values[total.argmin()])


@dataclass(frozen=True, eq=False)
class Core:
    """What is left of a problem for one objective, and the way back."""

    sizes: tuple[int, ...]  # of the whole problem
    variables: tuple[int, ...]  # of the whole problem, ascending
    values: tuple[Array, ...]  # that are left of each of them
    own: tuple[Table, ...]
    pairs: dict[tuple[int, int], Table]  # by places in `variables`, the first one lower
    constant: float  # what is decided costs
    decided: tuple[Decided, ...]  # in this order

    @cached_property
    def energy(self) -> Energy:
        """The tables; the last variable is none, and costs what is decided."""
        unary = [table.costs for table in self.own]
        return Energy([*unary, np.array([self.constant])], {ends: table.costs for ends, table in self.pairs.items()})

    @cached_property
    def problem(self) -> Problem:
        """The same as a problem whose time is the objective."""
        unary = [*map(_cost, self.own), Cost("", np.array([[self.constant]]), np.zeros((1, 1)))]
        edges = tuple(Edge(*ends, _cost(table)) for ends, table in self.pairs.items())
        return Problem((*map(len, self.values), 1), tuple(unary), edges)

    def whole(self, values: Sequence[int]) -> Array:
        """A strategy of the whole problem: that of the core, and the best of all else."""
        found = np.zeros(len(self.variables) + len(self.decided), np.int64)
        for v, own, value in zip(self.variables, self.values, values, strict=False):
            found[v] = own[value]
        for step in reversed(self.decided):
            found[step.variable] = step.best(found)
        return found

    def outward(self, messages: Messages) -> Messages:
        """Messages between variables of the core, as such of the whole problem: nothing where that has more values."""
        found: Messages = {}
        for (s, t), message in messages.items():
            every = np.zeros(self.sizes[self.variables[t]])
            every[self.values[t]] = np.where(np.isfinite(message), message, 0.0)  # with other values of s it may be allowed
            found[self.variables[s], self.variables[t]] = every
        return found

    def inward(self, messages: Messages) -> Messages:
        """The other way: nothing between variables that have no messages."""
        found: Messages = {}
        for a, b in self.pairs:
            for s, t in ((a, b), (b, a)):
                known = messages.get((self.variables[s], self.variables[t]))
                values = self.values[t]
                found[s, t] = np.zeros(len(values)) if known is None else np.where(np.isfinite(known[values]), known[values], 0.0)
        return found


def _cost(table: Table) -> Cost:
    return Cost(table.key.hex(), table.costs[None], np.zeros((1, *table.costs.shape)))


def core(problem: Problem, domains: Domains, direction: Array, solved: Solved | None = None) -> Core | None:
    """The core of a problem on some of its values, in one direction (see `problem.direction`). Nothing: there is no solution."""
    if domains.empty:
        return None
    reduction = _Reduction(_Tables(problem, domains, direction, solved or Solved()))
    return reduction.core if reduction.run() else None


class _Tables:
    """A problem's tables in one direction, each made once."""

    def __init__(self, problem: Problem, domains: Domains, direction: Array, solved: Solved) -> None:
        self.problem, self.domains, self.solved = problem, domains, solved
        self.direction, self.prefix = direction, direction.tobytes()
        named = {name: _hash(values.tobytes()) for name, values in zip(domains.names, domains.values, strict=True)}
        self.kept = [named[name] for name in domains.names]
        self.known: dict[tuple[str, int, int, bool], Table] = {}
        self.free = Table(np.zeros(1), b"")  # what a value costs that costs nothing

    def leaf(self, scope: tuple[int, ...], cost: Cost) -> Table:
        """One of the problem's tables, its axes by ascending variable."""
        names, turned = self.domains.names, scope[0] > scope[-1]
        same = cost.key, names[scope[0]], names[scope[-1]], turned
        if same not in self.known:
            key = _hash(b"".join((self.prefix, cost.key.encode(), *(self.kept[v] for v in scope), bytes([turned]))))
            self.known[same] = self.made(key, partial(self._leaf, scope, cost, turned))
        return self.known[same]

    def _leaf(self, scope: tuple[int, ...], cost: Cost, turned: bool) -> Array:
        kept = np.ix_(np.arange(len(cost.time)), *(self.domains.values[v] for v in scope))
        best = score(cost.time[kept], cost.memory[kept], self.direction).min(0)
        return np.ascontiguousarray(best.T) if turned else best

    def made(self, key: bytes, make: Callable[[], Array]) -> Table:
        """The table of this key."""
        return Table(self.solved.of(key, make), key)

    def added(self, a: Table | None, b: Table) -> Table:
        """The sum of two tables on the same variables."""
        return b if a is None else self.made(_hash(b"+" + a.key + b.key), lambda: a.costs + b.costs)

    def taken(self, table: Table, kept: Array, axis: int) -> Table:
        """Some of the positions on an axis."""
        return self.made(_hash(b"%d" % axis + kept.tobytes() + table.key), lambda: np.take(table.costs, kept, axis))

    def passed(self, table: Table, own: Table) -> Table:
        """The best that a variable adds to each value of its one neighbour. `table`: [neighbour, own]."""
        return self.made(_hash(b"1" + table.key + own.key), lambda: (table.costs + own.costs).min(1))

    def joined(self, a: Table, own: Table, b: Table) -> Table:
        """The best that a variable adds to each pair of values of its two neighbours. `a`, `b`: [neighbour, own]."""
        key = _hash(b"2" + a.key + own.key + b.key)
        return self.made(key, lambda: product(a.costs[None], own.costs[None], b.costs.T[None])[0])

    def worse(self, table: Table) -> Table:
        """By how much the first of two values is worse than the second at least, whatever the neighbour has. `table`:
        [neighbour, own]; a value that is forbidden everywhere is infinitely worse than all."""
        return self.made(_hash(b"-" + table.key), lambda: _differences(table.costs.T))


def _differences(rows: Array) -> Array:
    """The minimum over k of rows[i, k] - rows[j, k]; where the first is forbidden, it is infinite."""
    other = np.where(np.isfinite(rows), -rows, LOWEST).T
    return product(rows[None], np.zeros((1, rows.shape[1])), other[None])[0]


class _Reduction:
    """The tables that are left, while variables and values disappear."""

    def __init__(self, tables: _Tables) -> None:
        self.tables = tables
        self.values = list(tables.domains.values)
        self.alive = set(range(len(self.values)))
        self.around: list[set[int]] = [set() for _ in self.values]
        self.own: list[Table] = [tables.leaf((v,), cost) for v, cost in enumerate(tables.problem.unary)]
        self.pairs: dict[tuple[int, int], Table] = {}  # the lower variable first
        self.decided: list[Decided] = []
        self.constant = 0.0
        self.changed = set(self.alive)  # variables whose tables are others than when they were last looked at
        for edge in tables.problem.edges:
            ends = edge.first, edge.second
            self._join((min(ends), max(ends)), tables.leaf(ends, edge.cost))

    def run(self) -> bool:
        """Reduces as long as anything changes. Returns whether there is a solution."""
        while self.changed:
            looked_at: set[int] = set()
            while self.changed:
                v = min(self.changed)
                self.changed.remove(v)
                looked_at.add(v)
                if v in self.alive and not self._settle(v):
                    return False
            for v in sorted(looked_at & self.alive):
                self._compare(v)
            if not self.changed:
                self._between()
        return True

    @property
    def core(self) -> Core:
        """What is left."""
        left = tuple(sorted(self.alive))
        place = {v: k for k, v in enumerate(left)}
        pairs = {(place[s], place[t]): table for (s, t), table in sorted(self.pairs.items())}
        own = tuple(self.own[v] for v in left)
        return Core(
            self.tables.problem.sizes, left, tuple(self.values[v] for v in left), own, pairs, self.constant, tuple(self.decided)
        )

    def _join(self, ends: tuple[int, int], table: Table) -> None:
        s, t = ends
        self.pairs[ends] = self.tables.added(self.pairs.get(ends), table)
        self.around[s].add(t)
        self.around[t].add(s)

    def _toward(self, v: int, neighbour: int) -> Table:
        """The table of two variables, as [neighbour, variable]."""
        if neighbour < v:
            return self.pairs[neighbour, v]
        costs, key = self.pairs[v, neighbour]
        return Table(costs.T, key + b"T")

    def _settle(self, v: int) -> bool:
        """Leaves out what is forbidden, and eliminates a variable with one value, or one neighbour. Returns whether any value is
        left."""
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
        self.own[v] = self.tables.taken(self.own[v], kept, 0)
        for n in self.around[v]:
            ends = min(v, n), max(v, n)
            self.pairs[ends] = self.tables.taken(self.pairs[ends], kept, ends.index(v))
        self.changed |= {v, *self.around[v]}

    def _eliminate(self, v: int) -> None:
        """Eliminates a variable with one value, or at most two neighbours."""
        around, own = sorted(self.around[v]), self.own[v]
        tables = [self._toward(v, n) for n in around]
        self.decided.append(
            Decided(v, self.values[v], own.costs, tuple((n, self.values[n], t.costs) for n, t in zip(around, tables, strict=True)))
        )
        for n in around:
            del self.pairs[min(v, n), max(v, n)]
            self.around[n].discard(v)
        if not around:
            self.constant += float(own.costs.min())
        elif len(around) == 2 and len(self.values[v]) > 1:
            self._join((around[0], around[1]), self.tables.joined(tables[0], own, tables[1]))
        else:
            for k, (n, table) in enumerate(zip(around, tables, strict=True)):
                self.own[n] = self.tables.added(self.own[n], self.tables.passed(table, own if k == 0 else self.tables.free))
        self.alive.discard(v)
        self.changed |= set(around)

    def _compare(self, v: int) -> None:
        """Leaves out the values that another one is never worse than; of equals the lowest stays."""
        count = len(self.values[v])
        if any(count**2 * len(self.values[n]) > CHEAP for n in self.around[v]) or count == 1:
            return
        own = self.own[v].costs
        worse = own[:, None] - own
        for n in sorted(self.around[v]):
            worse = worse + self.tables.worse(self._toward(v, n)).costs
        np.fill_diagonal(worse, -np.inf)
        dominated = worse >= 0
        left = np.ones(count, bool)
        for value in np.flatnonzero(dominated.any(1))[::-1]:
            left[value] = not (dominated[value] & left).any()
        if not left.all():
            self._restrict(v, np.flatnonzero(left))

    def _between(self) -> None:
        """Eliminates variables between two others, the cheapest first, no two of them neighbours."""
        work = {v: prod(len(self.values[u]) for u in (v, *self.around[v])) for v in self.alive if len(self.around[v]) == 2}
        for v in sorted(work, key=lambda v: (work[v], v)):
            if work[v] <= CHEAP and v not in self.changed:
                self._eliminate(v)


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
