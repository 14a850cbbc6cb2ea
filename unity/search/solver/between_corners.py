"""Points between two neighbouring corners of the hull: strategies near the line that joins them, which no weight finds.

On that line time + weight * memory is least; a larger value means a larger distance from the line. Beyond the corner of two known
neighbours, the point with the time of the slower and the memory of the larger one, every strategy is dominated by one of them. So
the distance to search is known, and shrinks as points are found. All points within it are found: bounds on the strategies that use
a value exclude values (`bounds`), and the least cost of strategies that use an entry of a table excludes entries, and points of
them (`nearby`, `pareto`).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from unity.search.solver.bounds import Bounds
from unity.search.solver.domains import narrowed
from unity.search.solver.elimination import Elimination
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.nearby import nearby
from unity.search.solver.pareto import JoinBudget, JoinTooLarge, pareto
from unity.search.solver.problem import Point, direction, nondominated

# Rows that may be joined, and sums that eliminations may compute: a second or two.
ROWS, WORK = 1_000_000, 4_000_000
# Passes of the bounds; the share of the distance that is searched first, and the factor by which it grows.
PASSES, FIRST, FARTHER = 6, 1 / 256, 4.0
# Sums in different orders differ by less than this, relatively.
ROUNDING = 1e-11


def between(minimizer: Minimizer, fast: Point, lean: Point) -> tuple[tuple[Point, ...], bool]:
    """Return the nondominated points between two corners of the hull, fastest first, and whether these are all.

    The search widens step by step as long as something better may exist, and it stays affordable.
    """
    weight = (lean.time - fast.time) / (fast.memory - lean.memory)
    line = max(fast.time + weight * fast.memory, lean.time + weight * lean.memory)
    bounds = Bounds(minimizer.elimination.energy(np.array(direction(weight))))
    bounds.improve(PASSES)
    front, work = nondominated([fast, lean]), JoinBudget(ROWS)
    far = _corner(front, weight) - line
    reach, done = far * FIRST, False
    while not done:
        most = line + reach + ROUNDING * abs(line)
        near = narrowed(minimizer.domains, bounds.left(most))
        elimination = Elimination(minimizer.problem, near)
        schedule = elimination.schedule
        if not schedule.exact or schedule.work > WORK:
            break
        try:
            new = pareto(minimizer.problem, near, schedule, work, nearby(elimination, weight, most))
        except JoinTooLarge:
            break
        front = nondominated([*front, *(point for point in new if fast.time < point.time < lean.time)])
        far = _corner(front, weight) - line
        done, reach = far <= reach, min(far, reach * FARTHER)
    return tuple(point for point in front if fast.time < point.time < lean.time), done


def _corner(front: tuple[Point, ...], weight: float) -> float:
    """Return the largest objective that a nondominated point between known points can have."""
    return max(lean.time + weight * fast.memory for fast, lean in pairwise(front))
