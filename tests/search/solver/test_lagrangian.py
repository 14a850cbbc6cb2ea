"""The Lagrangian bound, compared with every strategy of small problems."""

import math

import pytest
from ci_cases import fewer
from factor_graphs import brute_force, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from unity.search.solver.lagrangian import Lagrangian
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Problem


@settings(max_examples=fewer(80))
@given(problems(), st.integers(0, 40) | st.just(math.inf))
def test_no_strategy_within_the_limit_is_below_the_bound(problem: Problem, limit: float) -> None:
    relaxed = Lagrangian(Minimizer(problem), limit)
    for point in brute_force(problem):
        if point.memory <= limit:
            assert relaxed.least <= point.time
            assert all(v in own for v, own in zip(point.values, relaxed.left(point.time), strict=True))


@settings(max_examples=fewer(60))
@given(problems())
def test_without_a_limit_the_bound_is_the_minimum(problem: Problem) -> None:
    least = min((point.time for point in brute_force(problem)), default=math.inf)
    assert Lagrangian(Minimizer(problem), math.inf).least == pytest.approx(least, rel=1e-8)


@settings(max_examples=fewer(60))
@given(problems(), st.integers(0, 40))
def test_the_bound_is_the_hull_of_time_and_memory_at_the_limit(problem: Problem, limit: float) -> None:
    """It is the best of all weights, of which those of two points that are equally good suffice."""
    points = brute_force(problem)
    if not any(point.memory <= limit for point in points):
        return
    slopes = {(q.time - p.time) / (p.memory - q.memory) for p in points[:500] for q in points[:500] if p.memory > q.memory}
    weights = sorted({0.0, *(slope for slope in slopes if slope > 0)})[:200]
    best = max(min(p.time + weight * (p.memory - limit) for p in points) for weight in weights)
    assert Lagrangian(Minimizer(problem), limit).least >= best - 1e-6 * abs(best) - 1e-9
