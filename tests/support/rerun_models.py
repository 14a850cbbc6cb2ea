"""Models with operators that the backward pass may run again, and random plans of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small_models import MACHINE, MODELS, Small, arrays, f, gpt_scanned, random_point
from test_halos import gradient_step

from unity.exec.compiled.check import predicted_elements
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured, capture
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.assembly import Assembled, assemble
from unity.search.cost.cost import Training
from unity.search.solver.problem import Point


def perceptron(layers: int = 3, b: int = 32, d: int = 16, wide: int = 64, batches: int = 1) -> Small:
    """Layers with an activation between two products, which only the second product reads."""

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = x + jnp.tanh(jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"])
        return jnp.mean(x**2)

    return Small(loss, [{"up": f(d, wide), "bias": f(wide), "down": f(wide, d)}] * layers, f(b * batches, d))


def bent(layers: int = 3, b: int = 16, d: int = 8, wide: int = 32) -> Small:
    """Layers whose activation is read twice, so that it may be recomputed, but not together with its user."""

    def loss(params: Any, x: Any) -> Any:
        def step(x: Any, p: Any) -> Any:
            y = jax.nn.gelu(x @ p["up"])
            return jnp.tanh(y @ p["down"] + (y * y) @ p["square"]), None

        return jnp.mean(lax.scan(step, x, params)[0] ** 2)

    return Small(loss, {"up": f(layers, d, wide), "down": f(layers, wide, d), "square": f(layers, wide, d)}, f(b, d))


CASES = {"perceptron": perceptron, **MODELS}
LOOPS = {"scanned": gpt_scanned, "bent": bent}
OWN = {**CASES, **LOOPS}
EVERY = dict(OWN)


def enter(models: Mapping[str, Callable[[], Small]]) -> None:
    """Add models that can be drawn by name, by which their plans are cached."""
    assert EVERY.keys().isdisjoint(models), EVERY.keys() & models.keys()
    EVERY.update(models)


@cache
def named(name: str, machine: Machine = MACHINE) -> tuple[Captured, Assembled]:
    model = EVERY[name]()
    with jax.enable_x64(True):
        captured = capture(model.loss, model.params, model.batch)
    return captured, assemble(captured.graph, captured.differentiated, machine, Training(), rerun=True)


def drawn(name: str, seed: int) -> tuple[Captured, Assembled, Point, PCG]:
    captured, assembled = named(name)
    point = random_point(assembled, np.random.default_rng(seed))
    return captured, assembled, point, parallelize(captured.graph, assembled.assignment(point))


def right(name: str, seeds: Iterable[int]) -> None:
    """Compare plans drawn with these seeds with the function: values, gradients, and the elements that are sent."""
    with jax.enable_x64(True):
        model = EVERY[name]()
        params, batch = arrays(model.params), arrays(model.batch)
        wanted, gradients = jax.jit(jax.value_and_grad(model.loss))(params, batch)
        for seed in seeds:
            captured, _, _, graph = drawn(name, seed)
            sent, (value, found) = gradient_step(graph, MACHINE, captured, jax.tree.leaves((params, batch)))
            assert float(value) == pytest.approx(float(wanted), rel=1e-10)
            for a, b in zip(found, jax.tree.leaves(gradients), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10 * np.abs(b).max())
            assert sent == predicted_elements(graph, captured.differentiated)
