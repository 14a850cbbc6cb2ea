"""What the steps of a scan keep inside of operators, and operators of theirs that a product reads, may be made again, too."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from small_models import MACHINE, Small, arrays, block, counted, cross_entropy, f, i, layer, random_point
from test_halos import gradient_step

import unity
from unity.exec.check import predicted_elements
from unity.pcg.again import INNER, WHOLE
from unity.pcg.capture import Captured, capture
from unity.pcg.graph import PCG
from unity.pcg.parallelize import parallelize
from unity.search.assemble import Assembled, assemble
from unity.search.cost import Training
from unity.search.machine import Machine
from unity.search.memory import predict_memory
from unity.search.minimizer import Minimizer
from unity.search.predict import predict
from unity.search.problem import Point
from unity.search.simulator import simulate


def gpt(layers: int = 2, d: int = 16, vocabulary: int = 32, b: int = 8, s: int = 8) -> Small:
    """Layers as a scan that keeps what each of them leaves."""

    def loss(p: Any, batch: Any) -> Any:
        x = p["token"][batch["x"]] + p["position"]
        x, _ = lax.scan(lambda x, one: (block(one, x), None), x, p["layers"])
        return cross_entropy(x @ p["token"].T, batch["y"])

    stacked = jax.tree.map(lambda t: f(layers, *t.shape), layer(d))
    return Small(loss, {"token": f(vocabulary, d), "position": f(s, d), "layers": stacked}, {"x": i(b, s), "y": i(b, s)})


def bent(layers: int = 3, b: int = 16, d: int = 8, wide: int = 32) -> Small:
    """What is bent is read twice: it may be computed again, but not by its reader."""

    def loss(params: Any, x: Any) -> Any:
        def step(x: Any, p: Any) -> Any:
            y = jax.nn.gelu(x @ p["up"])
            return jnp.tanh(y @ p["down"] + (y * y) @ p["square"]), None

        return jnp.mean(lax.scan(step, x, params)[0] ** 2)

    return Small(loss, {"up": f(layers, d, wide), "down": f(layers, wide, d), "square": f(layers, wide, d)}, f(b, d))


MODELS = {"gpt": gpt, "bent": bent}
DRAWN = {"name": st.sampled_from(sorted(MODELS)), "seed": st.integers(0, 2**32 - 1)}


@cache
def named(name: str) -> tuple[Captured, Assembled]:
    model = MODELS[name]()
    with jax.enable_x64(True):
        captured = capture(model.loss, model.params, model.batch)
    return captured, assemble(captured.graph, captured.differentiated, MACHINE, Training(), rerun=True)


def drawn(name: str, seed: int) -> tuple[Captured, Assembled, Point, PCG]:
    captured, assembled = named(name)
    point = random_point(assembled, np.random.default_rng(seed))
    return captured, assembled, point, parallelize(captured.graph, assembled.assignment(point))


def again(graph: PCG, what: int) -> list[str]:
    """The kinds of operators inside of the scan that are made again so."""
    (scan,) = (node for node in graph.nodes if node.inside is not None)
    assert scan.inside is not None
    return [n.kind for n in scan.inside.nodes if n.body is not None and n.attributes.get("again") == what]


@settings(max_examples=30)
@given(**DRAWN)
def test_the_search_counts_no_less_than_it_costs(name: str, seed: int) -> None:
    captured, assembled, point, graph = drawn(name, seed)
    assert counted(assembled, point, "time") >= predict(graph, MACHINE, captured.differentiated).time * (1 - 1e-9)
    held = predict_memory(graph, captured.differentiated, Training())
    assert counted(assembled, point, "memory") >= held.additive * (1 - 1e-9)


@settings(max_examples=15)
@given(**DRAWN)
def test_a_simulated_step_takes_what_is_predicted(name: str, seed: int) -> None:
    captured, _, _, graph = drawn(name, seed)
    found = simulate(graph, MACHINE, captured.differentiated, overlap=False)
    assert found.makespan == pytest.approx(predict(graph, MACHINE, captured.differentiated).time, rel=1e-9)


@pytest.mark.parametrize(("name", "what"), [("gpt", WHOLE), ("bent", INNER)])
def test_it_computes_and_sends_what_it_says(name: str, what: int) -> None:
    seed = next(k for k in range(40) if again(drawn(name, k)[3], what))
    with jax.enable_x64(True):
        model = MODELS[name]()
        params, batch = arrays(model.params), arrays(model.batch)
        wanted, gradients = jax.jit(jax.value_and_grad(model.loss))(params, batch)
        captured, _, _, graph = drawn(name, seed)
        sent, (value, found) = gradient_step(graph, MACHINE, captured, jax.tree.leaves((params, batch)))
        assert float(value) == pytest.approx(float(wanted), rel=1e-10)
        for a, b in zip(found, jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10 * np.abs(b).max())
        assert sent == predicted_elements(graph, captured.differentiated)


def test_the_compiled_program_does_not_keep_it() -> None:
    def loss(params: Any, x: Any) -> Any:
        def step(x: Any, p: Any) -> Any:
            return x + jax.nn.softmax(jax.nn.gelu(x @ p["up"]) @ p["mid"]) @ p["down"], None

        return jnp.mean(lax.scan(step, x, params)[0] ** 2)

    layers, rows, d, wide = 6, 4096, 32, 512
    shapes = {"up": (d, wide), "mid": (wide, wide), "down": (wide, d)}
    params = {k: jax.ShapeDtypeStruct((layers, *s), "float32") for k, s in shapes.items()}
    x = jax.ShapeDtypeStruct((rows, d), "float32")
    machine = Machine.grid(1, 8, "a100")
    plan, lean = (
        unity.optimize(loss, params, x, machine=machine, progress=False, search="captured", objective=wanted, pipelines=False)
        for wanted in ("time", "memory")
    )
    assert again(lean.pcg, INNER) + again(lean.pcg, WHOLE)
    found, before = lean.check(), plan.check()
    assert found.agrees(0.0)
    for checked in (found, before):
        assert abs(checked.timeline.step / checked.memory.total - 1) < 0.15
    assert found.memory.temporaries < before.memory.temporaries / 2


@pytest.mark.parametrize(("name", "what", "kind"), [("gpt", WHOLE, "softmax"), ("gpt", WHOLE, "gelu"), ("bent", INNER, "gelu")])
def test_the_leanest_keeps_none_of_it(name: str, what: int, kind: str) -> None:
    captured, assembled = named(name)
    (point,) = Minimizer(assembled.problem).at([np.inf])
    assert kind in again(parallelize(captured.graph, assembled.assignment(point)), what)
