"""Plans compute the function if one value has several roles, such as operand and result of a loop."""

from __future__ import annotations

from typing import Any

import aliased_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand, fewer
from hypothesis import HealthCheck, example, given, settings

import unity

# So slow that even small operators are divided.
SLOW = unity.Device("slow", flops={"float32": 2e7}, memory=2**33, bandwidth=2e9, efficiency=1.0, launch=1e-8)
MACHINE = unity.Machine("slow", SLOW, (unity.Level("device", 8, bandwidth=2e9, latency=1e-7),))


def is_the_function(fn: Any, *args: Any, **options: Any) -> unity.Plan:
    options = {"machine": MACHINE, "progress": False, "search": "captured", **options}
    plan = unity.optimize(fn, *args, **options)
    got, wanted = (jax.jit(jax.value_and_grad(f, has_aux=True))(*args) for f in (plan, fn))
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    return plan


# A sum of a constant, which is read whole and in part by one operator, once counted half.
READ_TWICE = aliased_programs.Program(
    aliased_programs.Block((("remat", [0], *[aliased_programs.Block((), (0,))] * 2), ("add", 0, 10)), (6, 1, 11)), ()
)


@example(READ_TWICE)
@settings(max_examples=fewer(8), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(aliased_programs.programs)
def test_random_programs_in_which_values_are_several_things(program: aliased_programs.Program) -> None:
    rng = np.random.default_rng(0)
    a, b, x = (jnp.asarray(rng.normal(size=(8, 8)), jnp.float32) for _ in range(3))
    is_the_function(program, {"a": a, "b": b}, x)


def masked(w: Any, x: Any, mask: Any) -> Any:
    @jax.checkpoint
    def layer(carry: Any, w: Any) -> Any:
        h, mask = carry
        return (jnp.tanh(h @ w) * mask, mask), None

    (h, again), _ = jax.lax.scan(layer, (x, mask), w)
    return h.sum(), again


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pipeline": unity.PipelineShape(2, 4, "1f1b")},
        *by_hand({"pipeline": unity.PipelineShape(2, 4, "gpipe")}, {"search": "unity-rules"}),
    ],
)
def test_a_checkpointed_step_may_hand_a_carry_on(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for s in ((4, 16, 16), (32, 16)))

    def alone(*args: Any) -> Any:  # 1F1B gives no other results of the layers
        return masked(*args)[0], ()

    pipeline = options.get("pipeline")
    fn = alone if pipeline is not None and pipeline.schedule == "1f1b" else masked
    plan = is_the_function(fn, w, x, jnp.asarray(rng.random((32, 16)) > 0.3, jnp.float32), **options)
    assert (plan.program.pipelining is not None) == ("pipeline" in options)


def lennard_jones(positions: Any, neighbours: Any) -> Any:
    """Energy after some steps of gradient descent, with a list of neighbours (padded by the number of particles) handed on."""

    def energy(r: Any, neighbours: Any) -> Any:
        there = neighbours < r.shape[0]
        d = r[:, None] - r[jnp.where(there, neighbours, 0)]
        s = 1 / jnp.where(there, (d**2).sum(-1) + 0.1, 1.0)
        return 0.5 * jnp.where(there, 4 * (s**6 - s**3), 0.0).sum()

    @jax.checkpoint
    def step(state: Any, _: Any) -> Any:
        r, neighbours = state
        return (r - 1e-3 * jnp.clip(jax.grad(energy)(r, neighbours), -1, 1), neighbours), energy(r, neighbours)

    (r, again), energies = jax.lax.scan(step, (positions, neighbours), None, 3)
    return energy(r, again), (energies, again)


def test_molecules_with_lists_of_neighbours() -> None:
    rng = np.random.default_rng(0)
    r = jnp.asarray(np.indices((4, 4, 2)).reshape(3, -1).T + 0.1 * rng.normal(size=(32, 3)), jnp.float32)
    distance = np.linalg.norm(r[:, None] - r[None], axis=-1) + 10 * np.eye(32)
    near = np.argsort(distance, axis=1)[:, :8]
    near = np.where(np.take_along_axis(distance, near, 1) < 1.5, near, 32)
    is_the_function(lennard_jones, r, jnp.asarray(near, jnp.int32))
