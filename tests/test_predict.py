"""Predicted time: the search counts what the parallel graph costs, and no less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import MACHINE, MODELS, counted, named, random_point

from unity.pcg.capture import Captured
from unity.pcg.parallelize import parallelize
from unity.search.assemble import Assembled
from unity.search.minimizer import Minimizer
from unity.search.predict import predict
from unity.search.problem import Point


def predicted(captured: Captured, assembled: Assembled, point: Point) -> float:
    return predict(parallelize(captured.graph, assembled.assignment(point)), MACHINE, captured.differentiated).time


@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**32 - 1))
def test_the_search_counts_no_less_than_it_costs(name: str, seed: int) -> None:
    """More, where two operators change a value in the same way: the graph has that once."""
    captured, assembled = named(name)
    point = random_point(assembled, np.random.default_rng(seed))
    assert counted(assembled, point, "time") >= predicted(captured, assembled, point) * (1 - 1e-9)


@pytest.mark.parametrize("name", ["gpt", "lstm"])
def test_where_nothing_is_shared_it_counts_exactly_that(name: str) -> None:
    captured, assembled = named(name)
    (fastest,) = Minimizer(assembled.problem).at([0.0])
    assert (
        fastest.time == pytest.approx(counted(assembled, fastest, "time")) == pytest.approx(predicted(captured, assembled, fastest))
    )
