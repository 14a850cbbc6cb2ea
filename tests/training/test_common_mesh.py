"""Plans of one training step have one mesh, on which each stores its arguments as on its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import unity
from unity.training.common_mesh import with_common_mesh

EIGHT = unity.Machine.grid(1, 8, "a100")


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w["up"]) ** 2)


def planned(spec: P, mesh: dict[str, int] | None = None) -> unity.Plan:
    pin = unity.pin("w['up']", spec, mesh=mesh)
    shapes = {"up": jax.ShapeDtypeStruct((64, 64), "float32")}, jax.ShapeDtypeStruct((128, 64), "float32")
    return unity.optimize(loss, *shapes, machine=EIGHT, constraints=[pin, unity.pin("x", P())], progress=False)


def test_a_level_in_parts_in_one_plan_is_in_parts_in_all() -> None:
    plans = {"whole": planned(P("device")), "parts": planned(P("device_a", "device_b"), {"device_a": 2, "device_b": 4})}
    assert {key: plan.mesh_shape for key, plan in plans.items()} == {
        "whole": {"device": 8},
        "parts": {"device_a": 2, "device_b": 4},
    }
    common = with_common_mesh(plans)
    assert [plan.mesh_shape for plan in common.values()] == [{"device_a": 2, "device_b": 4}] * 2
    assert common["whole"].in_specs[0]["up"] == P(("device_a", "device_b"))
    args = {"up": jnp.arange(64.0 * 64).reshape(64, 64) / 4096}, jnp.ones((128, 64))
    for key, plan in common.items():
        assert plan.in_shardings[0]["up"].is_equivalent_to(plans[key].in_shardings[0]["up"], 2)
        np.testing.assert_allclose(plan(*plan.shard(*args)), loss(*args), rtol=1e-5)
    assert with_common_mesh({"whole": plans["whole"]})["whole"] is plans["whole"]


def test_plans_of_different_meshes_run_in_one_program() -> None:
    one, other = (
        planned(P("device_a", "device_b"), {"device_a": 2, "device_b": 4}),
        planned(P("device_b", "device_a"), {"device_a": 4, "device_b": 2}),
    )
    args = {"up": jnp.arange(64.0 * 64).reshape(64, 64) / 4096}, jnp.ones((128, 64))
    both = jax.jit(jax.grad(lambda w, x: one(w, x) + other(w, x)))(*one.shard(*args))
    np.testing.assert_allclose(both["up"], 2 * jax.grad(loss)(*args)["up"], rtol=1e-4, atol=1e-6)
