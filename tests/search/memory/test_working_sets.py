"""The leanest plan: working sets do not add up, but each operator's can be limited by the residuals before it."""

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
from unity.search import session
from unity.search.cost.cost import Training
from unity.search.memory.working_sets import ROUNDING, residual_bytes, working_set_bytes, working_set_limits
from unity.search.session import Search
from unity.search.solver.minimizer import Minimizer


@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**32 - 1))
def test_a_strategy_satisfies_its_own_limits_and_reaches_one_of_them(name: str, seed: int) -> None:
    _, assembled = named(name)
    point = random_point(assembled, np.random.default_rng(seed))
    limits, own = working_set_limits(assembled, point), working_set_bytes(assembled, point)
    assert all(n <= limit for n, limit in zip(own, limits, strict=True))
    assert any(n >= limit * (1 - 2 * ROUNDING) for n, limit in zip(own, limits, strict=True))
    arguments = [s for s, site in enumerate(assembled.opened.sites) if site.kind == "input"]
    stored = sum(float(assembled.costs[s].memory[point.values[s]]) for s in arguments)
    assert sum(residual_bytes(assembled, point)) + stored == pytest.approx(counted(assembled, point, "memory"))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_least_sum_under_the_limits_of_a_strategy_is_no_larger_than_its_own(name: str) -> None:
    """And every operator's working set is within its limit."""
    _, assembled = named(name)
    (fastest,) = Minimizer(assembled.problem).at([0.0])
    limits = working_set_limits(assembled, fastest)
    (leanest,) = Minimizer(assembled.limited(limits).problem).at([math.inf])
    assert leanest.memory <= fastest.memory
    assert all(n <= limit for n, limit in zip(working_set_bytes(assembled, leanest), limits, strict=True))


@cache
def searched(hidden: int = 256, steps: int = 4) -> Search:
    model = rnnlm(layers=1, hidden=hidden, vocab=1280, steps=steps, batch=128)
    captured = capture(model.loss, model.params, model.batch)
    nodes = Machine.grid(8, 8, "a100", intra=(300e9, 1.9e-6), inter=(25e9, 4e-6))
    return Search(captured.graph, captured.differentiated, nodes, Training())


def test_limits_per_operator_give_leaner_strategies_than_one_limit_for_all() -> None:
    """One limit for all operators is too loose for the product before the loss or too tight for the embedding look-up."""
    search = searched()
    points = [search.leanest_point, *((near, p) for near, m in search.narrow for p in m.at([search.ends[1]]))]
    before, after = ([of([point]) for point in points] for of in (lambda entries: search.by_memory(entries)[0][0], search.leaner))
    parts = [lean.memory / least.memory for least, lean in zip(before, after, strict=True)]
    assert max(parts) <= 1
    assert min(parts) < 0.96
    assert search.nearly_leanest.memory <= min(lean.memory for lean in after)


def test_a_start_that_is_not_the_leanest_may_lead_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    search = searched(hidden=512, steps=8)
    leanest = search.nearly_leanest.memory
    monkeypatch.setattr(session, "STARTS", 1)
    del vars(search)["nearly_leanest"]
    assert leanest < 0.9 * search.nearly_leanest.memory
