"""Best-first search with backtracking over the parallel graphs that substitutions reach (Unity, section 5.1)."""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from unity.search.joint.backtracking import ALPHA
from unity.search.joint.joint import Budget
from unity.search.substitution.space import Axes, Graph, GraphSpace
from unity.search.substitution.substitutions import SubstitutionStep, steps

Hashes = tuple[int, ...]  # for each axis a hash of the choices along it; 0 if the axis is idle


@dataclass
class Spent:
    """The number of candidates priced so far, out of a budget."""

    budget: Budget
    candidates: int = 0
    cut: bool = False  # whether a search ended while graphs were waiting
    started: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> bool:
        """Whether any of the budget is left."""
        return self.budget.left(self.candidates, self.started)


@dataclass(frozen=True, eq=False)
class ReachedGraph:
    """A reached graph, stored as a difference to the graph before; its price is relative to the first graph's."""

    price: float
    hashes: Hashes
    before: ReachedGraph | None = None
    step: SubstitutionStep | None = None
    changed: Mapping[int, int] = field(default_factory=dict)

    @property
    def path(self) -> tuple[ReachedGraph, ...]:
        """The graphs on the path to this one, without the first."""
        at: ReachedGraph = self
        path = list[ReachedGraph]()
        while at.before is not None:
            path.append(at)
            at = at.before
        return tuple(reversed(path))

    @property
    def steps(self) -> tuple[SubstitutionStep, ...]:
        """All steps from the first graph."""
        return tuple(reached.step for reached in self.path if reached.step is not None)

    def graph(self, first: Graph) -> Graph:
        """Return the graph itself. `first` is the graph with which the search began."""
        values = list(first)
        for reached in self.path:
            for s, v in reached.changed.items():
                values[s] = v
        return tuple(values)


def hashes(space: GraphSpace, graph: Graph) -> Hashes:
    """Return a hash of the choices on each axis."""
    by_axis = [0] * len(space.machine.axes)
    for s, value in enumerate(graph):
        for axis, h in _of_site(space, s, value):
            by_axis[axis] ^= h
    return tuple(by_axis)


def _of_site(space: GraphSpace, s: int, value: int) -> list[tuple[int, int]]:
    kind = space.kinds[s]
    return [(axis, hash((s, c, 1))) for axis, c in enumerate(kind.values[value]) if c != kind.serial]


def canonical(space: GraphSpace, by_axis: Hashes) -> Hashes:
    """Return hashes that are equal for graphs that differ only by a permutation of interchangeable axes."""
    return tuple(h for group in space.groups for h in sorted(by_axis[i] for i in group))


def usable(space: GraphSpace, degrees: Sequence[Axes], by_axis: Hashes) -> list[Axes]:
    """Return the degrees that a step may use: of interchangeable axes that are idle, only the first."""
    before = {i: j for group in space.groups for j, i in pairwise(group)}
    return [axes for axes in degrees if all(i not in before or by_axis[before[i]] or before[i] in axes for i in axes)]


def backtrack(
    space: GraphSpace, first: Graph, part: Sequence[int], degrees: Sequence[Axes], most: int, spent: Spent, alpha: float = ALPHA
) -> ReachedGraph:
    """Return the cheapest graph that is reached from `first` by substitutions in a part of it.

    At most `most` graphs are taken from the queue. Their order depends only on the graph, so a longer search finds everything that
    a shorter one does, and more.
    """
    start = space.price(first, part)
    best = ReachedGraph(0.0, hashes(space, first))
    seen, waiting, count = {canonical(space, best.hashes)}, [(0.0, 0, best)], 0
    while waiting and most:
        price, _, current = heapq.heappop(waiting)
        most -= 1
        if start + price > alpha * (start + best.price):
            return best
        graph = current.graph(first)
        for step, changed in steps(space, graph, part, usable(space, degrees, current.hashes)):
            after = _updated_hashes(space, graph, current.hashes, changed, step.axes)
            key = canonical(space, after)
            if key in seen:
                continue
            if not spent.left:
                return best
            seen.add(key)
            count += 1
            spent.candidates += 1
            reached = ReachedGraph(price + space.difference(graph, changed), after, current, step, changed)
            if start + reached.price <= alpha * (start + best.price):
                heapq.heappush(waiting, (reached.price, count, reached))
            if reached.price < best.price:
                best = reached
    spent.cut = spent.cut or bool(waiting)
    return best


def _updated_hashes(space: GraphSpace, graph: Graph, before: Hashes, changed: Mapping[int, int], axes: Axes) -> Hashes:
    by_axis = list(before)
    for s, value in changed.items():
        kind = space.kinds[s]
        for axis in axes:
            for c in (kind.values[graph[s]][axis], kind.values[value][axis]):
                by_axis[axis] ^= hash((s, c, 1)) if c != kind.serial else 0
    return tuple(by_axis)
