"""A lower bound on the time of every strategy within a memory limit, by Lagrangian relaxation.

For any weight >= 0, a strategy with `memory <= limit` has `time >= time + weight * (memory - limit)`, so the minimum of the right
side over all strategies, whatever their memory, bounds the left (Geoffrion 1974, "Lagrangean relaxation for integer programming").
The best weight is the slope of the convex hull of time and memory where it crosses the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unity.search.solver.bounds import ABOVE, Bounds
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Array, Point, direction

PASSES = 12  # of the bounds: more hardly exclude further values
ROUNDS = 40  # the most weights that are tried


@dataclass(frozen=True, eq=False)
class Lagrangian:
    """The relaxation of a problem's memory limit, in bytes; the limit may be infinite."""

    minimizer: Minimizer
    limit: float

    @cached_property
    def weight(self) -> float:
        """Seconds per byte: the slope of the hull at the limit; 0 where the limit excludes no fastest strategy."""
        if self._fastest is None or self._fastest.memory <= self.limit:
            return 0.0
        fast, lean = self.minimizer.at([0.0, math.inf])
        weight = 0.0
        for _ in range(ROUNDS):
            if not lean.memory <= self.limit < fast.memory:
                break
            weight = (lean.time - fast.time) / (fast.memory - lean.memory)
            (point,) = self.minimizer.at([weight])
            if _objective(point, weight) >= _objective(fast, weight) * (1 - ABOVE):
                break
            fast, lean = (fast, point) if point.memory <= self.limit else (point, lean)
        return weight

    @cached_property
    def least(self) -> float:
        """A lower bound on the time of every strategy within the limit; infinite if no strategy exists."""
        if (point := self.minimizer.any_at(self.weight) if self.weight else self._fastest) is None:
            return math.inf
        return self._time_of(_objective(point, self.weight) if point.exact else self._bounds.least)

    def left(self, time: float) -> list[Array]:
        """Return for every variable the values that strategies within the limit may use that take at most `time` seconds."""
        most = time + (self.weight * self.limit if self.weight else 0.0)
        values = self.minimizer.domains.values
        return [own[positions] for own, positions in zip(values, self._bounds.left(most), strict=True)]

    @cached_property
    def _fastest(self) -> Point | None:
        return self.minimizer.any_at(0.0)

    @cached_property
    def _bounds(self) -> Bounds:
        bounds = Bounds(self.minimizer.elimination.energy(np.array(direction(self.weight))))
        bounds.improve(PASSES)
        return bounds

    def _time_of(self, objective: float) -> float:
        """Return the lower bound on time that follows from one on the objective, reduced by more than rounding."""
        return objective - ABOVE * abs(objective) - (self.weight * self.limit if self.weight else 0.0)


def _objective(point: Point, weight: float) -> float:
    return point.time + weight * point.memory
