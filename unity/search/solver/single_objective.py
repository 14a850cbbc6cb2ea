"""The best strategy for a single objective, by alternating reduction and bounds.

The problem is reduced to its core; bounds on the core exclude values; the remaining problem has a smaller core, and so on.
Eliminations and the removal of dominated values cost little and tighten the bounds, and fewer values make more eliminations cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unity.search.solver.bounds import ABOVE, Bounds, Messages
from unity.search.solver.core import Core, core
from unity.search.solver.domains import Domains, all_values, narrowed
from unity.search.solver.elimination import Elimination, TableCache
from unity.search.solver.problem import Array, Point, Problem

# Sums that the elimination of a core may compute before bounds are worth their passes.
FEW = 20_000_000
# Passes over the graph between two checks, the maximum number of checks, and the values of each variable in a guess.
PASSES, CHECKS, VALUES = 3, 24, 6
# If a check leaves more than this share of the gap between bound and best, further passes are hardly worth their time.
SLOW = 0.995
# Entries of a table in a guess. A guess that would need more is skipped: the incumbent of the passes is better.
GUESSED = 200_000
# Entries of a table in the last elimination, if it is not exact within the whole budget either: it hardly ever improves on the
# incumbent, and took nine tenths of the search for an unrolled network.
INEXACT = 2_000_000
# The share of all entries that bounds may leave for a smaller core to be worth searching for.
FEWER = 0.5
ONLY = np.array([1.0, 0.0])  # the direction of a core's objective, which is its time


@dataclass(frozen=True, eq=False)
class DirectedOptimum:
    """A value for every variable, the objective, and whether that is proved to be the minimum."""

    values: Array
    objective: float
    exact: bool


@dataclass(frozen=True, eq=False)
class DirectedQuery:
    """A request for the best strategy in one direction.

    Args:
        direction: the objective (see `problem.direction`).
        budget: entries of a table that elimination may compute.
        above: strategies that are certainly worse need not be found.
        known: the objective of some known strategy.
        start: messages of a similar objective (see `Bounds`).
    """

    direction: Array
    budget: int
    above: float = math.inf
    known: float = math.inf
    start: Messages | None = None


def best_strategy(
    problem: Problem, domains: Domains, query: DirectedQuery, solved: TableCache | None = None
) -> tuple[DirectedOptimum | None, Messages | None]:
    """Return the best strategy, and the messages that bounded it, if any did.

    The strategy is None if the problem has no solution, or the best one is certainly worse than requested.
    """
    reduced = core(problem, domains, query.direction, solved)
    if reduced is None:
        return None, None
    if not reduced.variables:
        strategy = DirectedOptimum(reduced.whole(()), reduced.constant, True)
        return None if strategy.objective > query.above + ABOVE * abs(query.above) else strategy, None
    plain = Elimination(reduced.problem, all_values(reduced.problem), query.budget)
    if plain.schedule.exact and plain.schedule.work <= FEW:
        return _extended(reduced, plain.solve(ONLY[None])), None
    bounded = _Bounded(reduced, query, plain)
    strategy = bounded.best()
    return strategy, reduced.outward(bounded.bounds.messages)


def _extended(reduced: Core, solutions: list[Point]) -> DirectedOptimum | None:
    return DirectedOptimum(reduced.whole(solutions[0].values), solutions[0].time, solutions[0].exact) if solutions else None


class _Bounded:
    """A core with bounds and the best known strategy."""

    def __init__(self, reduced: Core, query: DirectedQuery, plain: Elimination) -> None:
        self.reduced, self.query, self.plain = reduced, query, plain
        self.bounds = Bounds(reduced.energy, None if query.start is None else reduced.inward(query.start))
        self.incumbent: tuple[float, Sequence[int]] = math.inf, ()  # the cost and the values of the best strategy so far

    def best(self) -> DirectedOptimum | None:
        """Return the best strategy, if one is as good as requested, among the values that bounds leave."""
        if not self._bound():
            return None
        bounds, reduced = self.bounds, self.reduced
        best = min(self.query.known, self.incumbent[0])
        left = narrowed(self.plain.domains, bounds.left(best))
        if bounds.remaining(best) <= FEWER:
            strategy, _ = best_strategy(
                reduced.problem, left, DirectedQuery(ONLY, self.query.budget, known=best, start=bounds.messages)
            )
            strategy = None if strategy is None else replace(strategy, values=reduced.whole(strategy.values.tolist()))
        else:
            strategy = self._eliminated(left)
        return strategy if strategy is not None and strategy.exact else self._better(strategy)

    def _eliminated(self, left: Domains) -> DirectedOptimum | None:
        """Return the best strategy with these values, exactly if possible; if not, None if the incumbent is proved best."""
        whole = Elimination(self.reduced.problem, left, self.query.budget)
        if not whole.schedule.exact:
            if self.incumbent[0] <= self._proved:
                return None
            whole = Elimination(self.reduced.problem, left, min(INEXACT, self.query.budget))
        return _extended(self.reduced, whole.solve(ONLY[None]))

    @property
    def _proved(self) -> float:
        """The objective up to which a strategy is proved best."""
        return self.bounds.least + ABOVE * abs(self.bounds.least)

    def _better(self, strategy: DirectedOptimum | None) -> DirectedOptimum | None:
        """Return the better of a strategy and the incumbent, exact if it is proved best."""
        cost, values = self.incumbent
        if math.isfinite(cost) and (strategy is None or cost < strategy.objective):
            strategy = DirectedOptimum(self.reduced.whole(values), cost, False)
        return None if strategy is None else replace(strategy, exact=strategy.objective <= self._proved)

    def _bound(self) -> bool:
        """Raise the bounds until they leave few values or stop rising. Returns whether a strategy can be as good as requested."""
        bounds, query, gap, guessed = self.bounds, self.query, math.inf, False
        for _ in range(CHECKS):
            bounds.improve(PASSES)
            if not math.isfinite(bounds.least) or bounds.least > query.above + ABOVE * abs(query.above):
                return False
            self.incumbent = min(self.incumbent, bounds.incumbent, key=lambda known: known[0])
            best = min(query.known, self.incumbent[0])
            if bounds.enough(best, FEWER):
                break
            if not guessed:
                self._guess()
                guessed = True
                best = min(best, self.incumbent[0])
            if bounds.enough(best, FEWER) or best - bounds.least > SLOW * gap:
                break
            gap = best - bounds.least
        return True

    def _guess(self) -> None:
        """Solve the problem on the most promising values of each variable, if that is exact: the result is hardly ever beaten."""
        promising = narrowed(self.plain.domains, self.bounds.first(VALUES))
        guess = Elimination(self.reduced.problem, promising, min(GUESSED, self.query.budget))
        if guess.schedule.exact:
            for point in guess.solve(ONLY[None]):
                self.incumbent = min(self.incumbent, (point.time, point.values), key=lambda known: known[0])
