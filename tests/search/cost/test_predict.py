"""Predicted time: the search counts at least the cost of the parallel graph."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from small_models import MACHINE, MODELS, Small, counted, made, named, random_point, scatters

import unity
from benchmarks.equivalent import CLASSES
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.assembly import Assembled
from unity.search.cost.prediction import predict
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Point


def predicted(captured: Captured, assembled: Assembled, point: Point, machine: Machine = MACHINE) -> float:
    return predict(parallelize(captured.graph, assembled.assignment(point)), machine, captured.differentiated).time


@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**32 - 1))
def test_the_search_counts_at_least_the_cost_of_the_graph(name: str, seed: int) -> None:
    """It counts more if two operators change a value in the same way, which the graph does once."""
    captured, assembled = named(name)
    point = random_point(assembled, np.random.default_rng(seed))
    assert counted(assembled, point, "time") >= predicted(captured, assembled, point) * (1 - 1e-9)


@pytest.mark.parametrize("name", ["gpt", "lstm"])
def test_without_shared_changes_the_search_counts_exactly_the_cost(name: str) -> None:
    captured, assembled = named(name)
    (fastest,) = Minimizer(assembled.problem).at([0.0])
    assert (
        fastest.time == pytest.approx(counted(assembled, fastest, "time")) == pytest.approx(predicted(captured, assembled, fastest))
    )


def normed() -> Small:
    """Layers whose norms are reduced inside, and read by several, with numbers of two types."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)
            x = x + jnp.tanh(y @ w["up"]) @ w["down"]
            x = x - jax.nn.log_softmax(x, 0)
        return jnp.mean(jax.nn.log_softmax(x, -1)).astype(jnp.float32)

    layer = {"up": jax.ShapeDtypeStruct((16, 32), "bfloat16"), "down": jax.ShapeDtypeStruct((32, 16), "bfloat16")}
    return Small(loss, [layer] * 2, jax.ShapeDtypeStruct((32, 16), "bfloat16"))


@cache
def normed_on(machine: Machine) -> tuple[Captured, Assembled]:
    return made(normed(), machine)


@settings(max_examples=fewer(25))
@given(reduce_in=st.sampled_from(["", "bfloat16"]), seed=st.integers(0, 2**32 - 1))
def test_partial_sums_of_narrow_dtypes_are_priced_in_the_dtype_that_is_sent(reduce_in: str, seed: int) -> None:
    """Both between operators and inside them."""
    machine = replace(MACHINE, reduce_in=reduce_in)
    captured, assembled = normed_on(machine)
    point = random_point(assembled, np.random.default_rng(seed))
    assert counted(assembled, point, "time") >= predicted(captured, assembled, point, machine) * (1 - 1e-9)


def summed() -> Small:
    """A function of the sum of two products, which it scatters where both are partial sums."""

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ params["up"] + (x * x) @ params["side"]) @ params["down"]).astype(jnp.float32)

    shapes = {"up": (64, 128), "side": (64, 128), "down": (128, 32)}
    params = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    return Small(loss, params, jax.ShapeDtypeStruct((96, 64), "bfloat16"))


@pytest.mark.parametrize("reduce_in", ["", "bfloat16"])
def test_sums_that_are_scattered_inside_operators_are_priced_as_they_are_sent(reduce_in: str) -> None:
    machine = replace(Machine.grid(2, 2, "a100"), reduce_in=reduce_in)
    captured, assembled = made(summed(), machine)
    points = (random_point(assembled, np.random.default_rng(seed)) for seed in range(2000))
    graphs = ((point, parallelize(captured.graph, assembled.assignment(point))) for point in points)
    scattering = list(islice((point for point, graph in graphs if any(map(scatters, graph.nodes))), 5))
    assert len(scattering) == 5
    for point in scattering:
        assert counted(assembled, point, "time") == pytest.approx(predicted(captured, assembled, point, machine))


@pytest.mark.parametrize("form", ["ratio", "normalized", "vmap"])
def test_sums_inside_of_an_operator_have_an_all_reduce_backward_only_if_they_have_a_gradient(form: str) -> None:
    """The labels' norms have none. No number of devices divides the rows, so that all norms are sums over devices."""
    shapes = (8, 2**20), (3, 8), (3, 2**20)
    wanted = [unity.pin(path, P(None, "device")) for path in ("args[0]", "args[2]")]
    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    fn = CLASSES["cosine similarity"].forms[form].run
    plan = unity.optimize(fn, *args, machine=Machine.grid(1, 2), constraints=wanted, budget=0)
    check = plan.check()
    assert check.agrees(), str(check)
    assert {line.kind for line in check.lines if line.compiled} == {"all-reduce"}
