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
from jax.ad_checkpoint import checkpoint_name
from optax_steps import optax_step
from precision import in_64_bits

import unity
from unity.training.host_state import operands_by_name

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


def barriers_of(step: Any, *args: Any) -> tuple[list[int], str]:
    """The number of values that each barrier of a step has, and the text of the program for GPUs."""
    step.shardings(*args)
    call = step._call(args, {})
    text = step._compiled_for(call).run.trace(*call.inputs.structs).lower(lowering_platforms=("cuda",)).as_text()
    return [int(n) for n in re.findall(r"%\d+:(\d+) = stablehlo.optimization_barrier", text)], text


def test_each_state_is_fetched_after_the_gradients_and_the_weight_before() -> None:
    """As programs for GPUs have it: one barrier for each weight, which its two moments leave for the device."""
    counts, text = barriers_of(unity.step(optax_step(marked, ADAM), optimizer=ON_HOST, **OPTIONS), *initial())
    assert counts == [2 + 2 * LAYERS] + [2 + 3] * (2 * LAYERS - 1)
    barriers = re.findall(r"(%\d+):\d+ = stablehlo.optimization_barrier", text)
    fetched = set(re.findall(r'@annotate_device_placement\((%\d+#[01])\).*_xla_buffer_placement = "device"', text))
    assert {f"{name}#{k}" for name in barriers for k in (0, 1)} <= fetched


one, other = (unity.loss(lambda w, x, f=f: jnp.mean(f(x @ w["w"]) ** 2)) for f in (jnp.tanh, jnp.sin))


def two_losses(optimizer: Any, share: bool = False) -> Any:
    """A step of two losses whose weights, of equal names and shapes, are two or one and the same."""

    def train_step(state: Any, batch: Any) -> Any:
        (a, b), (of_a, of_b) = state
        gradient_a, gradient_b = jax.grad(one)(a, batch), jax.grad(other)(a if share else b, batch)
        if share:
            gradient_a = jax.tree.map(jnp.add, gradient_a, gradient_b)
        update_a, of_a = optimizer.update(gradient_a, of_a, a)
        update_b, of_b = (jax.tree.map(jnp.zeros_like, b), of_b) if share else optimizer.update(gradient_b, of_b, b)
        return ((optax.apply_updates(a, update_a), optax.apply_updates(b, update_b)), (of_a, of_b)), None

    return train_step


def two_states(optimizer: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    a, b = ({"w": jnp.asarray(rng.normal(size=(16, 64)))} for _ in range(2))
    return ((a, b), (optimizer.init(a), optimizer.init(b))), jnp.asarray(rng.normal(size=(32, 16)))


@pytest.mark.parametrize("optimizer", [ADAM, CLIPPED])
def test_the_states_of_two_weights_of_equal_names_are_fetched_one_after_the_other(optimizer: Any) -> None:
    state, batch = two_states(optimizer)
    step = unity.step(two_losses(optimizer), optimizer=ON_HOST, **OPTIONS)
    assert barriers_of(step, state, batch)[0] == [2 + 2, 2 + 3]
    assert_same(after(step, state, batch, 1), after(jax.jit(two_losses(optimizer)), state, batch, 1))


def test_of_two_weights_of_equal_names_each_has_its_state_where_its_plan_puts_it() -> None:
    """On the host for the loss of many samples, which does not fit otherwise, and on the device for the other one."""

    def train_step(state: Any, batch: Any) -> Any:
        (a, b), (of_a, of_b) = state
        update_a, of_a = ADAM.update(jax.grad(one)(a, batch), of_a, a)
        update_b, of_b = ADAM.update(jax.grad(other)(b, batch[:32]), of_b, b)
        return ((optax.apply_updates(a, update_a), optax.apply_updates(b, update_b)), (of_a, of_b)), None

    (weights, slots), _ = two_states(ADAM)
    batch = jax.ShapeDtypeStruct((256, 16), "float64")
    options = {**OPTIONS, "search": "captured", "budget": 0, "pipelines": False, "branches": False, "recompute": False}
    leanest = unity.optimize(one, weights[0], batch, objective="memory", **options).memory
    step = unity.step(train_step, offload=True, memory_limit=0.97 * leanest, **options)
    _, (of_a, of_b) = step.shardings((weights, slots), batch)[0]
    assert [{s.memory_kind for s in (of[0].mu["w"], of[0].nu["w"])} for of in (of_a, of_b)] == [{"pinned_host"}, {"device"}]


def test_a_weight_of_two_losses_has_one_state() -> None:
    state, batch = two_states(ADAM)
    step = unity.step(two_losses(ADAM, share=True), optimizer=ON_HOST, **OPTIONS)
    assert len(barriers_of(step, state, batch)[0]) == 1
    assert_same(after(step, state, batch, 1), after(jax.jit(two_losses(ADAM, share=True)), state, batch, 1))


def test_operands_are_told_by_their_whole_name_inside_of_calls() -> None:
    def fn(x: Any, y: Any, z: Any) -> Any:
        return jax.checkpoint(lambda x, y: checkpoint_name(x, "number 1") * y)(x, y) + checkpoint_name(z, "number 12")

    jaxpr = jax.make_jaxpr(fn)(0.0, 1.0, 2.0).jaxpr
    operands = operands_by_name(jaxpr)
    assert [operands["number 1"], operands["number 12"], operands["number"]] == [jaxpr.invars[:2], jaxpr.invars[2:], []]


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
