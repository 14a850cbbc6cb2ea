"""A training step whose optimizer's state lies in the memory of the host between updates: where, in which order, and its values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_steps import optax_step
from precision import in_64_bits

import unity

LAYERS = 2
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
ON_HOST = unity.OptimizerState(2, host=True)
OPTIONS: dict[str, Any] = {
    "machine": unity.Machine.grid(1, 4, "h100"),
    "search": "fsdp",
    "progress": False,
}


@pytest.fixture(autouse=True, scope="module")
def in_float64() -> Iterator[None]:
    with in_64_bits():
        yield


def squares(weights: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for w in weights["layers"]:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return jnp.mean((x - batch["y"]) ** 2)


marked = unity.loss(squares)


def initial(optimizer: Any = ADAM) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    layer = lambda: {"up": rng.normal(size=(16, 64)) / 4, "down": rng.normal(size=(64, 16)) / 8}  # noqa: E731
    weights = jax.tree.map(jnp.asarray, {"layers": [layer() for _ in range(LAYERS)]})
    return (weights, optimizer.init(weights)), {"x": jnp.asarray(rng.normal(size=(32, 16))), "y": jnp.ones((32, 16))}


def after(step: Any, state: Any, batch: Any, steps: int = 3) -> Any:
    state = jax.tree.map(jnp.copy, state)
    for _ in range(steps):
        state, _ = step(state, batch)
    return state


def assert_same(one: Any, other: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14), one, other)


def kinds(tree: Any) -> list[str]:
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim]


def test_three_steps_with_state_on_the_host_have_the_values_of_the_function() -> None:
    """Here, an update that reads the gradients of all weights."""
    state, batch = initial(CLIPPED)
    train_step = optax_step(marked, CLIPPED)
    step = unity.step(train_step, donate_argnums=0, optimizer=ON_HOST, **OPTIONS)
    weights, slots = result = after(step, state, batch)
    assert_same(result, after(jax.jit(train_step), state, batch))
    assert set(kinds(weights)) == {"device"}
    assert set(kinds(slots)) == {"pinned_host"}
    shardings = step.shardings(state, batch)[0]
    assert jax.tree.map(lambda x: x.sharding, result) == shardings


def test_each_state_is_fetched_after_the_gradients_and_the_weight_before() -> None:
    """As programs for GPUs have it: one barrier for each weight, which its two moments leave for the device."""
    state, batch = initial()
    step = unity.step(optax_step(marked, ADAM), optimizer=ON_HOST, **OPTIONS)
    step.shardings(state, batch)
    call = step._call((state, batch), {})
    text = step._compiled_for(call).run.trace(*call.inputs.structs).lower(lowering_platforms=("cuda",)).as_text()
    barriers = re.findall(r"(%\d+):(\d+) = stablehlo.optimization_barrier", text)
    assert len(barriers) == 2 * LAYERS
    assert [int(count) for _, count in barriers] == [2 + 2 * LAYERS] + [2 + 3] * (2 * LAYERS - 1)
    fetched = set(re.findall(r'@annotate_device_placement\((%\d+#[01])\).*_xla_buffer_placement = "device"', text))
    assert {f"{name}#{k}" for name, _ in barriers for k in (0, 1)} <= fetched


def test_a_sum_of_gradients_in_a_scan_is_followed_by_the_update() -> None:
    def train_step(state: Any, batches: Any) -> Any:
        weights, slots = state

        def add(total: Any, batch: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(marked)(weights, batch)), None

        gradient, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), batches)
        updates, slots = ADAM.update(gradient, slots, weights)
        return (optax.apply_updates(weights, updates), slots), None

    state, batch = initial()
    batches = jax.tree.map(lambda x: x.reshape(2, 16, 16), batch)
    step = unity.step(train_step, optimizer=ON_HOST, **OPTIONS)
    result = after(step, state, batches, steps=1)
    assert_same(result, after(jax.jit(train_step), state, batches, steps=1))
    assert set(kinds(result[1])) == {"pinned_host"}


def test_state_that_the_gradients_depend_on_stays_on_the_device() -> None:
    """Here, a moving average of the weights that the loss is computed with."""

    def train_step(state: Any, batch: Any) -> Any:
        weights, average = state
        gradient = jax.grad(lambda w: marked(jax.tree.map(jnp.add, w, average), batch))(weights)
        weights = jax.tree.map(lambda w, g: w - g, weights, gradient)
        return (weights, jax.tree.map(lambda a, w: (a + w) / 2, average, weights)), None

    (weights, _), batch = initial()
    state = weights, jax.tree.map(jnp.zeros_like, weights)
    step = unity.step(train_step, optimizer=unity.OptimizerState(1, host=True), **OPTIONS)
    with pytest.warns(UserWarning, match="4 weights in the memory of the host, but the step returns such a state of 0"):
        result = after(step, state, batch, steps=1)
    assert set(kinds(result)) == {"device"}
    assert_same(result, after(jax.jit(train_step), state, batch, steps=1))


def test_an_own_step_moves_the_state_that_the_search_put_on_the_host() -> None:
    """Of some weights, since the limit is little below what the leanest plan needs without, and the link is slow."""
    (weights, _), batch = initial()
    slow = dataclasses.replace(OPTIONS["machine"], host=unity.HostLink(1e8))
    options = {**OPTIONS, "machine": slow, "search": "captured", "budget": 0, "pipelines": False, "branches": False}
    leanest = unity.optimize(squares, weights, batch, objective="memory", **options).memory
    plan = unity.optimize(squares, weights, batch, offload=True, recompute=False, memory_limit=0.97 * leanest, **options)
    weights, batch = plan.shard(weights, batch)
    shardings = plan.shard.shardings(jax.eval_shape(ADAM.init, weights))
    slots = jax.jit(ADAM.init, out_shardings=shardings)(weights)
    assert set(kinds(slots)) == {"device", "pinned_host"}
    assert set(kinds(plan.shard.state(weights))) == {"device"}

    def update(weights: Any, slots: Any, batch: Any) -> Any:
        slots = jax.device_put(slots, jax.memory.Space.Device)
        updates, slots = ADAM.update(jax.grad(plan)(weights, batch), slots, weights)
        return optax.apply_updates(weights, updates), slots

    expected = after(jax.jit(optax_step(marked, ADAM)), *initial())
    results = plan.in_shardings[0], shardings
    for _ in range(3):
        weights, slots = jax.jit(update, out_shardings=results)(weights, slots, batch)
    assert_same((weights, slots), expected)
    assert set(kinds(slots)) == {"device", "pinned_host"}
