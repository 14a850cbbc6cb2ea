"""The best strategy for one objective: the problem's core is bounded, what bounds leave has a smaller core, and so on.

To eliminate, and to leave out what others beat, costs little and makes bounds tighter; bounds leave out values, and then more is
cheap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from unity.search.solver.bounds import ABOVE, Bounds, Messages
from unity.search.solver.core import Core, core
from unity.search.solver.domains import Domains, all_values, narrowed
from unity.search.solver.elimination import Elimination, Solved
from unity.search.solver.problem import Array, Point, Problem

# Sums that the elimination of a core may look at before bounds are worth their passes.
FEW = 20_000_000
# Passes over the graph between two looks, looks at most, and values of each variable that a guess looks at.
PASSES, LOOKS, VALUES = 3, 24, 6
# The share of the gap between bound and best that is left where further passes are hardly worth their time.
SLOW = 0.995
# Entries of a table in a guess: what is not exact with so many is not tried, as strategies that are met in passes are better.
GUESSED = 200_000
# The same of the last elimination, if it is not exact with all of the budget, either: it hardly ever finds more than what was met,
# and took nine tenths of the search for an unrolled network.
INEXACT = 2_000_000
# The share of all entries that bounds should leave, so that it is worth while to look for a smaller core.
FEWER = 0.5
ONLY = np.array([1.0, 0.0])  # the direction of a core's objective, which is its time


@dataclass(frozen=True, eq=False)
class Strategy:
    """A value for every variable, what they cost together, and whether that is proved to be the least."""

    values: Array
    objective: float
    exact: bool


@dataclass(frozen=True, eq=False)
class Wanted:
    """What is asked about a problem in one direction. `above`: what is certainly more need not be found; `known`: what some
    strategy costs; `start`: messages of an objective that is not much different (see `Bounds`)."""

    direction: Array
    budget: int
    above: float = math.inf
    known: float = math.inf
    start: Messages | None = None


def best_strategy(
    problem: Problem, domains: Domains, wanted: Wanted, solved: Solved | None = None
) -> tuple[Strategy | None, Messages | None]:
    """The best strategy, if there is one and it may not be above what is wanted; and the messages that bounded it, if any did."""
    reduced = core(problem, domains, wanted.direction, solved)
    if reduced is None:
        return None, None
    if not reduced.variables:
        found = Strategy(reduced.whole(()), reduced.constant, True)
        return None if found.objective > wanted.above + ABOVE * abs(wanted.above) else found, None
    plain = Elimination(reduced.problem, all_values(reduced.problem), wanted.budget)
    if plain.schedule.exact and plain.schedule.work <= FEW:
        return _whole(reduced, plain.solve(ONLY[None])), None
    bounded = _Bounded(reduced, wanted, plain)
    found = bounded.best()
    return found, reduced.outward(bounded.bounds.messages)


def _whole(reduced: Core, found: list[Point]) -> Strategy | None:
    return Strategy(reduced.whole(found[0].values), found[0].time, found[0].exact) if found else None


class _Bounded:
    """A core, bounds on it, and the best of it that is known."""

    def __init__(self, reduced: Core, wanted: Wanted, plain: Elimination) -> None:
        self.reduced, self.wanted, self.plain = reduced, wanted, plain
        self.bounds = Bounds(reduced.energy, None if wanted.start is None else reduced.inward(wanted.start))
        self.met: tuple[float, Sequence[int]] = math.inf, ()  # the best strategy so far, and what it costs

    def best(self) -> Strategy | None:
        """The best strategy, if there is one that is wanted: among what bounds leave."""
        if not self._bound():
            return None
        bounds, reduced = self.bounds, self.reduced
        best = min(self.wanted.known, self.met[0])
        left = narrowed(self.plain.domains, bounds.left(best))
        if bounds.remaining(best) <= FEWER:
            found, _ = best_strategy(reduced.problem, left, Wanted(ONLY, self.wanted.budget, known=best, start=bounds.messages))
            found = None if found is None else replace(found, values=reduced.whole(found.values.tolist()))
        else:
            found = self._eliminated(left)
        return found if found is not None and found.exact else self._least(found)

    def _eliminated(self, left: Domains) -> Strategy | None:
        """The best with these values, exactly if that can be done. Else nothing, where one is known that is proved to be."""
        whole = Elimination(self.reduced.problem, left, self.wanted.budget)
        if not whole.schedule.exact:
            if self.met[0] <= self._most:
                return None
            whole = Elimination(self.reduced.problem, left, min(INEXACT, self.wanted.budget))
        return _whole(self.reduced, whole.solve(ONLY[None]))

    @property
    def _most(self) -> float:
        """What a strategy may cost that is proved to be the best."""
        return self.bounds.least + ABOVE * abs(self.bounds.least)

    def _least(self, found: Strategy | None) -> Strategy | None:
        """The best of what was met and what was found beside that."""
        cost, values = self.met
        if math.isfinite(cost) and (found is None or cost < found.objective):
            found = Strategy(self.reduced.whole(values), cost, False)
        return None if found is None else replace(found, exact=found.objective <= self._most)

    def _bound(self) -> bool:
        """Raises bounds until they leave little, or rise no more. Returns whether there may be a solution that is wanted."""
        bounds, wanted, gap, guessed = self.bounds, self.wanted, math.inf, False
        for _ in range(LOOKS):
            bounds.improve(PASSES)
            if not math.isfinite(bounds.least) or bounds.least > wanted.above + ABOVE * abs(wanted.above):
                return False
            self.met = min(self.met, bounds.met, key=lambda met: met[0])
            best = min(wanted.known, self.met[0])
            if bounds.enough(best, FEWER):
                break
            if not guessed:
                self._guess()
                guessed = True
                best = min(best, self.met[0])
            if bounds.enough(best, FEWER) or best - bounds.least > SLOW * gap:
                break
            gap = best - bounds.least
        return True

    def _guess(self) -> None:
        """Meets the best strategy with the most promising values of each variable, if that is found exactly: it is hardly ever
        improved on."""
        promising = narrowed(self.plain.domains, self.bounds.first(VALUES))
        guess = Elimination(self.reduced.problem, promising, min(GUESSED, self.wanted.budget))
        if guess.schedule.exact:
            for point in guess.solve(ONLY[None]):
                self.met = min(self.met, (point.time, point.values), key=lambda met: met[0])
