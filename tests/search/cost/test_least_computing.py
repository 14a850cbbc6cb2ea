"""The bound on simulated steps: no step of any strategy is shorter, and where nothing waits it is the step."""

from __future__ import annotations

import io
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small_models import MACHINE, MODELS, f, made, named, random_point

import unity
from unity.explain.brief import simulated_gap_in_words
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost import least_computing as bounds
from unity.search.cost.cost import Training, site_cost
from unity.search.cost.least_computing import least_computing
from unity.search.cost.prediction import predict
from unity.search.session import Search
from unity.search.simulator import simulate
from unity.search.space.configurations import domain_of_picks, legal, shapes_of


@pytest.mark.parametrize("name", MODELS)
def test_no_simulated_step_is_shorter(name: str) -> None:
    captured, assembled = named(name)
    bound, rng = least_computing(assembled), np.random.default_rng(0)
    assert bound is not None
    for _ in range(5):
        graph = parallelize(captured.graph, assembled.assignment(random_point(assembled, rng)))
        assert simulate(graph, MACHINE, captured.differentiated).makespan >= bound * (1 - 1e-9)


@pytest.mark.parametrize("axes", [(1, 4), (2, 2), (2, 6)])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_least_of_every_value_in_every_order(name: str, axes: tuple[int, int]) -> None:
    machine = Machine.grid(*axes, "a100")
    _, assembled = made(MODELS[name](), machine)
    total = 0.0
    for site, old in zip(assembled.opened.sites, assembled.domains, strict=True):
        picks = np.array([*product(range(len(old.choices)), repeat=len(machine.axes))], np.int16)
        picks = picks[legal(site, old.choices, picks, machine.axes)]
        cost = site_cost(site, domain_of_picks(old.choices, picks, shapes_of(site), machine.axes), machine, assembled.training)
        total += float((cost.forward + cost.backward).min())
    assert least_computing(assembled) == pytest.approx(total)


def test_there_is_none_where_operators_have_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    _, assembled = named("gpt")
    monkeypatch.setattr(bounds, "VALUES", 3)
    assert least_computing(assembled) is None


def steps(x: Any) -> Any:
    return lax.scan(lambda c, _: (jnp.tanh(c @ c), None), x, None, length=8)[0]


NESTED = {
    "a scan without a gradient": lambda w, x: (w @ x) * steps(x),
    "a checkpoint without a gradient": lambda w, x: (w @ x) * jax.checkpoint(lambda x: jnp.tanh(x @ x) @ x)(x),
    "a scan in a checkpoint without a gradient": lambda w, x: (w @ x) * jax.checkpoint(steps)(x),
    "a checkpoint with a gradient": lambda w, x: jnp.sin(jax.checkpoint(lambda w: jnp.tanh(w @ x) @ x)(w) @ x),
}


@pytest.mark.parametrize("name", NESTED)
def test_what_a_checkpoint_recomputes_is_simulated_whether_it_has_a_gradient_or_not(name: str) -> None:
    machine, layer = Machine.grid(1, 4, "a100"), jax.checkpoint(NESTED[name])
    captured = capture(lambda w, x: layer(w, x).sum(), f(512, 512), f(512, 512), argnums=(0,))
    search = Search(captured.graph, captured.differentiated, machine, Training())
    graph = parallelize(captured.graph, search.fastest.assignment)
    step = simulate(graph, machine, captured.differentiated, overlap=False).makespan
    assert step == pytest.approx(predict(graph, machine, captured.differentiated).time)
    assert search.least_computing is not None
    assert search.least_computing <= step


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def planned(width: int, **options: Any) -> unity.Plan:
    eight = Machine.grid(1, 8, "h100")
    return unity.optimize(loss, f(width, width), f(65536, width), machine=eight, budget=0, progress=False, **options)


def test_a_plan_says_how_far_its_simulated_step_is_from_the_shortest() -> None:
    plan, text = planned(8192), io.StringIO()
    step, bound, gap = plan.inspect.simulate().makespan, plan.inspect.simulated_bound, plan.inspect.simulated_gap
    assert bound is not None
    assert gap is not None
    assert 0 <= gap < 0.2
    assert gap == pytest.approx(step / bound - 1)
    plan.explain(file=text)
    assert simulated_gap_in_words(plan)
    assert simulated_gap_in_words(plan) in text.getvalue()


@pytest.mark.parametrize("gap", [None, 1.5])
def test_a_gap_that_says_little_is_left_out(gap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(64)
    monkeypatch.setattr(type(plan.inspect), "simulated_gap", gap)
    assert simulated_gap_in_words(plan) == ""
