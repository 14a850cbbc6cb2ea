"""A larger memory limit never gives a slower plan, whatever was searched before."""

from collections.abc import Callable
from itertools import pairwise

import jax
import numpy as np
import pytest
from ci_cases import by_hand, fewer
from factor_graphs import problems
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import programs
from small_models import MACHINE, MODELS, Small, named

from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured, capture
from unity.search.cost.cost import Training
from unity.search.session import NEARLY, Candidate, Search
from unity.search.solver import frontier as frontiers
from unity.search.solver.frontier import fastest_fitting, frontier_under
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Point, Problem

PARTS = (0.0, 0.1, 0.7, 1.0)


@pytest.mark.parametrize("name", ["cnn", *by_hand("gpt")])
def test_more_memory_never_gives_a_slower_plan(name: str) -> None:
    model = MODELS[name]()
    captured = capture(model.loss, model.params, model.batch)

    def search() -> Search:
        return Search(captured.graph, captured.differentiated, Machine.grid(2, 4, "v100"), Training())

    first = search()
    lean, fast = first.leanest.memory, first.fastest.memory
    limits = [lean + part * (fast - lean) for part in PARTS]
    alone = [fitting(search(), limit) for limit in limits]
    together = [fitting(first, limit) for limit in limits]
    for found in (alone, together):
        assert all(more.time <= less.time * (1 + 2 * NEARLY) for less, more in pairwise(found))
    assert [f.time for f in alone] == [f.time for f in together]
    assert first.under(lean * 0.999) is None


def reached_by_limits(captured: Captured, machine: Machine, training: Training) -> None:
    """Assert that a limit of exactly its memory reaches each point of the frontier, in a search that has not looked for it."""
    kinds = captured.graph, captured.differentiated, machine, training
    seen, unseen = Search(*kinds), Search(*kinds)
    points, _ = seen.frontier
    for point in points:
        under = fitting(unseen, point.memory)
        assert under.memory <= point.memory
        assert under.time <= point.time * (1 + 2 * NEARLY)
    assert seen.leanest.memory == unseen.leanest.memory <= points[-1].memory


@settings(max_examples=fewer(15))
@given(program=programs(), nodes=st.sampled_from([1, 2]), devices=st.sampled_from([2, 3, 5]), backward=st.booleans())
def test_the_memory_of_each_point_of_the_frontier_is_a_limit_that_gives_a_plan_as_good(
    program: Small, nodes: int, devices: int, backward: bool
) -> None:
    with jax.enable_x64(True):
        captured = capture(program.loss, program.params, program.batch)
    reached_by_limits(captured, Machine.grid(nodes, devices, "a100"), Training(backward))


def test_limits_reach_the_points_whose_working_sets_a_bisection_passes_over() -> None:
    captured, _ = named("cnn")
    reached_by_limits(captured, MACHINE, Training(False))


def test_a_limit_above_the_memory_of_the_fastest_plan_needs_no_frontier() -> None:
    captured, _ = named("cnn")
    search = Search(captured.graph, captured.differentiated, MACHINE, Training())
    assert search.under(search.fastest.memory) is search.fastest
    assert not {"frontier", "frontier_points", "leanest"} & vars(search).keys()


@settings(max_examples=fewer(20))
@given(problems())
def test_a_larger_limit_is_never_slower_for_any_problem_and_any_rule_of_what_fits(problem: Problem) -> None:
    minimizer, odd = Minimizer(problem), np.random.default_rng(0)
    extra: dict[Point, float] = {}

    def needs(point: Point) -> float:
        return extra.setdefault(point, point.memory + 20 * odd.random())

    for measure in (needs, lambda point: point.memory):
        found = [fastest_fitting(minimizer, (0.0, np.inf), within(measure, memory)) for memory in range(-1, 80, 4)]
        times = [np.inf if point is None else point.time for point in found]
        assert all(more <= less for less, more in pairwise(times))
    for memory in range(-1, 60, 6):
        known = frontier_under(problem, memory)
        assert known is None or known.memory <= memory


@settings(max_examples=fewer(40))
@given(problems())
def test_a_rough_search_finds_a_fitting_point_that_is_no_faster_than_the_best_and_never_slower_under_a_larger_limit(
    problem: Problem,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontiers, "QUICK", -1)
        last = np.inf
        for memory in range(-1, 60, 4):
            fits = within(lambda point: point.memory, memory)
            rough = fastest_fitting(Minimizer(problem), (0.0, np.inf), fits, roughly=True)
            best = fastest_fitting(Minimizer(problem), (0.0, np.inf), fits)
            assert (rough is None) == (best is None)
            if rough is not None and best is not None:
                assert fits(rough)
                assert best.time <= rough.time <= last
                last = rough.time


def within(measure: Callable[[Point], float], memory: float) -> Callable[[Point], bool]:
    return lambda point: measure(point) <= memory


def fitting(search: Search, limit: float) -> Candidate:
    found = search.under(limit)
    assert found is not None
    assert found.memory <= limit
    return found
