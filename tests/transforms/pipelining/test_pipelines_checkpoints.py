"""What was saved under a plan with a pipeline is restored under one without, and back, bit by bit."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from ci_cases import by_hand
from jax import lax
from optax_steps import optax_step

import unity

OPTIMIZER = optax.adamw(0.05)
MACHINE = unity.Machine.grid(2, 4, "a100")


def loss(params: Any, x: Any) -> Any:
    found = lax.scan(lambda c, w: (c + jnp.tanh(c @ w), None), x, params["layers"])[0]
    return ((found @ params["out"]) ** 2).mean()


def weights() -> Any:
    rng = np.random.default_rng(0)
    return {"layers": rng.normal(size=(4, 8, 8)).astype(np.float32) / 3, "out": rng.normal(size=(8, 4)).astype(np.float32)}


def batch(seed: int) -> Any:
    return np.random.default_rng(seed).normal(size=(32, 8)).astype(np.float32)


def planned(**options: Any) -> unity.Plan:
    return unity.optimize(
        loss, weights(), batch(0), machine=MACHINE, search="captured", progress=False, **options
    )  # fmt: skip


def placed(plan: unity.Plan) -> Any:
    """Shapes and places of weights and moments under a plan."""
    shapes = jax.eval_shape(lambda: (weights(), OPTIMIZER.init(weights())))
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, plan.shard.shardings(shapes)
    )  # fmt: skip


def step_of(plan: unity.Plan) -> Any:
    return jax.jit(optax_step(plan, OPTIMIZER))


def moved(state: Any, plan: unity.Plan, path: Path) -> Any:
    """A state, saved and restored as another plan wants it."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, placed(plan))


def equal(one: Any, other: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), one, other)


@pytest.mark.parametrize("schedule", ["1f1b", *by_hand("gpipe")])
def test_a_training_goes_on_without_the_pipeline_and_back(tmp_path: Path, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plans = {"with": planned(pipeline=unity.PipelineShape(2, 4, schedule)), "without": planned(pipelines=False)}
    steps = {name: step_of(plan) for name, plan in plans.items()}
    layers = {name: plan.in_shardings[0]["layers"].spec for name, plan in plans.items()}
    assert plans["with"].program.pipelining is not None
    assert layers["with"][0] == plans["with"].program.pipelining.along[0].name  # a stage has its own layers, and their moments
    assert layers["without"] != layers["with"]
    state = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), (weights(), OPTIMIZER.init(weights())), placed(plans["with"]))
    alone = state
    for k, (before, now) in enumerate(pairwise(("with", "without", "with", "without"))):
        state, value = steps[before](state, plans[before].shard(state[0], batch(k))[1])
        alone, wanted = steps["with"](alone, plans["with"].shard(alone[0], batch(k))[1])
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
        after = moved(state, plans[now], tmp_path / str(k))
        equal(after, state)
        for x, sharding in zip(jax.tree.leaves(after), jax.tree.leaves(placed(plans[now])), strict=True):
            assert x.sharding.is_equivalent_to(sharding.sharding, x.ndim)
        state = after
