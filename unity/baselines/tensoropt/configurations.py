"""Selection of the configurations of an operator that frontier tracking considers, if not all of them.

The paper tracks frontiers over all configurations, on 48 cores for up to 22 minutes. Node elimination takes time cubic in their
number, so here an operator has only the configurations of some good strategy: one on the convex hull of the frontier, found by
exact elimination for some weights of memory (`solver.minimizer`), or one close to it by its bounds (`solver.bounds`). Equal
operators have equal configurations, so that equal layers stay equal. The leanest and the fastest strategies are on the hull, so
they are not lost; between them frontier tracking recombines the configurations. `close=None` in `TensorOpt` considers all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unity.baselines.restricted import RestrictedSpace
from unity.baselines.tensoropt.frontiers import named
from unity.search.solver.bounds import Bounds
from unity.search.solver.problem import Array, Cost, Edge, Point, Problem, direction, points

# Prices of a byte, as multiples of its price on the line between the fastest strategy and the leanest.
WEIGHTS = (0.01, 0.1, 0.3, 1.0, 10.0)
BOUNDED = (0.01, 0.3, 10.0)  # the prices for which configurations close to the best are added
ALMOST = 1e-10  # a small price of a byte, relative to its rough price, that breaks ties between equally fast strategies
PASSES = 2  # passes of message passing for the bounds


@dataclass(frozen=True, eq=False)
class RestrictedProblem:
    """A problem with some of its values; `kept` has these for every variable."""

    problem: Problem
    kept: tuple[Array, ...]
    whole: Problem

    def strategy(self, front: Sequence[Point]) -> tuple[Point, ...]:
        """Return points of this problem as points of the whole problem."""
        if not front:
            return ()
        values = np.array([[kept[v] for kept, v in zip(self.kept, p.values, strict=True)] for p in front])
        alternatives = np.array([[*p.alternatives.unary, *p.alternatives.edges] for p in front])
        return tuple(points(self.whole, values, alternatives, front[0].exact))


def promising(space: RestrictedSpace, close: int) -> RestrictedProblem:
    """Return the space's problem with the values on the hull, and for each operator the `close` best ones beside it for some
    weights.
    """
    scale = byte_price(space.problem)
    hull = space.minimizer.at([scale * ALMOST, scale / ALMOST])
    if not hull:
        return RestrictedProblem(space.problem, tuple(np.arange(n) for n in space.problem.sizes), space.problem)
    fast, lean = hull
    rate = (lean.time - fast.time) / (fast.memory - lean.memory) if fast.memory > lean.memory else 0.0
    hull += space.minimizer.at([part * rate for part in WEIGHTS]) if rate else []
    promising_values = [{point.values[v] for point in hull} for v in range(len(space.problem.sizes))]
    for part in BOUNDED if rate and close else ():
        bounds = Bounds(space.minimizer.elimination.energy(np.array(direction(part * rate))))
        bounds.improve(PASSES)
        for v, first in enumerate(bounds.first(close)):
            promising_values[v] |= set(space.minimizer.domains.values[v][first].tolist())
    return restrict(space.problem, shared_by_equals(space, promising_values))


def byte_price(problem: Problem) -> float:
    """Return a rough price of a byte in seconds: the least time of all operators divided by their least memory."""
    least = [np.where(np.isfinite(c.time), (c.time, c.memory), np.inf).reshape(2, -1).min(axis=1) for c in problem.unary]
    time, memory = np.sum([x for x in least if np.isfinite(x).all()], axis=0) if least else (0.0, 0.0)
    return float(time / memory) if time > 0 and memory > 0 else 1.0


def shared_by_equals(space: RestrictedSpace, values_of: Sequence[set[int]]) -> tuple[Array, ...]:
    """Return for each operator the union of the values of all equal operators."""
    union: dict[int, set[int]] = {}
    classes = [id(d) for d in space.assembled.domains]
    for key, values in zip(classes, values_of, strict=True):
        union.setdefault(key, set()).update(values)
    arrays = {key: np.array(sorted(values)) for key, values in union.items()}
    return tuple(arrays[key] for key in classes)


def restrict(problem: Problem, kept: tuple[Array, ...]) -> RestrictedProblem:
    """Return the problem with these values of its variables."""
    restricted_costs: dict[str, Cost] = {}

    def cut(cost: Cost, *variables: int) -> Cost:
        key = named(cost.key, *(kept[v].tobytes() for v in variables))
        if key not in restricted_costs:
            cells = np.ix_(np.arange(len(cost.time)), *(kept[v] for v in variables))
            restricted_costs[key] = Cost(key, cost.time[cells], cost.memory[cells])
        return restricted_costs[key]

    unary = tuple(cut(cost, v) for v, cost in enumerate(problem.unary))
    edges = tuple(Edge(e.first, e.second, cut(e.cost, e.first, e.second)) for e in problem.edges)
    return RestrictedProblem(Problem(tuple(map(len, kept)), unary, edges), kept, problem)
