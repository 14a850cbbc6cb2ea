"""The trade-off between time and memory: all nondominated strategies, or the best that can be found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from unity.search.solver.bounds import Bounds
from unity.search.solver.domains import narrowed
from unity.search.solver.elimination import Elimination
from unity.search.solver.local_search import improved, search_steps
from unity.search.solver.min_marginals import nearby
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.pareto import JoinBudget, JoinTooLarge, pareto
from unity.search.solver.problem import Point, Problem, direction, nondominated

# Rows that may be joined to find the whole frontier: some seconds.
EXACT = 3_000_000
# Rows that may be joined if only a point under a limit is wanted: a tenth of a second. Later steps find points between corners.
QUICK = 200_000
# Objectives in one round of the search for the hull.
ROUND = 8
# Gaps of the hull that are filled, the largest first, and points in each.
GAPS, FILL = 8, 4
# Cuts of the gap of the hull that a memory limit falls into, for a lower bound on the time under it.
CUTS = 3
# A gap of the hull with at most this share of the total area is not searched.
SMALL = 1e-5
# A gap of the hull whose times differ by less than this, relatively, is not searched for further vertices.
CLOSE = 5e-4
# The same where a rough result is enough.
ROUGH = 5e-3
# A new point must be below the line between its neighbours by more than rounding, relatively.
BELOW = 1e-9
# Between two corners: rows that may be joined and sums that eliminations may compute (a second or two); passes of the bounds; the
# fraction of the distance that is searched first, and the factor by which it grows; the relative error of sums in another order.
ROWS, WORK = 1_000_000, 4_000_000
PASSES, FIRST, FARTHER = 6, 1 / 256, 4.0
ROUNDING = 1e-11


@dataclass(frozen=True, eq=False)
class ParetoFrontier:
    """Points by ascending time and descending memory, none of which dominates another.

    `exact` says that they are all there are. Otherwise those points that are `exact` themselves are vertices of the convex hull.
    """

    points: tuple[Point, ...]
    exact: bool
    minimizer: Minimizer = field(repr=False)

    def fastest(self) -> Point | None:
        """Return the point with the least time; None if the problem has no solution."""
        return self.points[0] if self.points else None

    def under(self, memory: float) -> Point | None:
        """Return the fastest point that fits; None if none does. Searches between the points unless they are all there are."""
        fitting = next((point for point in self.points if point.memory <= memory), None)
        if self.exact or fitting is None or fitting is self.points[0]:
            return fitting
        return _first(self.minimizer, self.points, lambda point: point.memory <= memory)


def frontier(problem: Problem, *, points: int = 24, exact_limit: int = EXACT, minimizer: Minimizer | None = None) -> ParetoFrontier:
    """Return the time-memory frontier (TensorOpt, section 3.1).

    It is exact if that takes at most `exact_limit` joined rows. Otherwise it has up to `points` vertices of the convex hull, each
    the exact minimum of time + weight * memory for some weight, and points found between them. A `minimizer` of the same problem
    remembers its earlier results.
    """
    minimizer = minimizer or Minimizer(problem)
    if minimizer.domains.empty:
        return ParetoFrontier((), True, minimizer)
    try:
        return ParetoFrontier(
            pareto(problem, minimizer.domains, minimizer.elimination.schedule, JoinBudget(exact_limit)), True, minimizer
        )
    except JoinTooLarge:
        hull = corners(minimizer, points)
        return ParetoFrontier(nondominated([*hull, *_filled(problem, hull)]), not hull, minimizer)


def frontier_under(problem: Problem, memory: float, minimizer: Minimizer | None = None) -> Point | None:
    """Return the fastest point found whose memory is at most `memory`; None if the leanest needs more."""
    return fastest_fitting(minimizer or Minimizer(problem), (0.0, math.inf), lambda point: point.memory <= memory)


def fastest_fitting(
    minimizer: Minimizer,
    weights: Sequence[float],
    fits: Callable[[Point], bool],
    below: float = math.inf,
    roughly: bool = False,
) -> Point | None:
    """Return the fastest fitting point found, if it is faster than `below`; None if none of those for `weights` fits.

    The limit is used only to ask of one point after another whether it fits, and a yes leads only to points at least as fast as
    those that a no leads to. So a larger limit never gives a slower point, though not every point is tried.

    Args:
        minimizer: the minimizer of the problem.
        weights: the weights of memory to begin with, in increasing order.
        fits: whether a point fits.
        below: seconds; only faster points are of interest.
        roughly: whether a vertex of the hull is enough, which asks of fewer points whether they fit.
    """
    fastest = minimizer.at(weights[:1])
    if not fastest or fastest[0].time >= below:
        return None
    try:
        every = pareto(minimizer.problem, minimizer.domains, minimizer.elimination.schedule, JoinBudget(QUICK))
    except JoinTooLarge:
        return _first(minimizer, nondominated(minimizer.at(weights)), fits, below, roughly)
    return _last([lambda point=point: point for point in reversed(every) if point.time < below], fits)


def relaxed_time(minimizer: Minimizer, memory: float) -> float:
    """Return the time of the Lagrangian relaxation of a memory limit, after a few cuts; infinite if no point has so little memory.

    It is a lower bound on the time of every point within the limit where the minimizer is exact. `lagrangian` bounds it elsewhere.
    """
    ends = minimizer.at([0.0, math.inf])
    if not ends or ends[1].memory > memory:
        return math.inf
    fast, lean = ends
    bound = fast.time
    for _ in range(CUTS if fast.memory > memory else 0):
        slope = _slope(fast, lean)
        (point,) = minimizer.at([slope])
        bound = max(bound, point.time + slope * (point.memory - memory))
        if not _is_below(point, fast, lean):
            break
        fast, lean = (point, lean) if point.memory > memory else (fast, point)
    return bound


def corners(minimizer: Minimizer, most: int) -> tuple[Point, ...]:
    """Return up to `most` vertices of the convex hull: its ends, then always the point farthest below the line between neighbours.

    This is the dichotomy of bi-objective optimization (Aneja and Nair 1979), with the largest gaps first.
    """
    hull = nondominated(minimizer.at([0.0, math.inf]))
    small = SMALL * _area((hull[0], hull[-1])) if hull else 0.0
    closed: set[tuple[Point, Point]] = set()
    while len(hull) < most:
        open_gaps = [gap for gap in pairwise(hull) if gap not in closed and _area(gap) > small]
        gaps = sorted(open_gaps, key=_area, reverse=True)
        gaps = gaps[: min(ROUND, most - len(hull))]
        if not gaps:
            break
        minimizers = minimizer.at([_slope(*gap) for gap in gaps])
        new = [point for gap, point in zip(gaps, minimizers, strict=True) if _is_below(point, *gap)]
        closed.update(gap for gap, point in zip(gaps, minimizers, strict=True) if not _is_below(point, *gap))
        hull = nondominated([*hull, *new])
    return hull


def between(minimizer: Minimizer, fast: Point, lean: Point) -> tuple[tuple[Point, ...], bool]:
    """Return the nondominated points between two corners of the hull, fastest first, and whether these are all.

    No weight finds them: time + weight * memory is least on the line that joins the corners, and grows with the distance from it. A
    nondominated point between two known neighbours is faster than the slower one and smaller than the larger one, which bounds its
    distance. So the distance to search is known, and shrinks as points are found. All points within it are found: bounds on the
    strategies that use a value exclude values (`bounds`), and the least cost of strategies that use an entry of a table excludes
    entries, and points of them (`min_marginals`, `pareto`). The search widens step by step, as long as something better may exist
    and the work stays affordable.
    """
    weight = _slope(fast, lean)
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


def _first(
    minimizer: Minimizer, known: Sequence[Point], fits: Callable[[Point], bool], below: float = math.inf, roughly: bool = False
) -> Point | None:
    """Return the fastest fitting point, from the points of a hull: first narrow a gap of the hull, then search inside it.

    If `roughly` is true, a gap may stay wider, and is not searched. A point that is not below `below` counts as fitting without
    being asked about, as only faster ones are of interest.
    """

    def enough(point: Point) -> bool:
        return point.time >= below or fits(point)

    place = next((k for k, point in enumerate(known) if enough(point)), None)
    if place is None:
        return None
    lean = known[place]
    if place:
        fast, closed = known[place - 1], False
        while not closed and lean.time - fast.time > (ROUGH if roughly else CLOSE) * lean.time:
            (point,) = minimizer.at([_slope(fast, lean)])
            closed = not _is_below(point, fast, lean)
            if not closed:
                fast, lean = (fast, point) if enough(point) else (point, lean)
        lean = lean if roughly else _within(minimizer, fast, lean, enough, closed)
    return lean if lean.time < below else None


def _within(minimizer: Minimizer, fast: Point, lean: Point, fits: Callable[[Point], bool], wide: bool) -> Point:
    """Return the fastest fitting point in a gap of the hull: a nondominated one, or in a wide gap one reached by local search.

    Points of local search may be dominated, but may have a lower peak.
    """
    near, _ = between(minimizer, fast, lean)
    ways: list[Sequence[Callable[[], Point]]] = [[lambda point=point: point for point in reversed(near)]]
    if wide:
        problem = minimizer.problem
        ways.append([step.point for step in search_steps(problem, lean, fast.memory) if fast.time < step.time])
        down = [
            step.point for step in search_steps(problem, fast, lean.memory) if step.time < lean.time and step.memory > lean.memory
        ]
        ways.append(down[::-1])
    best = lean
    for steps in ways:
        point = _last(steps, lambda point, best=best: point.time >= best.time or fits(point))
        best = best if point is None or point.time >= best.time else point
    return best


def _last(steps: Sequence[Callable[[], Point]], fits: Callable[[Point], bool]) -> Point | None:
    """Return the last fitting point of a sequence along which memory grows."""
    best, start, end = None, 0, len(steps)
    while start < end:
        middle = (start + end) // 2
        point = steps[middle]()
        best, start, end = (point, middle + 1, end) if fits(point) else (best, start, middle)
    return best


def _corner(front: tuple[Point, ...], weight: float) -> float:
    """Return the largest objective that a nondominated point between known points can have."""
    return max(lean.time + weight * fast.memory for fast, lean in pairwise(front))


def _filled(problem: Problem, hull: tuple[Point, ...]) -> list[Point]:
    """Return points between those of the hull, up to `FILL` in every large gap, evenly spread."""
    filled: list[Point] = []
    for fast, lean in sorted(pairwise(hull), key=_area, reverse=True)[:GAPS]:
        front = nondominated(p for p in improved(problem, lean, fast.memory) if p.time > fast.time)
        step = max(1, math.ceil(len(front) / FILL))
        filled += front[::step]
    return filled


def _area(gap: tuple[Point, Point]) -> float:
    fast, lean = gap
    return (lean.time - fast.time) * (fast.memory - lean.memory)


def _slope(fast: Point, lean: Point) -> float:
    """Return the seconds per byte between two points: the weight for which they are equally good."""
    return (lean.time - fast.time) / (fast.memory - lean.memory)


def _is_below(point: Point, fast: Point, lean: Point) -> bool:
    """Return whether a point is strictly between two others, and strictly below the line that joins them."""
    inside = fast.time < point.time < lean.time and lean.memory < point.memory < fast.memory
    weight = _slope(fast, lean)
    line = fast.time + weight * fast.memory
    return inside and point.time + weight * point.memory < line - BELOW * abs(line)
