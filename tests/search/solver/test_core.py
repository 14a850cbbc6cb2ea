"""The core of a problem has the same minimum as the problem, and its strategies lead back to the whole."""

import math

import numpy as np
import pytest
from ci_cases import fewer
from factor_graphs import brute_force, problems, segments
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unity.search.solver import core as reduction
from unity.search.solver import minimizer, single_objective
from unity.search.solver.core import Core, core
from unity.search.solver.domains import all_values, domains
from unity.search.solver.elimination import BUDGET, Elimination, TableCache
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Problem, best_alternatives, direction, points
from unity.search.solver.single_objective import DirectedQuery, best_strategy

# Sums of fewer than 50 numbers below 100, with weights below 10, in another order.
ROUNDING = 1e-9
WEIGHTS = st.sampled_from([0.0, math.inf]) | st.floats(0.01, 10)
DENSE = ((0, 1), (1, 2), (2, 3), (0, 3), (0, 2), (1, 3))


def least(problem: Problem, weight: float) -> float:
    time, memory = direction(weight)
    return min((time * p.time + memory * p.memory for p in brute_force(problem)), default=math.inf)


def cost(problem: Problem, values: np.ndarray, weight: float) -> float:
    """The objective of a strategy, from the problem's own tables."""
    some = np.array([direction(weight)])
    (point,) = points(problem, values[None], best_alternatives(problem, values[None], some), True)
    return float(some[0] @ [point.time, point.memory])


def same(number: float) -> object:
    return pytest.approx(number, rel=ROUNDING, abs=ROUNDING)


@settings(max_examples=fewer(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems(), weight=WEIGHTS, cheap=st.sampled_from([0, 8, 2_000_000]))
def test_the_best_of_the_core_is_the_best_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, problem: Problem, weight: float, cheap: int
) -> None:
    monkeypatch.setattr(reduction, "CHEAP", cheap)
    reduced = core(problem, domains(problem), np.array(direction(weight)))
    expected = least(problem, weight)
    if reduced is None:
        assert math.isinf(expected)
        return
    every = [(point.time, point.values) for point in brute_force(reduced.problem)]
    found, values = min(every, default=(math.inf, ()))
    assert found == same(expected)
    if every:
        assert cost(problem, reduced.whole(values), weight) == same(expected)
        assert all(own in kept for own, kept in zip(reduced.whole(values), domains(problem).values, strict=True))


@settings(max_examples=fewer(200))
@given(problems(), WEIGHTS)
def test_every_strategy_of_the_core_is_one_of_the_whole_with_its_costs(problem: Problem, weight: float) -> None:
    reduced = core(problem, domains(problem), np.array(direction(weight)))
    for point in [] if reduced is None else brute_force(reduced.problem):
        assert reduced is not None
        assert cost(problem, reduced.whole(point.values), weight) == same(point.time)
        assert reduced.energy.at(point.values) == same(point.time)


def test_trees_and_rings_have_an_empty_core() -> None:
    for problem in (segments(20, (3, 4), ((0, 1), (1, 2))), segments(8, (3, 4), ((0, 1), (1, 2)), ring=True)):
        reduced = core(problem, domains(problem), np.array([1.0, 0.5]))
        assert reduced is not None
        assert not reduced.variables
        (point,) = Elimination(problem, domains(problem), BUDGET).solve(np.array([[1.0, 0.5]]))
        assert reduced.constant == same(point.time + 0.5 * point.memory)


@settings(max_examples=fewer(100))
@given(st.lists(problems(), min_size=2, max_size=4), WEIGHTS, st.sampled_from([BUDGET, 40]))
def test_shared_tables_change_no_core(some: list[Problem], weight: float, entries: int) -> None:
    solved, toward = TableCache(entries), np.array(direction(weight))
    for problem in [*some, *some]:
        shared, alone = core(problem, domains(problem), toward, solved), core(problem, domains(problem), toward)
        assert (shared is None) == (alone is None)
        if shared is not None and alone is not None:
            assert tables(shared) == tables(alone)


def tables(reduced: Core) -> tuple[object, ...]:
    own = tuple(table.costs.tolist() for table in reduced.own)
    return reduced.variables, own, {ends: table.costs.tolist() for ends, table in reduced.pairs.items()}, reduced.constant


def test_tables_of_one_problem_are_reused_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, solved, toward = segments(5, (4, 5, 3), ((0, 1), (1, 2), (0, 2), (0, 3))), TableCache(), np.array([1.0, 0.5])
    first = core(problem, domains(problem), toward, solved)
    monkeypatch.setattr(reduction, "product", None)
    again = core(problem, domains(problem), toward, solved)
    assert first is not None
    assert again is not None
    assert tables(first) == tables(again)
    with pytest.raises(TypeError):
        core(problem, domains(problem), np.array([1.0, 0.75]), solved)


@settings(max_examples=fewer(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems(), weight=WEIGHTS, other=st.none() | st.floats(0, 10), budget=st.sampled_from([BUDGET, 4]))
def test_the_best_strategy_is_that_of_brute_force(
    monkeypatch: pytest.MonkeyPatch, problem: Problem, weight: float, other: float | None, budget: int
) -> None:
    """It holds with messages of another objective too. With a small budget, strategies that are reported as exact are."""
    monkeypatch.setattr(single_objective, "FEW", -1)
    monkeypatch.setattr(reduction, "CHEAP", 4)
    start = None
    if other is not None:
        _, start = best_strategy(problem, domains(problem), DirectedQuery(np.array([1.0, other]), budget))
    wanted = DirectedQuery(np.array(direction(weight)), budget, start=start)
    found, _ = best_strategy(problem, domains(problem), wanted)
    expected = least(problem, weight)
    assert (found is None) == math.isinf(expected)
    if found is not None:
        assert cost(problem, found.values, weight) == same(found.objective)
        assert found.objective >= expected - ROUNDING
        assert found.exact or budget < BUDGET
        if found.exact:
            assert found.objective == pytest.approx(expected, rel=1e-7, abs=1e-7)


@pytest.mark.parametrize("few", [-1, single_objective.FEW])
def test_a_dense_problem_has_the_minimum_that_elimination_finds(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_objective, "FEW", few)
    problem = segments(6, (8, 9, 7, 8), (*DENSE, (0, 4), (3, 4), (2, 4)))
    for weight in (0.0, 0.1, 1.0, math.inf):
        some = np.array(direction(weight))
        found, messages = best_strategy(problem, domains(problem), DirectedQuery(some, BUDGET))
        plain = Elimination(problem, domains(problem), BUDGET)
        (point,) = plain.solve(some[None])
        assert plain.schedule.exact
        assert found is not None
        assert found.exact
        assert found.objective == same(float(some @ [point.time, point.memory]))
        assert (messages is None) == (few > 0)


@settings(max_examples=fewer(100), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=problems(), weight=WEIGHTS, share=st.floats(0, 2))
def test_a_price_by_the_core_is_that_of_brute_force(
    monkeypatch: pytest.MonkeyPatch, problem: Problem, weight: float, share: float
) -> None:
    """The price is infinite only if it exceeds the given bound."""
    monkeypatch.setattr(minimizer, "ENTRIES", (0, 1_000_000))
    monkeypatch.setattr(minimizer, "DENSE", 0)
    made, expected = Minimizer(problem, solved=TableCache()), least(problem, weight)
    assert made.tangled
    assert made.least(weight) == same(expected)
    found = made.least(weight, share * expected if math.isfinite(expected) else 1.0)
    assert found == same(expected) or (math.isinf(found) and share <= 1)


def test_all_values_includes_forbidden_ones() -> None:
    problem = segments(2, (3, 4), ((0, 1), (1, 2)))
    assert all_values(problem).sizes == problem.sizes
