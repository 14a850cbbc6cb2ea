"""Refinement: never worse than the first search, and nearly as good as exact search over all values in all orders."""

import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import assume, given, settings
from small_functions import Function, functions
from small_models import MODELS, random_point

from benchmarks.pruning import every
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.types.axis import Axis
from unity.search.cost.assembly import assemble
from unity.search.cost.cost import Training
from unity.search.cost.refinement import around, neighbours, refined
from unity.search.solver.minimizer import minimize
from unity.search.solver.problem import Alternatives, Point, points
from unity.search.space.configurations import fits, shapes_of


def fastest(assembled):
    return minimize(assembled.problem, [0.0])[0]


def assembled_on(model, machine, limits=None):
    captured = capture(model.loss, model.params, model.batch)
    return assemble(captured.graph, captured.differentiated, machine, Training(), limits)


def test_neighbours_differ_on_one_axis_or_by_an_exchange() -> None:
    axes = (Axis("a", 2, 0), Axis("b", 2, 0), Axis("c", 3, 1))
    found = set(map(tuple, neighbours(np.array([[0, 1, 2]]), 3, axes).tolist()))
    single = {p for p in np.ndindex(3, 3, 3) if sum(x != y for x, y in zip(p, (0, 1, 2), strict=True)) <= 1}
    assert found == single | {(1, 0, 2)}


@settings(max_examples=fewer(8))
@given(functions)
def test_the_neighbourhood_contains_the_old_point_at_the_same_cost(function: Function) -> None:
    assembled = assembled_on(function, Machine.grid(2, 4, "v100"))
    for seed in range(3):
        drawn = random_point(assembled, np.random.default_rng(seed))
        (old,) = points(assembled.problem, np.array([drawn.values]), np.array([sum(taken(drawn.alternatives), ())]), False)
        near = around(assembled, [(assembled, old)])
        values = tuple(
            next(k for k, pick in enumerate(new.picks) if (pick == before.picks[v]).all())
            for new, before, v in zip(near.domains, assembled.domains, old.values, strict=True)
        )
        (new,) = points(near.problem, np.array([values]), np.array([sum(taken(old.alternatives), ())]), False)
        assert (new.time, new.memory) == pytest.approx((old.time, old.memory), rel=1e-12)
        for site, found in zip(near.opened.sites, near.domains, strict=True):
            assert fits(found.choices, shapes_of(site), found.picks, near.machine.axes).all()


def taken(alternatives: Alternatives) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return alternatives.unary, alternatives.edges


@settings(max_examples=fewer(8))
@given(functions)
def test_refinement_is_within_two_percent_of_the_optimum_on_small_graphs(function: Function) -> None:
    """At real sizes the loss is below one in a thousand (`benchmarks/pruning.py`)."""
    assembled = assembled_on(function, Machine.grid(1, 8, "v100"))
    first = fastest(assembled)
    _, second = refined(assembled, first, fastest, lambda p: p.time)
    whole = every(assembled)
    assume(whole is not None)  # else an operator has too many values
    best = fastest(whole)
    assert best.time - 1e-15 <= second.time <= first.time
    assert second.time <= 1.02 * best.time


@pytest.mark.parametrize("name", MODELS)
def test_refinement_improves_any_starting_point(name: str) -> None:
    assembled = assembled_on(MODELS[name](), Machine.grid(2, 4, "v100"))
    best = fastest(assembled).time
    for seed in range(2):
        start = random_point(assembled, np.random.default_rng(seed))
        chosen = [sum(taken(start.alternatives), ())]
        (start,) = points(assembled.problem, np.array([start.values]), np.array(chosen), False)
        _, found = refined(assembled, start, fastest, lambda p: p.time)
        assert found.time < start.time
        assert found.time < 1.2 * best


def test_a_complete_problem_is_not_refined() -> None:
    assembled = assembled_on(MODELS["cnn"](), Machine.grid(1, 4, "v100"))
    point = fastest(assembled)

    def never(near) -> Point:
        raise AssertionError("searched again")

    assert assembled.whole
    assert refined(assembled, point, never, lambda p: p.time) == (assembled, point)
