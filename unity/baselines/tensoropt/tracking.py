"""Frontier tracking (TensorOpt, section 3.2, algorithm 2): eliminations, linear dynamic programming, and the way back.

Both published ways are here. *FT-LDP* marks operators that lie in a row, eliminates the others, and goes through the row once
(algorithm 3). *FT-Elimination* marks the first operator and the last alone, eliminates all others, and has two left.

Edges are taken without their direction: an operator with two neighbours is eliminated by node elimination, one with a single
neighbour by branch elimination with nothing to concatenate (equation 6 as it is printed), one with more by branch elimination with
its neighbour's configurations concatenated, where there are not too many of these. Those three, and edge elimination, are exact.
*Heuristic elimination* is not: it gives one operator one configuration, once with the least memory and once in the least time, and
the frontiers of both are put together. What is lost where, `Tracked.fixed` says.

The paper keeps frontiers whole. Here a frontier keeps at most `most` tuples, evenly spread, its leanest and its fastest among them:
so the leanest and the fastest strategies are exact whatever `most` is, and those between may be missed. `most=None` keeps all.
Equal tables are made once, so that equal layers are: the paper spends 48 cores on them instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Literal

import numpy as np

from unity.baselines.tensoropt.frontiers import Frontiers, chosen, combined, expanded, initial, one
from unity.search.solver.problem import Array, Point, Problem, nondominated, points

CONCATENATED = 2_000  # configurations of two operators together that branch elimination may make
MOST = 8  # tuples of a frontier, while operators are eliminated
LAST = 200  # of the cumulative frontiers, along the row

Way = Literal["ldp", "elimination"]
Heuristic = Literal["memory", "time"]


@dataclass(frozen=True)
class Tracked:
    """The frontier by ascending time, and the variables that heuristic elimination fixed: where there are none, it is exact
    but for what `most` left out."""

    points: tuple[Point, ...]
    fixed: tuple[int, ...]


def track(
    problem: Problem,
    first: int = 0,
    last: int | None = None,
    *,
    way: Way = "ldp",
    most: int | None = MOST,
    cumulative: int | None = LAST,
    concatenated: int = CONCATENATED,
) -> Tracked:
    """The cost frontier of a problem. `first`, `last`: the operators that receive the input and make the output.

    `most`: tuples that a frontier keeps while operators are eliminated, `cumulative`: along the row; None: all. `concatenated`: how
    many configurations branch elimination may give two operators together, before heuristic elimination is taken instead.
    """
    ends = first, len(problem.sizes) - 1 if last is None else last
    memo: dict[tuple, Frontiers] = {}
    found, fixed = list[Point](), set[int]()
    for heuristic in ("memory", "time"):
        graph = _Graph(problem, most, cumulative, concatenated, heuristic, memo)
        found += graph.track(ends, way)
        fixed |= set(graph.fixed)
        if not graph.fixed:
            break
    if not found and fixed:  # so that nothing is left: fewer are then, until none is
        more = 8 * max(1, concatenated)
        return track(problem, first, last, way=way, most=most, cumulative=cumulative, concatenated=more)
    return Tracked(nondominated(found), tuple(sorted(fixed)))


@dataclass(frozen=True, eq=False)
class _Made:
    """A table of the graph, and what it was made of; of one of the problem's own tables, its number."""

    table: Frontiers
    parts: tuple[_Made, ...] = ()
    leaf: int | None = None


@dataclass
class _Graph:
    """The computation graph while it is simplified. Edges are keyed by their ends, the lower first, and lie so."""

    problem: Problem
    most: int | None
    cumulative: int | None
    concatenated: int
    heuristic: Heuristic
    memo: dict[tuple, Frontiers]
    nodes: dict[int, _Made] = field(default_factory=dict)
    edges: dict[tuple[int, int], _Made] = field(default_factory=dict)
    around: dict[int, set[int]] = field(default_factory=dict)
    row: list[int] = field(default_factory=list)  # the marked operators, in order
    fixed: list[int] = field(default_factory=list)
    closed: list[_Made] = field(default_factory=list)  # of what is not joined to the row

    def track(self, ends: tuple[int, int], way: Way) -> list[Point]:
        """Algorithm 2."""
        self.initialize()
        self.row = list(dict.fromkeys(ends if way == "elimination" else ends[:1]))
        while True:
            if way == "ldp":
                self.mark()
            if not self.exact() and not self.heuristics():
                break
        return self.unroll(self.ldp())

    def initialize(self) -> None:
        """The cost frontier of every operator and edge; several edges between two operators are one (edge elimination)."""
        count = len(self.problem.sizes)
        self.around = {v: set() for v in range(count)}
        for index, (scope, cost) in enumerate(self.problem.tables):
            key = ("initial", cost.key)
            if key not in self.memo:
                self.memo[key] = initial(cost, self.most)
            made = _Made(self.memo[key], leaf=index)
            if len(scope) == 1:
                self.nodes[scope[0]] = made
            else:
                self.join(scope[0], scope[1], made)

    def join(self, u: int, v: int, made: _Made) -> None:
        """A further edge between two operators, that lies as they are named; the product with what is there (equation 5)."""
        pair = (min(u, v), max(u, v))
        axes = "ab" if u < v else "ba"
        before = self.edges.get(pair)
        if before is not None:
            self.edges[pair] = self.combine(before, made, f"ab,{axes}->ab")
        else:
            self.edges[pair] = made if u < v else self.combine(made, _ONE, "ba,->ab")
        self.around[u].add(v)
        self.around[v].add(u)

    def combine(self, a: _Made, b: _Made, axes: str, most: int | None = -1) -> _Made:
        most = self.most if most == -1 else most
        key = (a.table.key, b.table.key, axes, most)
        if key not in self.memo:
            self.memo[key] = combined(a.table, b.table, axes, most)
        return _Made(self.memo[key], (a, b))

    def mark(self) -> None:
        """The next operators in the row: what its last is alone followed by."""
        while True:
            after = self.around[self.row[-1]] - set(self.row)
            if len(after) != 1 or len(self.around[min(after)] & set(self.row)) > 1:
                return
            self.row.append(min(after))

    def exact(self) -> bool:
        """Node or branch elimination of the operator where it is least work; whether there was one."""
        marked = set(self.row)
        small = [v for v, near in self.around.items() if len(near) <= 2 and v not in marked]
        if small:
            self.eliminate(min(small, key=lambda v: (self.work(v), v)))
            return True
        pairs = [(self.size(u) * self.size(v), u, v) for u, v in self.edges if not {u, v} <= marked]
        least = min(pairs, default=(self.concatenated + 1, 0, 0))
        if least[0] > self.concatenated:
            return False
        _, u, v = least
        self.concatenate(*((v, u) if u in marked else (u, v)))
        return True

    def size(self, v: int) -> int:
        """How many configurations an operator has."""
        return self.nodes[v].table.shape[0]

    def work(self, v: int) -> int:
        return self.size(v) * prod(self.size(u) for u in self.around[v])

    def eliminate(self, v: int) -> None:
        """Takes an operator with at most two neighbours out (equations 4 and 6)."""
        near, own = sorted(self.around[v]), self.nodes[v]
        towards = [(self.edges[min(u, v), max(u, v)], "vu" if v < u else "uv") for u in near]
        self.remove(v)
        if not near:
            self.closed.append(self.combine(own, _ONE, "v,->"))
            return
        edge, axes = towards[0]
        beside = self.combine(edge, own, f"{axes},v->{axes}")
        if len(near) == 1:
            merged = self.combine(beside, _ONE, f"{axes},->u")
            self.nodes[near[0]] = self.combine(merged, self.nodes[near[0]], "u,u->u")
            return
        other, axes_2 = towards[1]
        self.join(near[0], near[1], self.combine(beside, other, f"{axes},{axes_2.replace('u', 'w')}->uw"))

    def remove(self, v: int) -> None:
        for u in self.around.pop(v):
            self.around[u].discard(v)
            del self.edges[min(u, v), max(u, v)]
        del self.nodes[v]

    def concatenate(self, i: int, h: int) -> None:
        """Branch elimination with concatenated configurations: operator i becomes part of operator h, whose are pairs then."""
        edge, lies = self.edges[min(i, h), max(i, h)], "ih" if i < h else "hi"
        left = self.combine(edge, self.nodes[i], f"{lies},i->hi")
        both = self.combine(left, self.nodes[h], "hi,h->hi")
        pairs = np.argwhere(both.table.feasible)
        self.nodes[h] = _Made(_flat(both.table, pairs), (both,))
        moved = {u: self.edges[min(u, i), max(u, i)] for u in self.around[i] if u != h}
        for u in self.around[h] - {i}:
            pair = (min(u, h), max(u, h))
            self.edges[pair] = _expand(self.edges[pair], pair.index(h), pairs[:, 0])
        for u in moved:
            moved[u] = _expand(moved[u], (min(u, i), max(u, i)).index(i), pairs[:, 1])
        self.remove(i)
        for u, made in moved.items():
            self.join(*((h, u) if i < u else (u, h)), made)

    def heuristics(self) -> bool:
        """Heuristic elimination of the operator with most neighbours (equation 7); whether there was one to eliminate."""
        left = [v for v in self.around if v not in self.row]
        if not left:
            return False
        v = min(left, key=lambda v: (-len(self.around[v]), self.size(v), v))
        value, own = self.configuration(v), self.nodes[v]
        edges = {u: (self.edges[min(u, v), max(u, v)], v < u) for u in self.around[v]}
        self.remove(v)
        self.fixed.append(v)
        alone = _Made(chosen(own.table, [value]), (own,))
        self.closed.append(alone)
        for u, (made, before) in edges.items():
            beside = _Made(chosen(made.table, [value, None] if before else [None, value]), (made,))
            self.nodes[u] = self.combine(beside, self.nodes[u], "u,u->u")
        return True

    def configuration(self, v: int) -> int:
        """The configuration with the least memory, or in the least time, with the best that its neighbours can do."""
        costs, possible = [self.nodes[v].table], np.ones(self.size(v), bool)
        for u in self.around[v]:
            axes = "vu" if v < u else "uv"
            edge = self.edges[min(u, v), max(u, v)]
            costs.append(self.combine(self.combine(edge, self.nodes[u], f"{axes},u->{axes}"), _ONE, f"{axes},->v").table)
        totals = np.zeros((2, self.size(v)))
        for table in costs:
            possible &= table.feasible
            for row, values in enumerate((table.memory, table.time)):
                least = np.full(self.size(v), np.inf)
                np.minimum.at(least, table.entry, values)
                totals[row] += least
        order = totals if self.heuristic == "memory" else totals[::-1]
        return int(np.lexsort((order[1], order[0], ~possible))[0])

    def ldp(self) -> _Made:
        """Algorithm 3: the cumulative frontiers along the row, and what is not joined to it."""
        before, whole = None, self.nodes[self.row[0]]
        for v in self.row[1:]:
            before, u = whole, self.row[self.row.index(v) - 1]
            edge = self.edges.get((min(u, v), max(u, v)))
            if edge is not None:
                before = self.combine(before, edge, f"u,{'uv' if u < v else 'vu'}->v", self.cumulative)
                whole = self.combine(before, self.nodes[v], "v,v->v", self.cumulative)
            else:
                whole = self.combine(before, self.nodes[v], "u,v->v", self.cumulative)
        total = self.combine(whole, _ONE, "v,->", self.cumulative)
        for made in self.closed:
            total = self.combine(total, made, ",->", self.cumulative)
        return total

    def unroll(self, total: _Made) -> list[Point]:
        """The strategies behind the tuples of the last frontier: every operator's configuration, every table's alternative."""
        count = len(total.table)
        values = np.zeros((count, len(self.problem.sizes)), np.int64)
        alternatives = np.zeros((count, len(self.problem.tables)), np.int64)
        stack: list[tuple[_Made, Array]] = [(total, np.arange(count))]
        while stack:
            made, rows = stack.pop()
            if made.leaf is not None:
                alternatives[:, made.leaf] = made.table.back[0][rows]
                if made.leaf < len(self.problem.sizes):
                    values[:, made.leaf] = made.table.entry[rows]
            for part, back in zip(made.parts, made.table.back, strict=False):
                stack.append((part, back[rows]))
        return points(self.problem, values, alternatives, not self.fixed)


_ONE = _Made(one())


def _flat(table: Frontiers, pairs: Array) -> Frontiers:
    """A table of two axes as one of the pairs that are feasible, [pairs, 2]."""
    number = np.zeros(table.shape, np.int64)
    number[tuple(pairs.T)] = np.arange(len(pairs))
    entry, rows = number.reshape(-1)[table.entry], np.arange(len(table))
    return Frontiers(f"{table.key} flat", (len(pairs),), entry, table.time, table.memory, (rows,))


def _expand(made: _Made, axis: int, index: Array) -> _Made:
    return _Made(expanded(made.table, axis, index), (made,))
