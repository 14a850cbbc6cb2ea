"""The exact minimum of time + weight * memory over all strategies, for any number of weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from unity.search.solver.bounds import Messages
from unity.search.solver.domains import domains
from unity.search.solver.elimination import BUDGET, Elimination, TableCache
from unity.search.solver.problem import Array, Point, Problem, best_alternatives, direction, points
from unity.search.solver.single_objective import DirectedQuery, best_strategy

# Memory counts more by this relative amount, so that ties go to less of it. It changes no objective beyond the rounding of sums.
NUDGE = 2.0**-36
# To break ties, the cost that does not count is given this small weight, relative to the other.
TINY = (1e-8, 1e-11)
# Two sums of the same terms differ by less than this, relatively.
ROUNDING = 1e-12
# Sums that an elimination must compute before bounds are worth their passes: in all, and for each entry of the tables.
LARGE, PER_ENTRY = 100_000_000, 40
# A problem for a single objective is reduced to its core, without comparing the cost of plain elimination, if its tables have this
# many entries (at least, at most), and it has this many edges for each variable. With fewer, elimination is quick; with more
# entries, too few eliminations are cheap.
ENTRIES, DENSE = (60_000, 1_000_000), 1.25


class Minimizer:
    """A problem prepared for any number of objectives.

    It remembers its results: for a further objective, a known point bounds the best one from above.
    """

    def __init__(self, problem: Problem, budget: int = BUDGET, solved: TableCache | None = None) -> None:
        """Remove impossible values. `solved` is a cache shared with similar problems."""
        self.problem = problem
        self.solved = solved
        self.domains = domains(problem)
        self.elimination = Elimination(problem, self.domains, budget, solved)
        self.known: dict[float, Point] = {}  # by weight
        self.messages: list[tuple[Array, Point, Messages]] = []  # a direction, its best point, and the messages that bounded it

    def at(self, weights: Sequence[float] | Array) -> list[Point]:
        """Return the minimizer of time + weight * memory for every weight; an empty list if the problem has no solution.

        An infinite weight means memory alone. Ties go to less memory (for an infinite weight, to less time), then to lower indices.
        """
        requested = [float(weight) for weight in weights]
        new = sorted(set(requested) - self.known.keys())
        if self.domains.empty or not self._learn(new):
            return []
        for weight in new:
            if weight == 0 or math.isinf(weight):
                self._break_ties(weight)
        return [self.known[weight] for weight in requested]

    def any_at(self, weight: float) -> Point | None:
        """Return some minimizer of time + weight * memory, whichever of those that tie; None if the problem has no solution."""
        if weight in self.known:
            return self.known[weight]
        return None if self.domains.empty else next(iter(self._solve([direction(weight)])), None)

    def _break_ties(self, weight: float) -> None:
        """Replace a point by an equally good one with less of the other cost.

        A point that is best in two directions is best in all directions between them.
        """
        for tiny in TINY:
            (point,) = self._solve([_tie_breaking(weight, self.known[weight], tiny)])
            tied = _tied(weight, self.known[weight], point)
            self.known[weight] = _less_of_the_other(weight, self.known[weight], point)
            if tied:
                break

    def least(self, weight: float, above: float = math.inf) -> float:
        """Return the minimum of time + weight * memory, without a point.

        It is infinite if the problem has no solution, or if bounds prove that it exceeds `above`.
        """
        objective = direction(weight)
        if self.domains.empty:
            return math.inf
        solutions = self._bounded(np.array(objective), above) if self.tangled else self._solve([objective], above)
        return _objective(solutions[0], np.array(objective)) if solutions else math.inf

    def _learn(self, weights: list[float]) -> bool:
        """Find the points for some weights without breaking ties. Returns whether there are any."""
        solutions = self._solve([(time, memory * (1 + NUDGE)) for time, memory in map(direction, weights)])
        self.known.update(zip(weights, solutions, strict=False))
        return len(solutions) == len(weights)

    @property
    def tangled(self) -> bool:
        """Whether, judged by its size, reducing the problem is faster than finding an elimination order for it."""
        sizes, edges = self.domains.sizes, self.problem.edges
        entries = sum(sizes[edge.first] * sizes[edge.second] for edge in edges)
        return ENTRIES[0] <= entries <= ENTRIES[1] and len(edges) >= DENSE * len(sizes)

    @cached_property
    def large(self) -> bool:
        """Whether bounds should exclude values before variables are eliminated."""
        schedule = self.elimination.schedule
        entries = sum(math.prod(schedule.shapes[leaf.operation]) for leaf in schedule.leaves)
        return not schedule.exact or schedule.work > max(LARGE, PER_ENTRY * entries)

    def _solve(self, directions: list[tuple[float, float]], above: float = math.inf) -> list[Point]:
        if not self.large:
            return self.elimination.solve(np.array(directions).reshape(-1, 2))
        return [point for some in directions for point in self._bounded(np.array(some), above)]

    def _bounded(self, objective: Array, above: float) -> list[Point]:
        """Return the best point in one direction; an empty list without a solution, or if bounds prove that it exceeds `above`."""
        known = min((_objective(point, objective) for point in self.known.values()), default=math.inf)
        query = DirectedQuery(objective, self.elimination.budget, above, known, self._start(objective))
        strategy, messages = best_strategy(self.problem, self.domains, query, self.solved)
        if strategy is None:
            return []
        values = strategy.values[None]
        solutions = points(self.problem, values, best_alternatives(self.problem, values, objective[None]), strategy.exact)
        if not strategy.exact:
            best = min([*solutions, *self.known.values()], key=lambda point: _objective(point, objective))
            solutions = [replace(best, exact=False)]
        if messages is not None:
            self.messages.append((objective, solutions[0], messages))
        return solutions

    def _start(self, some: Array) -> Messages | None:
        """Return the messages of the nearest direction, scaled to the magnitude of this one: bytes and seconds differ in it."""
        if not self.messages:
            return None
        nearest, point, messages = min(self.messages, key=lambda known: abs(_angle(known[0]) - _angle(some)))
        scale = _objective(point, some) / (_objective(point, nearest) or 1.0)
        return {ends: message * scale for ends, message in messages.items()}


def minimize(problem: Problem, weights: Sequence[float] | Array, budget: int = BUDGET) -> list[Point]:
    """Return for every weight, in seconds per byte, the minimizer of time + weight * memory; an empty list without a solution."""
    return Minimizer(problem, budget).at(weights)


def _objective(point: Point, some: Array) -> float:
    return float(some[0] * point.time + some[1] * point.memory)


def _angle(some: Array) -> float:
    return math.atan2(some[1], some[0])


def _tie_breaking(weight: float, best: Point, tiny: float) -> tuple[float, float]:
    """Return the direction of weight 0 or infinity, turned slightly towards the cost that it ignores."""
    ratio = abs(best.time / best.memory) if best.time and best.memory else 1.0
    return (1.0, tiny * ratio) if weight == 0 else (tiny / ratio, 1.0)


def _less_of_the_other(weight: float, best: Point, other: Point) -> Point:
    """Return the second point if it equals the first in the cost that counts, and is better in the other; else the first."""
    left_out = (best.memory, other.memory) if weight == 0 else (best.time, other.time)
    return other if _tied(weight, best, other) and left_out[1] < left_out[0] else best


def _tied(weight: float, best: Point, other: Point) -> bool:
    """Return whether the second point is as good as the first in the cost that counts."""
    counted = (best.time, other.time) if weight == 0 else (best.memory, other.memory)
    return counted[1] <= counted[0] + ROUNDING * abs(counted[0])
