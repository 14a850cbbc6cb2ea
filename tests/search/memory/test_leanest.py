"""The leanest plan: working sets are no sum, but what operators may need at once can be limited, each by what is kept before it."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import MODELS, counted, named, random_point

from benchmarks.models.recurrent import rnnlm
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.search.cost.cost import Training
from unity.search.memory.leanest import ROUNDING, residual_bytes, working_set_bytes, working_set_limits
from unity.search.session import Search
from unity.search.solver.minimizer import Minimizer


@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**32 - 1))
def test_a_strategy_keeps_to_its_own_room_and_fills_it_once(name: str, seed: int) -> None:
    _, assembled = named(name)
    point = random_point(assembled, np.random.default_rng(seed))
    limits, own = working_set_limits(assembled, point), working_set_bytes(assembled, point)
    assert all(n <= limit for n, limit in zip(own, limits, strict=True))
    assert any(n >= limit * (1 - 2 * ROUNDING) for n, limit in zip(own, limits, strict=True))
    arguments = [s for s, site in enumerate(assembled.opened.sites) if site.kind == "input"]
    stored = sum(float(assembled.costs[s].memory[point.values[s]]) for s in arguments)
    assert sum(residual_bytes(assembled, point)) + stored == pytest.approx(counted(assembled, point, "memory"))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_in_the_room_of_the_leanest_nothing_else_is_forbidden(name: str) -> None:
    """The least sum there is no more than that of the strategy whose room it is, and no operator has more than its share."""
    _, assembled = named(name)
    (fastest,) = Minimizer(assembled.problem).at([0.0])
    limits = working_set_limits(assembled, fastest)
    (found,) = Minimizer(assembled.limited(limits).problem).at([math.inf])
    assert found.memory <= fastest.memory
    assert all(n <= limit for n, limit in zip(working_set_bytes(assembled, found), limits, strict=True))


@cache
def searched() -> Search:
    model = rnnlm(layers=1, hidden=256, vocab=1280, steps=8, batch=128)
    captured = capture(model.loss, model.params, model.batch)
    return Search(captured.graph, captured.differentiated, Machine.grid(8, 8, "a100"), Training())


def test_around_the_leanest_that_single_limits_find_there_are_leaner_ones() -> None:
    """One limit for all operators is too much for the product before the loss or too little for the look-up in the table."""
    search = searched()
    found = [search.leanest_point, *((near, p) for near, m in search.narrow for p in m.at([search.ends[1]]))]
    before, after = ([of([one]) for one in found] for of in (lambda one: search.least(one)[0], search.leaner))
    parts = [lean.memory / least.memory for least, lean in zip(before, after, strict=True)]
    assert max(parts) <= 1
    assert min(parts) < 0.96
    assert search.leanest.memory <= min(lean.memory for lean in after)
