import math

import numpy as np
import pytest
from ci_cases import fewer
from factor_graphs import brute_force, problems, segments
from hypothesis import given, settings
from hypothesis import strategies as st

from unity.search.solver import minimizer, single_objective
from unity.search.solver.bounds import Bounds, Energy
from unity.search.solver.domains import domains
from unity.search.solver.elimination import BUDGET, Elimination
from unity.search.solver.frontier import frontier
from unity.search.solver.minimizer import Minimizer, minimize
from unity.search.solver.problem import Problem

# Sums of fewer than 50 numbers below 100, with weights below 10, in another order.
ROUNDING = 1e-9


def energy(problem: Problem, weight: float) -> Energy:
    return Elimination(problem, domains(problem), BUDGET).energy(np.array([1.0, weight]))


@settings(max_examples=fewer(200))
@given(problems(), st.floats(0, 10), st.integers(1, 6), st.none() | st.floats(0, 10))
def test_no_strategy_is_below_its_bounds(problem: Problem, weight: float, passes: int, other: float | None) -> None:
    left = domains(problem)
    if left.empty:
        return
    start = None
    if other is not None:
        before = Bounds(energy(problem, other))
        before.improve(2)
        start = before.messages
    bounds = Bounds(energy(problem, weight), start)
    met = bounds.improve(passes)
    every = [(p.time + weight * p.memory, p.values) for p in brute_force(problem)]
    for cost, values in every:
        for v, value in enumerate(values):
            position = list(left.values[v]).index(value)
            assert bounds.least + bounds.excess[v][position] <= cost * (1 + ROUNDING) + ROUNDING
    least = min((cost for cost, _ in every), default=math.inf)
    assert met >= least * (1 - ROUNDING) - ROUNDING
    if every:
        kept = bounds.left(least)
        best = min(every)[1]
        assert all(value in left.values[v][kept[v]] for v, value in enumerate(best))


@settings(max_examples=fewer(50))
@given(problems(), st.floats(0, 10))
def test_the_bound_of_a_tree_is_its_minimum(problem: Problem, weight: float) -> None:
    pairs = {frozenset((e.first, e.second)) for e in problem.edges}
    every = [p.time + weight * p.memory for p in brute_force(problem)]
    if len(pairs) >= len(problem.sizes) or not every or not _is_forest(len(problem.sizes), pairs):
        return
    bounds = Bounds(energy(problem, weight))
    bounds.improve(3 * len(problem.sizes))
    assert bounds.least == pytest.approx(min(every), rel=1e-6, abs=1e-6)


def _is_forest(count: int, pairs: set[frozenset[int]]) -> bool:
    tree = list(range(count))
    for a, b in map(sorted, pairs):
        if tree[a] == tree[b]:
            return False
        tree = [tree[a] if t == tree[b] else t for t in tree]
    return True


@pytest.fixture
def always_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimizer, "LARGE", -1)
    monkeypatch.setattr(minimizer, "PER_ENTRY", 0)
    monkeypatch.setattr(single_objective, "FEW", -1)


@pytest.mark.usefixtures("always_bounded")
@settings(max_examples=fewer(200))
@given(problem=problems(), weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=3))
def test_with_bounds_the_minimum_is_that_of_brute_force(problem: Problem, weights: list[float]) -> None:
    every = brute_force(problem)
    asked = [0.0, *weights, math.inf]
    made = Minimizer(problem)
    assert made.domains.empty or made.large
    found = made.at(asked)
    assert len(found) == (len(asked) if every else 0)
    for weight, point in zip(asked, found, strict=False):
        cost = (lambda p: p.memory) if math.isinf(weight) else (lambda p, w=weight: p.time + w * p.memory)
        assert point.exact
        assert cost(point) == pytest.approx(min(map(cost, every)), rel=1e-7)


@pytest.mark.usefixtures("always_bounded")
def test_bounds_change_no_answer() -> None:
    problem = segments(12, (9, 12, 7), ((0, 1), (1, 2), (2, 3), (0, 3), (0, 2)))
    weights = np.array([0.0, 0.1, 0.3, 1.0, 3.0, math.inf])
    with_bounds = minimize(problem, weights)
    plain = Elimination(problem, domains(problem), BUDGET)
    assert plain.schedule.exact
    for weight, point in zip(weights[1:-1], with_bounds[1:-1], strict=True):
        (expected,) = plain.solve(np.array([[1.0, weight]]))
        assert point.time + weight * point.memory == pytest.approx(expected.time + weight * expected.memory)
    points = frontier(problem, exact_limit=0).points
    assert with_bounds[0] == points[0]
    assert with_bounds[-1] == points[-1]


@pytest.mark.usefixtures("always_bounded")
@settings(max_examples=fewer(200))
@given(problem=problems(), weight=st.floats(0, 10), share=st.floats(0, 2))
def test_only_objectives_above_a_limit_are_not_priced(problem: Problem, weight: float, share: float) -> None:
    least = min((p.time + weight * p.memory for p in brute_force(problem)), default=math.inf)
    above = share * least if math.isfinite(least) else 1.0
    found = Minimizer(problem).least(weight, above)
    assert math.isinf(found) or found == pytest.approx(least, rel=1e-7)
    if math.isinf(found) and math.isfinite(least):
        assert least > above * (1 - ROUNDING)


@pytest.mark.usefixtures("always_bounded")
def test_far_above_a_limit_nothing_is_eliminated(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = segments(12, (9, 12, 7), ((0, 1), (1, 2), (2, 3), (0, 3), (0, 2)))
    made = Minimizer(problem)
    least = made.least(1.0)
    assert least > 0
    monkeypatch.setattr(Elimination, "solve", None)
    assert made.least(1.0, least / 2) == math.inf


@pytest.mark.usefixtures("always_bounded")
@settings(max_examples=fewer(100))
@given(problem=problems(), weights=st.lists(st.floats(0.01, 10), min_size=2, max_size=4, unique=True))
def test_inexact_solutions_are_no_worse_than_known_ones(problem: Problem, weights: list[float]) -> None:
    every = brute_force(problem)
    if not every:
        return
    made = Minimizer(problem, budget=1)
    for weight in weights:
        known = [p.time + weight * p.memory for p in made.known.values()]
        (point,) = made.at([weight])
        found, least = point.time + weight * point.memory, min(p.time + weight * p.memory for p in every)
        assert found >= least * (1 - ROUNDING) - ROUNDING
        assert all(found <= other * (1 + ROUNDING) + ROUNDING for other in known)
        if point.exact:
            assert found == pytest.approx(least, rel=1e-7, abs=1e-7)


@pytest.mark.usefixtures("always_bounded")
def test_a_small_budget_is_no_worse_than_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """All variables of a segment are joined, so that nothing but a guess is exact within the budget."""
    monkeypatch.setattr(single_objective, "INEXACT", 1)
    problem = segments(6, (12,) * 4, ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)))
    (point,), plain = Minimizer(problem, budget=300).at([1.0]), Elimination(problem, domains(problem), BUDGET)
    (least,), (poor,) = (e.solve(np.array([[1.0, 1.0]])) for e in (plain, Elimination(problem, domains(problem), 1)))
    assert plain.schedule.exact
    assert point.time + point.memory == least.time + least.memory < poor.time + poor.memory
    assert not point.exact
