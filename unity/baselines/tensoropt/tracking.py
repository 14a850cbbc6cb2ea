"""Frontier tracking (TensorOpt, section 3.2, algorithm 2): eliminations, linear dynamic programming, and unrolling.

Both published variants are here. *FT-LDP* marks operators that form a row, eliminates the others, and goes through the row once
(algorithm 3). *FT-Elimination* marks only the first operator and the last, and eliminates all others.

Edges are used without their direction. An operator with two neighbours is eliminated by node elimination; one with a single
neighbour by branch elimination without concatenation (equation 6 as printed); one with more by branch elimination, with its
configurations concatenated to a neighbour's, if these are not too many. These three, and edge elimination, are exact. *Heuristic
elimination* is not: it fixes an operator at one configuration, once that with the least memory and once that with the least time,
and merges the frontiers of both. `Tracked.fixed` says where that happened.

The paper keeps frontiers whole. Here a frontier keeps at most `most` tuples, evenly spread, with its leanest and its fastest among
them: so the leanest and the fastest strategies are exact whatever `most` is, and some between may be missed. `most=None` keeps all.
Equal tables are computed once, and so are equal layers, whereas the paper spends 48 cores on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Literal

import numpy as np

from unity.baselines.tensoropt.frontiers import Frontiers, chosen, combined, expanded, initial, one
from unity.search.solver.problem import Array, Point, Problem, nondominated, points

CONCATENATED = 2_000  # concatenated configurations that branch elimination may make
MOST = 8  # tuples per frontier while operators are eliminated
LAST = 200  # tuples per cumulative frontier along the row

Way = Literal["ldp", "elimination"]
Heuristic = Literal["memory", "time"]


@dataclass(frozen=True)
class Tracked:
    """The frontier by ascending time, and the variables that heuristic elimination fixed.

    If none is fixed, the frontier is exact except for the tuples that `most` left out.
    """

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
    """Return the cost frontier of a problem.

    Args:
        problem: the problem.
        first: the operator that receives the input.
        last: the operator that produces the output; by default the last one.
        way: the variant of the algorithm.
        most: tuples per frontier while operators are eliminated; None: all.
        cumulative: tuples per frontier along the row; None: all.
        concatenated: how many concatenated configurations branch elimination may make before heuristic elimination is used instead.
    """
    ends = first, len(problem.sizes) - 1 if last is None else last
    memo: dict[tuple, Frontiers] = {}
    front, fixed = list[Point](), set[int]()
    for heuristic in ("memory", "time"):
        graph = _Graph(problem, most, cumulative, concatenated, heuristic, memo)
        front += graph.track(ends, way)
        fixed |= set(graph.fixed)
        if not graph.fixed:
            break
    if not front and fixed:  # fixing operators left no strategy: fix fewer, in the end none
        more = 8 * max(1, concatenated)
        return track(problem, first, last, way=way, most=most, cumulative=cumulative, concatenated=more)
    return Tracked(nondominated(front), tuple(sorted(fixed)))


@dataclass(frozen=True, eq=False)
class _TableNode:
    """A table of the graph, and the tables from which it was made; for one of the problem's own tables, its number."""

    table: Frontiers
    parts: tuple[_TableNode, ...] = ()
    leaf: int | None = None


@dataclass
class _Graph:
    """The computation graph while it is simplified. Edges are keyed by their ends, the lower first, and have that orientation."""

    problem: Problem
    most: int | None
    cumulative: int | None
    concatenated: int
    heuristic: Heuristic
    memo: dict[tuple, Frontiers]
    nodes: dict[int, _TableNode] = field(default_factory=dict)
    edges: dict[tuple[int, int], _TableNode] = field(default_factory=dict)
    around: dict[int, set[int]] = field(default_factory=dict)
    row: list[int] = field(default_factory=list)  # the marked operators, in order
    fixed: list[int] = field(default_factory=list)
    closed: list[_TableNode] = field(default_factory=list)  # tables of components that are not joined to the row

    def track(self, ends: tuple[int, int], way: Way) -> list[Point]:
        """Run algorithm 2."""
        self.initialize()
        self.row = list(dict.fromkeys(ends if way == "elimination" else ends[:1]))
        while True:
            if way == "ldp":
                self.mark()
            if not self.exact() and not self.heuristics():
                break
        return self.unroll(self.ldp())

    def initialize(self) -> None:
        """Compute the cost frontier of every operator and edge; several edges between two operators become one (edge
        elimination).
        """
        count = len(self.problem.sizes)
        self.around = {v: set() for v in range(count)}
        for index, (scope, cost) in enumerate(self.problem.tables):
            key = ("initial", cost.key)
            if key not in self.memo:
                self.memo[key] = initial(cost, self.most)
            table = _TableNode(self.memo[key], leaf=index)
            if len(scope) == 1:
                self.nodes[scope[0]] = table
            else:
                self.join(scope[0], scope[1], table)

    def join(self, u: int, v: int, table: _TableNode) -> None:
        """Add an edge between two operators, oriented from u to v; it is multiplied with an existing one (equation 5)."""
        pair = (min(u, v), max(u, v))
        axes = "ab" if u < v else "ba"
        before = self.edges.get(pair)
        if before is not None:
            self.edges[pair] = self.combine(before, table, f"ab,{axes}->ab")
        else:
            self.edges[pair] = table if u < v else self.combine(table, _ONE, "ba,->ab")
        self.around[u].add(v)
        self.around[v].add(u)

    def combine(self, a: _TableNode, b: _TableNode, axes: str, most: int | None = -1) -> _TableNode:
        most = self.most if most == -1 else most
        key = (a.table.key, b.table.key, axes, most)
        if key not in self.memo:
            self.memo[key] = combined(a.table, b.table, axes, most)
        return _TableNode(self.memo[key], (a, b))

    def mark(self) -> None:
        """Mark the next operators of the row: the only successor of its last one, and so on."""
        while True:
            after = self.around[self.row[-1]] - set(self.row)
            if len(after) != 1 or len(self.around[min(after)] & set(self.row)) > 1:
                return
            self.row.append(min(after))

    def exact(self) -> bool:
        """Eliminate the operator that takes least work by node or branch elimination. Returns whether there was one."""
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
        """Return the number of an operator's configurations."""
        return self.nodes[v].table.shape[0]

    def work(self, v: int) -> int:
        return self.size(v) * prod(self.size(u) for u in self.around[v])

    def eliminate(self, v: int) -> None:
        """Eliminate an operator with at most two neighbours (equations 4 and 6)."""
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
        """Merge operator i into operator h, whose configurations become pairs: branch elimination with concatenation."""
        edge, lies = self.edges[min(i, h), max(i, h)], "ih" if i < h else "hi"
        left = self.combine(edge, self.nodes[i], f"{lies},i->hi")
        both = self.combine(left, self.nodes[h], "hi,h->hi")
        pairs = np.argwhere(both.table.feasible)
        self.nodes[h] = _TableNode(_flat(both.table, pairs), (both,))
        moved = {u: self.edges[min(u, i), max(u, i)] for u in self.around[i] if u != h}
        for u in self.around[h] - {i}:
            pair = (min(u, h), max(u, h))
            self.edges[pair] = _expand(self.edges[pair], pair.index(h), pairs[:, 0])
        for u in moved:
            moved[u] = _expand(moved[u], (min(u, i), max(u, i)).index(i), pairs[:, 1])
        self.remove(i)
        for u, table in moved.items():
            self.join(*((h, u) if i < u else (u, h)), table)

    def heuristics(self) -> bool:
        """Fix the operator with most neighbours by heuristic elimination (equation 7). Returns whether there was one."""
        left = [v for v in self.around if v not in self.row]
        if not left:
            return False
        v = min(left, key=lambda v: (-len(self.around[v]), self.size(v), v))
        value, own = self.configuration(v), self.nodes[v]
        edges = {u: (self.edges[min(u, v), max(u, v)], v < u) for u in self.around[v]}
        self.remove(v)
        self.fixed.append(v)
        alone = _TableNode(chosen(own.table, [value]), (own,))
        self.closed.append(alone)
        for u, (table, before) in edges.items():
            beside = _TableNode(chosen(table.table, [value, None] if before else [None, value]), (table,))
            self.nodes[u] = self.combine(beside, self.nodes[u], "u,u->u")
        return True

    def configuration(self, v: int) -> int:
        """Return the configuration with the least memory, or the least time, counting the best that its neighbours can do."""
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

    def ldp(self) -> _TableNode:
        """Run algorithm 3: the cumulative frontiers along the row, and everything not joined to it."""
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
        for table in self.closed:
            total = self.combine(total, table, ",->", self.cumulative)
        return total

    def unroll(self, total: _TableNode) -> list[Point]:
        """Return the strategies behind the tuples of the last frontier, by following the tuples back to the problem's tables."""
        count = len(total.table)
        values = np.zeros((count, len(self.problem.sizes)), np.int64)
        alternatives = np.zeros((count, len(self.problem.tables)), np.int64)
        stack: list[tuple[_TableNode, Array]] = [(total, np.arange(count))]
        while stack:
            node, rows = stack.pop()
            if node.leaf is not None:
                alternatives[:, node.leaf] = node.table.back[0][rows]
                if node.leaf < len(self.problem.sizes):
                    values[:, node.leaf] = node.table.entry[rows]
            for part, back in zip(node.parts, node.table.back, strict=False):
                stack.append((part, back[rows]))
        return points(self.problem, values, alternatives, not self.fixed)


_ONE = _TableNode(one())


def _flat(table: Frontiers, pairs: Array) -> Frontiers:
    """Return a table of two axes as one of the feasible pairs, [pairs, 2]."""
    number = np.zeros(table.shape, np.int64)
    number[tuple(pairs.T)] = np.arange(len(pairs))
    entry, rows = number.reshape(-1)[table.entry], np.arange(len(table))
    return Frontiers(f"{table.key} flat", (len(pairs),), entry, table.time, table.memory, (rows,))


def _expand(node: _TableNode, axis: int, index: Array) -> _TableNode:
    return _TableNode(expanded(node.table, axis, index), (node,))
