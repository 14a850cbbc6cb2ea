"""Predicted time: the search counts what the parallel graph costs, and no less."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import MODELS, random_point

from unity.pcg.capture import Captured, capture
from unity.pcg.parallelize import parallelize
from unity.search.assemble import Assembled, assemble
from unity.search.cost import Training
from unity.search.machine import Machine
from unity.search.minimizer import Minimizer
from unity.search.predict import predict
from unity.search.problem import Point

MACHINE = Machine.grid(2, 4, "a100")


def made(name: str) -> tuple[Captured, Assembled]:
    model = MODELS[name]()
    with jax.enable_x64(True):
        captured = capture(model.loss, model.params, model.batch)
    return captured, assemble(captured.graph, captured.differentiated, MACHINE, Training())


ASSEMBLED = {name: made(name) for name in MODELS}


def counted(assembled: Assembled, point: Point) -> float:
    """The time that the search counts for a point."""
    problem = assembled.problem
    unary = sum(c.time[a, v] for c, v, a in zip(problem.unary, point.values, point.alternatives.unary, strict=True))
    chosen = zip(problem.edges, point.alternatives.edges, strict=True)
    return unary + sum(e.cost.time[a, point.values[e.first], point.values[e.second]] for e, a in chosen)


def predicted(captured: Captured, assembled: Assembled, point: Point) -> float:
    return predict(parallelize(captured.graph, assembled.assignment(point)), MACHINE, captured.differentiated).time


@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**32 - 1))
def test_the_search_counts_no_less_than_it_costs(name: str, seed: int) -> None:
    """More, where two operators change a value in the same way: the graph has that once."""
    captured, assembled = ASSEMBLED[name]
    point = random_point(assembled, np.random.default_rng(seed))
    assert counted(assembled, point) >= predicted(captured, assembled, point) * (1 - 1e-9)


@pytest.mark.parametrize("name", ["gpt", "lstm"])
def test_where_nothing_is_shared_it_counts_exactly_that(name: str) -> None:
    captured, assembled = ASSEMBLED[name]
    (fastest,) = Minimizer(assembled.problem).at([0.0])
    assert fastest.time == pytest.approx(counted(assembled, fastest)) == pytest.approx(predicted(captured, assembled, fastest))
