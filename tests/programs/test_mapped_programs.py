"""Losses with a `shard_map` inside are planned as global programs: values and gradients stay, nothing of size runs whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import one_in
from jax.sharding import PartitionSpec as P
from mapped_programs import DEVICES, IDIOMS, Idiom, ragged_experts

import unity
from unity.pcg.capture.capture import capture, unparallelized
from unity.pcg.parallel.traffic import traffic


@pytest.mark.parametrize("name", one_in(2, IDIOMS))
def test_plans_of_idioms_compute_what_was_written(name: str, own_cache: Path) -> None:
    idiom = IDIOMS[name]()
    arguments, numbers = idiom.arguments(), tuple(range(idiom.weights))
    machine = unity.Machine.grid(1, DEVICES, "a100")
    assert_equal(unity.optimize(idiom.loss, *arguments, argnums=numbers, machine=machine, budget=0, progress=False), idiom)


def assert_equal(plan: unity.Plan, idiom: Idiom) -> None:
    """Compare the values and gradients of a plan with those of the loss as written."""
    arguments, numbers = idiom.arguments(), tuple(range(idiom.weights))
    value, gradients = jax.jit(jax.value_and_grad(plan, numbers))(*plan.shard(*arguments))
    expected, expected_gradients = jax.jit(jax.value_and_grad(idiom.loss, numbers))(*arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for x, y in zip(gradients, expected_gradients, strict=True):
        y = np.asarray(y)
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5 * np.abs(y).max())


def planned(loss: Callable[..., Any], idiom: Idiom, machine: unity.Machine) -> unity.Plan:
    """Return the plan of a loss for the abstract arguments of an idiom."""
    dtypes = (jnp.int32 if k in idiom.indices else jnp.float32 for k in range(len(idiom.shapes)))
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(idiom.shapes, dtypes, strict=True)]
    numbers = tuple(range(idiom.weights))
    return unity.optimize(loss, *arguments, argnums=numbers, machine=machine, budget=0, progress=False)


def normalized(w: Any, scale: Any, x: Any) -> Any:
    y = x @ w
    mean = y.mean(0)
    variance = ((y - mean) ** 2).mean(0)
    return (jax.nn.relu((y - mean) * jax.lax.rsqrt(variance + 1e-5) * scale) ** 2).mean()


GLOBAL: dict[str, Callable[..., Any]] = {
    "Megatron perceptron": lambda a, b, x: ((jax.nn.gelu(x @ a) @ b) ** 2).mean(),
    "FSDP by hand": lambda a, b, x: (jnp.tanh(jnp.tanh(x @ a) @ b) ** 2).mean(),
    "batch norm": normalized,
}


@pytest.mark.parametrize("name", GLOBAL)
def test_plans_are_those_of_the_same_function_without_devices(name: str, own_cache: Path) -> None:
    idiom, machine = IDIOMS[name](128, 8), unity.Machine.grid(1, 8, "a100")
    times = [planned(loss, idiom, machine).time for loss in (idiom.loss, GLOBAL[name])]
    assert times[0] <= 1.01 * times[1]


def test_long_sequences_go_round_a_ring(own_cache: Path) -> None:
    idiom = replace(IDIOMS["ring attention"](64, 8), shapes=((512, 1536), (2, 8192, 512)))
    plan = planned(idiom.loss, idiom, unity.Machine.grid(1, 8, "a100"))
    sent = {(c.kind, c.node.kind) for c in traffic(plan.program.pcg)}
    assert ("collective-permute", "rotate") in sent
    assert ("all-gather", "rotate") not in sent


@pytest.mark.parametrize("name", IDIOMS)
def test_everything_in_an_idiom_can_be_divided(name: str) -> None:
    idiom = IDIOMS[name]()
    assert unparallelized(capture(idiom.loss, *idiom.arguments()).graph) == []


@pytest.mark.parametrize("name", ["ring attention", "halo exchange", "pipeline"])
def test_divided_rotations_compute_what_was_written(name: str, own_cache: Path) -> None:
    """The device's pieces stay where they were written: rotations are collective-permutes, in loops and in backward passes, too."""
    idiom, pin = IDIOMS[name](), unity.pin("rotate", P("device"))
    arguments, numbers = idiom.arguments(), tuple(range(idiom.weights))
    machine = unity.Machine.grid(1, DEVICES, "a100")
    plan = unity.optimize(idiom.loss, *arguments, argnums=numbers, machine=machine, budget=0, constraints=[pin], progress=False)
    assert {c.kind for c in traffic(plan.program.pcg) if c.node.kind == "rotate"} == {"collective-permute"}
    assert plan.check().agrees()
    assert_equal(plan, idiom)


def test_ragged_exchanges_of_tokens_compute_each_expert(own_cache: Path) -> None:
    """Compared with a product for each token, as XLA has no ragged all-to-all for CPUs."""

    def by_token(w: Any, x: Any) -> Any:
        chosen = jnp.argmax(x @ w[0], -1)
        hidden = jax.nn.gelu(jnp.einsum("td,tdf->tf", x, w[1][chosen]))
        return (jnp.einsum("tf,tfd->td", hidden, w[2][chosen]) ** 2).mean()

    shapes = (8, DEVICES), (DEVICES, 8, 16), (DEVICES, 16, 8), (8 * DEVICES, 8)
    *w, x = (jax.random.normal(jax.random.key(k), shape) for k, shape in enumerate(shapes))
    plan = unity.optimize(ragged_experts, tuple(w), x, machine=unity.Machine.grid(1, DEVICES, "a100"), budget=0, progress=False)
    results = jax.jit(jax.value_and_grad(plan))(*plan.shard(tuple(w), x))
    expected = jax.jit(jax.value_and_grad(by_token))(tuple(w), x)
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
