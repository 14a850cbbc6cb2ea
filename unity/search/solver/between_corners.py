"""What lies between two neighbouring corners of the hull: the strategies near the line that joins them, which no weight finds.

On that line time + weight * memory is least; what has more is farther away. Farther than the corner of two known points, with the
time of one and the memory of the other, all is beaten by one of them. So it is known how far to look, and the less the more is
found. All points so near are found: a bound on the strategies that use a value leaves out values (`bounds`), and the least of those
that have an entry of a table leaves out entries, and points of them (`nearby`, `pareto`).
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from unity.search.solver.bounds import Bounds
from unity.search.solver.domains import narrowed
from unity.search.solver.elimination import Elimination
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.nearby import nearby
from unity.search.solver.pareto import TooLarge, Work, pareto
from unity.search.solver.problem import Point, direction, nondominated

# Rows that are joined at most, and entries that eliminations look at: a second or two.
ROWS, WORK = 1_000_000, 4_000_000
# Passes of the bounds; the part of the distance that is looked at first, and how many times farther then.
PASSES, FIRST, FARTHER = 6, 1 / 256, 4.0
# Sums in another order differ by less than this, relatively.
ROUNDING = 1e-11


def between(minimizer: Minimizer, fast: Point, lean: Point) -> tuple[tuple[Point, ...], bool]:
    """The points between two corners of the hull that no other beats, fastest first; and whether these are all.

    It is looked farther and farther from the line, as long as something better may be there, and it does not take too long.
    """
    weight = (lean.time - fast.time) / (fast.memory - lean.memory)
    line = max(fast.time + weight * fast.memory, lean.time + weight * lean.memory)
    bounds = Bounds(minimizer.elimination.energy(np.array(direction(weight))))
    bounds.improve(PASSES)
    found, work = nondominated([fast, lean]), Work(ROWS)
    far = _corner(found, weight) - line
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
        except TooLarge:
            break
        found = nondominated([*found, *(point for point in new if fast.time < point.time < lean.time)])
        far = _corner(found, weight) - line
        done, reach = far <= reach, min(far, reach * FARTHER)
    return tuple(point for point in found if fast.time < point.time < lean.time), done


def _corner(found: tuple[Point, ...], weight: float) -> float:
    """The most that something between known points may have and not be beaten by one of them."""
    return max(lean.time + weight * fast.memory for fast, lean in pairwise(found))
