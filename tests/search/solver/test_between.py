"""Between two corners of the hull: every point that no other beats, if there is time; and else some of them."""

from itertools import pairwise

import numpy as np
import pytest
from ci_cases import fewer
from factor_graphs import brute_force, lower_left, problems, segments
from hypothesis import given, settings
from hypothesis import strategies as st

from unity.search.solver import frontier as frontiers
from unity.search.solver.domains import domains
from unity.search.solver.elimination import BUDGET, Elimination
from unity.search.solver.frontier import between, corners, frontier, frontier_under
from unity.search.solver.min_marginals import nearby
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.pareto import JoinBudget, pareto
from unity.search.solver.problem import Cost, Edge, Problem

# Sums of fewer than 50 numbers below 100, with weights below 10, in another order.
ROUNDING = 1e-9


@settings(max_examples=fewer(80))
@given(problems())
def test_every_gap_has_the_points_of_brute_force(problem: Problem) -> None:
    minimizer, every = Minimizer(problem), lower_left(brute_force(problem))
    for fast, lean in pairwise(corners(minimizer, 1000)):
        found, whole = between(minimizer, fast, lean)
        assert whole
        assert [(p.time, p.memory) for p in found] == [(t, m) for t, m in every if fast.time < t < lean.time]


@settings(max_examples=fewer(100))
@given(problems(), st.floats(0, 10), st.floats(0, 20))
def test_all_points_near_a_line_are_found(problem: Problem, weight: float, more: float) -> None:
    every = brute_force(problem)
    if not every:
        return
    most = min(p.time + weight * p.memory for p in every) + more
    elimination = Elimination(problem, domains(problem), BUDGET)
    near = nearby(elimination, weight, most + ROUNDING)
    found = {(p.time, p.memory) for p in pareto(problem, elimination.domains, elimination.schedule, JoinBudget(10**6), near)}
    assert {(t, m) for t, m in lower_left(every) if t + weight * m <= most} <= found
    assert near.total == pytest.approx(most - more, rel=1e-9, abs=ROUNDING)


@settings(max_examples=fewer(30))
@given(problems())
def test_the_fastest_that_fits_is_found_without_the_whole_frontier(problem: Problem) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontiers, "QUICK", -1)
        every = brute_force(problem)
        for memory in range(-1, 60, 3):
            best = min((p.time for p in every if p.memory <= memory), default=None)
            found = frontier_under(problem, memory)
            assert (found and found.time) == best
            assert found is None or found.memory <= memory


@pytest.mark.parametrize("rows", [50, 1_000_000])
def test_with_less_time_some_are_found(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = segments(12, (4, 3, 5), ((0, 1), (1, 2), (2, 3), (0, 3)))
    every = {(p.time, p.memory) for p in frontier(problem).points}
    monkeypatch.setattr("unity.search.solver.frontier.ROWS", rows)
    minimizer = Minimizer(problem)
    whole = [between(minimizer, fast, lean) for fast, lean in pairwise(corners(minimizer, 1000))]
    assert any(done for _, done in whole) == (rows > 50)
    assert {(p.time, p.memory) for found, done in whole if done for p in found} <= every


def test_a_variable_of_one_value_with_many_neighbours_is_no_obstacle() -> None:
    """A weight of an unrolled network in a search that gives it one place: it is fixed, and not eliminated."""
    chain = segments(40, (3,), ((0, 1),))
    last = len(chain.sizes)
    one = Cost("", np.zeros((1, 1)), np.ones((1, 1)))
    rng = np.random.default_rng(1)
    pull = Cost("", rng.integers(0, 6, (1, 1, 3)).astype(float), rng.integers(0, 6, (1, 1, 3)).astype(float))
    edges = (*chain.edges, *(Edge(last, v, pull) for v in range(last)))
    problem = Problem((*chain.sizes, 1), (*chain.unary, one), edges)
    minimizer = Minimizer(problem)
    assert any(step.single for step in minimizer.elimination.schedule.steps)
    whole = pareto(problem, minimizer.domains, minimizer.elimination.schedule, JoinBudget(10**7))
    hull = corners(minimizer, 1000)
    inside = [between(minimizer, fast, lean) for fast, lean in pairwise(hull)]
    assert all(done for _, done in inside)
    found = {(p.time, p.memory) for p in (*hull, *(p for some, _ in inside for p in some))}
    assert found == {(p.time, p.memory) for p in whole}
