"""Which configurations of an operator frontier tracking looks at, where not all of them.

The paper tracks frontiers over all configurations, on 48 cores for up to 22 minutes. Node elimination takes time cubic in their
number, so here an operator is left those that some good strategy has: one of the convex hull of the frontier, found by exact
elimination for some weights of memory (`search.minimizer`), or one close to it by its bounds (`search.bounds`). Equal operators are
left the same ones, so that equal layers stay equal. The leanest and the fastest strategies are on the hull, so they are not lost;
between them frontier tracking puts the configurations together anew. `of=None` in `TensorOpt` looks at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unity.baselines.restricted import Space
from unity.baselines.tensoropt.frontiers import named
from unity.search.solver.bounds import Bounds
from unity.search.solver.problem import Array, Cost, Edge, Point, Problem, direction, points

# What a byte counts, of what it does on the line between the fastest strategy and the leanest.
WEIGHTS = (0.01, 0.1, 0.3, 1.0, 10.0)
BOUNDED = (0.01, 0.3, 10.0)  # of these, those for which configurations close to the best are added
ALMOST = 1e-10  # of what it is worth, a byte where time is wanted: so of equally fast strategies the leanest is found at once
PASSES = 2  # of message passing, for the bounds


@dataclass(frozen=True, eq=False)
class Some:
    """A problem with some of its values: `kept` has them, for every variable."""

    problem: Problem
    kept: tuple[Array, ...]
    whole: Problem

    def strategy(self, found: Sequence[Point]) -> tuple[Point, ...]:
        """Points of it as points of the whole problem."""
        if not found:
            return ()
        values = np.array([[kept[v] for kept, v in zip(self.kept, p.values, strict=True)] for p in found])
        taken = np.array([[*p.alternatives.unary, *p.alternatives.edges] for p in found])
        return tuple(points(self.whole, values, taken, found[0].exact))


def promising(space: Space, close: int) -> Some:
    """The space's problem with the values of the hull, and for each operator so many that are close to it, for some weights."""
    scale = nearly(space.problem)
    hull = space.minimizer.at([scale * ALMOST, scale / ALMOST])
    if not hull:
        return Some(space.problem, tuple(np.arange(n) for n in space.problem.sizes), space.problem)
    fast, lean = hull
    rate = (lean.time - fast.time) / (fast.memory - lean.memory) if fast.memory > lean.memory else 0.0
    hull += space.minimizer.at([part * rate for part in WEIGHTS]) if rate else []
    wanted = [{point.values[v] for point in hull} for v in range(len(space.problem.sizes))]
    for part in BOUNDED if rate and close else ():
        bounds = Bounds(space.minimizer.elimination.energy(np.array(direction(part * rate))))
        bounds.improve(PASSES)
        for v, first in enumerate(bounds.first(close)):
            wanted[v] |= set(space.minimizer.domains.values[v][first].tolist())
    return only(space.problem, alike(space, wanted))


def nearly(problem: Problem) -> float:
    """About how many seconds a byte is worth: what operators alone take of both, at least."""
    least = [np.where(np.isfinite(c.time), (c.time, c.memory), np.inf).reshape(2, -1).min(axis=1) for c in problem.unary]
    time, memory = np.sum([x for x in least if np.isfinite(x).all()], axis=0) if least else (0.0, 0.0)
    return float(time / memory) if time > 0 and memory > 0 else 1.0


def alike(space: Space, wanted: Sequence[set[int]]) -> tuple[Array, ...]:
    """What any of some equal operators wants, for all of them."""
    together: dict[int, set[int]] = {}
    of = [id(d) for d in space.assembled.domains]
    for key, values in zip(of, wanted, strict=True):
        together.setdefault(key, set()).update(values)
    arrays = {key: np.array(sorted(values)) for key, values in together.items()}
    return tuple(arrays[key] for key in of)


def only(problem: Problem, kept: tuple[Array, ...]) -> Some:
    """The problem with these values of its variables."""
    made: dict[str, Cost] = {}

    def cut(cost: Cost, *variables: int) -> Cost:
        key = named(cost.key, *(kept[v].tobytes() for v in variables))
        if key not in made:
            cells = np.ix_(np.arange(len(cost.time)), *(kept[v] for v in variables))
            made[key] = Cost(key, cost.time[cells], cost.memory[cells])
        return made[key]

    unary = tuple(cut(cost, v) for v, cost in enumerate(problem.unary))
    edges = tuple(Edge(e.first, e.second, cut(e.cost, e.first, e.second)) for e in problem.edges)
    return Some(Problem(tuple(map(len, kept)), unary, edges), kept, problem)
