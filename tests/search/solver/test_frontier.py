import math
from itertools import pairwise

import numpy as np
import pytest
from ci_cases import fewer
from factor_graphs import brute_force, lower_left, problems, segments
from hypothesis import given, settings

from unity.search.solver.frontier import frontier, frontier_under, relaxed_time
from unity.search.solver.local_search import improved
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Cost, Edge, Point, Problem, points


def convex(points: list[tuple[float, float]]) -> set[tuple[float, float]]:
    """The vertices of the lower left convex hull of a frontier."""
    hull: list[tuple[float, float]] = []
    for p in points:
        while len(hull) > 1 and _turns_left(hull[-2], hull[-1], p):
            hull.pop()
        hull.append(p)
    return set(hull)


def _turns_left(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    return (b[0] - a[0]) * (c[1] - a[1]) <= (b[1] - a[1]) * (c[0] - a[0])


@settings(max_examples=fewer(150))
@given(problems())
def test_the_frontier_is_that_of_brute_force(problem: Problem) -> None:
    every = brute_force(problem)
    found = frontier(problem)
    assert found.exact
    assert [(p.time, p.memory) for p in found.points] == lower_left(every)
    assert set(found.points) <= set(every)


@settings(max_examples=fewer(200))
@given(problems())
def test_the_hull_of_a_large_problem_is_exact(problem: Problem) -> None:
    every = brute_force(problem)
    found = frontier(problem, exact_limit=0, points=1000)
    assert set(found.points) <= set(every)
    costs = {(p.time, p.memory): p.exact for p in found.points}
    assert list(costs) == lower_left(list(found.points))
    assert all(costs[vertex] for vertex in convex(lower_left(every)))


@settings(max_examples=fewer(100))
@given(problems())
def test_the_fastest_fitting_point_is_found(problem: Problem) -> None:
    every = brute_force(problem)
    whole, hull = frontier(problem), frontier(problem, exact_limit=0)
    for memory in range(-1, 60, 4):
        fitting = lower_left([p for p in every if p.memory <= memory])
        best = whole.under(memory)
        assert (best and (best.time, best.memory)) == (fitting[0] if fitting else None)
        for point in (hull.under(memory), frontier_under(problem, memory)):
            assert (point is None) == (not fitting)
            if point:
                assert point in every
                assert fitting[0][0] <= point.time <= max((t for t, _ in convex(lower_left(every)) if _ <= memory), default=0)


@settings(max_examples=fewer(100))
@given(problems())
def test_no_point_within_a_limit_is_faster_than_its_relaxed_time(problem: Problem) -> None:
    every, minimizer = brute_force(problem), Minimizer(problem)
    for memory in range(-1, 60, 4):
        fitting = [p.time for p in every if p.memory <= memory]
        least = relaxed_time(minimizer, memory)
        assert least <= min(fitting, default=math.inf) * (1 + 1e-9)
        assert least >= min((p.time for p in every), default=math.inf)
        assert (least == math.inf) == (not fitting)


def test_an_unsolvable_problem_has_no_points() -> None:
    never = np.where(np.eye(2, dtype=bool), np.inf, 0.0)[None]
    one = Cost("", np.zeros((1, 2)), np.zeros((1, 2)))
    apart = Cost("", never, np.zeros_like(never))
    triangle = Problem((2,) * 3, (one,) * 3, (Edge(0, 1, apart), Edge(1, 2, apart), Edge(2, 0, apart)))
    for limit in (0, 10_000):
        found = frontier(triangle, exact_limit=limit)
        assert found.points == ()
        assert found.exact
        assert found.fastest() is None
        assert found.under(1e9) is None
    assert frontier_under(triangle, 1e9) is None


def test_every_point_costs_what_its_choices_cost() -> None:
    problem = segments(12, (4, 3, 5), ((0, 1), (1, 2), (2, 3), (0, 3)))
    found = frontier(problem, exact_limit=0)
    for point in found.points:
        taken = (*point.alternatives.unary, *point.alternatives.edges)
        entries = [(a, *(point.values[v] for v in scope)) for a, (scope, _) in zip(taken, problem.tables, strict=True)]
        assert point.time == sum(cost.time[e] for e, (_, cost) in zip(entries, problem.tables, strict=True))
        assert point.memory == sum(cost.memory[e] for e, (_, cost) in zip(entries, problem.tables, strict=True))


def test_more_points_never_lose_one_of_the_hull() -> None:
    problem = segments(12, (4, 3, 5), ((0, 1), (1, 2), (2, 3), (0, 3)))
    few, many = (frontier(problem, exact_limit=0, points=n) for n in (4, 16))
    costs = {(p.time, p.memory) for p in many.points}
    assert {(p.time, p.memory) for p in few.points if p.exact} <= costs


@pytest.mark.parametrize("share", [0.1, 0.3, 0.9])
def test_improvement_ends_where_no_single_change_helps(share: float) -> None:
    problem = segments(12, (4, 3, 5), ((0, 1), (1, 2), (2, 3), (0, 3)))
    whole = frontier(problem).points
    fast, lean = whole[0], whole[-1]
    limit = lean.memory + share * (fast.memory - lean.memory)
    for start in (fast, lean):
        found = improved(problem, start, limit)
        assert found
        assert all(p.memory <= limit for p in found)
        assert all(b.time < a.time for a, b in pairwise(found))
        for near in _changed_once(problem, found[-1]):
            assert near.memory > limit or near.time >= found[-1].time


def _changed_once(problem: Problem, point: Point) -> list[Point]:
    own = np.array(point.values)
    rows = [np.where(np.arange(len(own)) == v, x, own) for v, n in enumerate(problem.sizes) for x in range(n)]
    return points(problem, np.array(rows), np.zeros((len(rows), len(problem.tables)), int), exact=False)
