"""Pipelines beside rewritings: the plan has what it must have, whatever a rewriting leaves of the layers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import unity


def layers(weights: Any, x: Any) -> Any:
    for w in weights:  # two products with one weight, which a rule makes one of all samples twice
        x = x + (jnp.sin(jnp.tanh(x) @ w["up"]) + jnp.cos(jnp.abs(x) @ w["up"])) @ w["down"]
    return jnp.mean(x**2)


def test_a_rewriting_without_equal_layers_does_not_exclude_a_pipeline() -> None:
    rng = np.random.default_rng(0)
    up, down, x = (jnp.asarray(rng.normal(size=s) / 8, jnp.float32) for s in ((32, 64), (64, 32), (64, 32)))
    weights = [{"up": up, "down": down}, {"up": -up, "down": down / 2}]
    machine = unity.Machine.grid(1, 2)
    assert [t.kind for t in unity.optimize(layers, weights, x, machine=machine).program.transformations] == ["rewriting"]
    plan = unity.optimize(layers, weights, x, machine=machine, pipeline=unity.PipelineShape(2, 2))
    assert "pipeline" in [t.kind for t in plan.program.transformations]
    want, got = (jax.jit(jax.value_and_grad(fn))(weights, x) for fn in (layers, plan))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), want, got)
