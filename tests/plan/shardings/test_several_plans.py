"""Plans of one machine share a mesh, so that they take each other's arguments and run in one program, whatever they divide.

Programs with several meshes fail, also where one divides the axes of another: JAX raises `IndivisibleError`, or "mesh should be the
same across the entire program" where a callback is in it, and XLA ends the process. So a plan's own mesh is not that of its
`mesh_shape`, which differs between these plans.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import unity

MACHINE = unity.Machine.grid(1, 8, "a100")
TWO_FOUR, FOUR_TWO = {"device_a": 2, "device_b": 4}, {"device_a": 4, "device_b": 2}
PINS = {  # specifications of the weight and of the batch, and their mesh
    "whole": (P("device"), P(), {"device": 8}),
    "two by four": (P("device_a", "device_b"), P(), TWO_FOUR),
    "four by two": (P("device_a", "device_b"), P(), FOUR_TWO),
    "four by two, samples split": (P("device_b", "device_a"), P(None, "device_b"), FOUR_TWO),
}


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def on_host(x: Any) -> Any:
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


@pytest.fixture(scope="module")
def plans() -> dict[str, unity.Plan]:
    shapes, planned = (jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((128, 64), "float32")), {}
    for name, (weight, batch, mesh) in PINS.items():
        pins = [unity.pin("w", weight, mesh=mesh), unity.pin("x", batch, mesh=mesh)]
        planned[name] = unity.optimize(loss, *shapes, machine=MACHINE, constraints=pins, progress=False)
        assert planned[name].mesh_shape == mesh
    return planned


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("whole", "four by two, samples split"),
        ("four by two", "two by four"),
        ("two by four", "four by two"),
        ("two by four", "whole"),
    ],
)
def test_a_plan_takes_the_arguments_of_another_and_runs_beside_it(plans: dict[str, unity.Plan], first: str, second: str) -> None:
    one, other = plans[first], plans[second]
    args = jnp.arange(64.0 * 64).reshape(64, 64) / 4096, jnp.ones((128, 64))
    w, x = one.shard(*args)
    wanted = jax.grad(loss)(*args)
    step = jax.jit(lambda w, x: w - on_host(jax.grad(other)(w, x)))
    np.testing.assert_allclose(step(w, x), args[0] - wanted, rtol=1e-4, atol=1e-6)
    both = jax.jit(jax.grad(lambda w, x: one(w, x) + other(w, x)))
    np.testing.assert_allclose(both(w, x), 2 * wanted, rtol=1e-4, atol=1e-6)
    assert one.inspect.mesh == other.inspect.mesh
