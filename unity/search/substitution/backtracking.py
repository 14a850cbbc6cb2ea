"""Best-first search with backtracking over the parallel graphs that substitutions reach (Unity, section 5.1)."""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from unity.search.joint.backtracking import ALPHA
from unity.search.joint.joint import Budget
from unity.search.substitution.space import Axes, Graph, Space
from unity.search.substitution.substitutions import Step, steps

Hashes = tuple[int, ...]  # of what is on each axis; 0 where nothing is


@dataclass
class Spent:
    """Candidates that were priced, out of a budget."""

    budget: Budget
    candidates: int = 0
    cut: bool = False  # whether a search ended while graphs were waiting
    started: float = field(default_factory=time.perf_counter)

    @property
    def left(self) -> bool:
        """Whether there is any left."""
        return self.budget.left(self.candidates, self.started)


@dataclass(frozen=True, eq=False)
class Found:
    """A graph, by what is different from the graph before; its price is relative to the first one's."""

    price: float
    hashes: Hashes
    before: Found | None = None
    step: Step | None = None
    changed: Mapping[int, int] = field(default_factory=dict)

    @property
    def line(self) -> tuple[Found, ...]:
        """The graphs on the way here, from the one after the first."""
        at: Found = self
        found = list[Found]()
        while at.before is not None:
            found.append(at)
            at = at.before
        return tuple(reversed(found))

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every step from the first graph."""
        return tuple(found.step for found in self.line if found.step is not None)

    def graph(self, first: Graph) -> Graph:
        """The graph itself. `first`: the one that the search began with."""
        values = list(first)
        for found in self.line:
            for s, v in found.changed.items():
                values[s] = v
        return tuple(values)


def hashes(space: Space, graph: Graph) -> Hashes:
    """A hash of what is on each axis."""
    found = [0] * len(space.machine.axes)
    for s, value in enumerate(graph):
        for axis, h in _of_site(space, s, value):
            found[axis] ^= h
    return tuple(found)


def _of_site(space: Space, s: int, value: int) -> list[tuple[int, int]]:
    kind = space.kinds[s]
    return [(axis, hash((s, c, 1))) for axis, c in enumerate(kind.values[value]) if c != kind.serial]


def canonical(space: Space, found: Hashes) -> Hashes:
    """Equal for graphs that differ only in which of interchangeable axes is which."""
    return tuple(h for group in space.groups for h in sorted(found[i] for i in group))


def usable(space: Space, degrees: Sequence[Axes], found: Hashes) -> list[Axes]:
    """Those that a step may use: of interchangeable axes that nothing is on, the first."""
    before = {i: j for group in space.groups for j, i in pairwise(group)}
    return [axes for axes in degrees if all(i not in before or found[before[i]] or before[i] in axes for i in axes)]


def backtrack(
    space: Space, first: Graph, part: Sequence[int], degrees: Sequence[Axes], most: int, spent: Spent, alpha: float = ALPHA
) -> Found:
    """The cheapest graph that is reached from one by substitutions in a part of it.

    At most so many graphs are taken from the queue. Their order depends on nothing but the graph, so a longer search finds what
    a shorter one did, and more.
    """
    start = space.price(first, part)
    best = Found(0.0, hashes(space, first))
    seen, waiting, count = {canonical(space, best.hashes)}, [(0.0, 0, best)], 0
    while waiting and most:
        price, _, found = heapq.heappop(waiting)
        most -= 1
        if start + price > alpha * (start + best.price):
            return best
        graph = found.graph(first)
        for step, changed in steps(space, graph, part, usable(space, degrees, found.hashes)):
            after = _hashed(space, graph, found.hashes, changed, step.axes)
            name = canonical(space, after)
            if name in seen:
                continue
            if not spent.left:
                return best
            seen.add(name)
            count += 1
            spent.candidates += 1
            reached = Found(price + space.difference(graph, changed), after, found, step, changed)
            if start + reached.price <= alpha * (start + best.price):
                heapq.heappush(waiting, (reached.price, count, reached))
            if reached.price < best.price:
                best = reached
    spent.cut = spent.cut or bool(waiting)
    return best


def _hashed(space: Space, graph: Graph, before: Hashes, changed: Mapping[int, int], axes: Axes) -> Hashes:
    found = list(before)
    for s, value in changed.items():
        kind = space.kinds[s]
        for axis in axes:
            for c in (kind.values[graph[s]][axis], kind.values[value][axis]):
                found[axis] ^= hash((s, c, 1)) if c != kind.serial else 0
    return tuple(found)
