"""Modules of Flax NNX change in place in a planned step as in `nnx.jit`, and those of Equinox are returned with what is static."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import unity

OPTIONS: dict[str, Any] = {"machine": unity.Machine.grid(1, 8, "a100"), "objective": "memory", "budget": 0, "progress": False}


class Net(nnx.Module):
    """A model with statistics, random numbers, and a layer that is used twice."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(32, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.tied = self.first

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.tied(self.dropout(nnx.gelu(self.norm(self.first(x)))))


def squares(model: Net, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    predicted = model(x)
    return jnp.mean((predicted - y) ** 2), predicted


def train_step(modules: dict[str, Any], metrics: nnx.MultiMetric, batch: tuple[jax.Array, jax.Array], loss: Any = squares) -> Any:
    model, (x, y) = modules["model"], batch
    (value, predicted), gradient = nnx.value_and_grad(loss, has_aux=True)(model, x, y=y)
    modules["optimizer"].update(model, gradient)
    metrics.update(loss=value, values=predicted.mean())
    return value


def modules() -> tuple[dict[str, Any], nnx.MultiMetric]:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2, eps=1e-3), wrt=nnx.Param)
    return {"model": model, "optimizer": optimizer}, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


def batch() -> tuple[jax.Array, jax.Array]:
    return jax.random.normal(jax.random.key(1), (64, 32)), jnp.ones((64, 32))


def states(*trees: Any) -> Any:
    state = jax.tree.leaves(nnx.state(trees))
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in state]


def test_modules_change_in_place_as_in_their_own_jit() -> None:
    expected, metrics = modules()
    jitted = nnx.jit(train_step)
    losses = [float(jitted(expected, metrics, batch())) for _ in range(4)]
    ours, of_ours = modules()
    step = unity.step(lambda *args: train_step(*args, loss=unity.loss(squares)), donate_argnums=(0, 1), **OPTIONS)
    model, before = ours["model"], jax.tree.leaves(nnx.state(ours))
    np.testing.assert_allclose([float(step(ours, of_ours, batch())) for _ in range(4)], losses, rtol=2e-4)
    assert ours["model"] is model
    assert model.tied is model.first
    assert model.first.kernel[...] is not before[0]
    for one, other in zip(states(ours, of_ours), states(expected, metrics), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-5)
    assert not model.first.kernel[...].sharding.is_fully_replicated


def test_modules_are_placed_in_place_and_batches_are_returned() -> None:
    ours, metrics = modules()
    step = unity.step(lambda *args: train_step(*args, loss=unity.loss(squares)), donate_argnums=(0, 1), **OPTIONS)
    placed, same, (x, y) = step.shard(ours, metrics, batch())
    assert placed["model"] is ours["model"]
    assert same is metrics
    (weights, _, (of_x, of_y)) = step.shardings(ours, metrics, batch())
    assert (x.sharding, y.sharding) == (of_x, of_y)
    assert ours["model"].first.kernel[...].sharding == jax.tree.leaves(weights["model"]["first"]["kernel"])[0]
    step(ours, metrics, (x, y))


def test_static_leaves_of_modules_are_returned() -> None:
    @eqx.filter_value_and_grad(has_aux=True)
    @unity.loss
    def loss(model: Any, state: Any, x: jax.Array) -> Any:
        predicted, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean((predicted - 1) ** 2), state

    def step(model: Any, state: Any, moments: Any, x: jax.Array) -> Any:
        (value, state), gradient = loss(model, state, x)
        updates, moments = optimizer.update(gradient, moments, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, moments, value

    def net() -> Any:
        one, two = jax.random.split(jax.random.key(0))
        layers = [eqx.nn.Linear(32, 64, key=one), eqx.nn.BatchNorm(64, "batch", mode="batch"), eqx.nn.Lambda(jax.nn.relu)]
        return eqx.nn.Sequential([*layers, eqx.nn.Linear(64, 32, key=two)])

    optimizer = optax.adam(1e-2, eps=1e-3)
    model, state = eqx.nn.make_with_state(net)()
    start = (model, state, optimizer.init(eqx.filter(model, eqx.is_inexact_array)))
    x, _ = batch()
    losses = []
    for run in (eqx.filter_jit(step), unity.step(step, **OPTIONS)):
        (model, state, moments), values = start, []
        for _ in range(4):
            model, state, moments, value = run(model, state, moments, x)
            values.append(float(value))
        losses.append(values)
        assert model.layers[2].fn is jax.nn.relu
    np.testing.assert_allclose(*losses, rtol=2e-4)


def switched(model: Any) -> None:
    model.eval()


def counted(model: Any) -> None:
    model.steps = getattr(model, "steps", 0) + 1


def extended(model: Any) -> None:
    model.further = nnx.Variable(jnp.zeros(3))


@pytest.mark.parametrize("change", [switched, counted, extended])
@pytest.mark.parametrize("inside", [True, False])
def test_changes_of_what_is_no_array_in_a_module_are_refused(change: Callable[[Any], None], inside: bool) -> None:
    """`nnx.jit` would return them; a step must not drop them."""

    @unity.loss
    def loss(model: Net, x: jax.Array) -> jax.Array:
        if inside:
            change(model)
        return jnp.mean(model(x) ** 2)

    def step(model: Net, x: jax.Array) -> jax.Array:
        value, _ = nnx.value_and_grad(loss)(model, x)
        if not inside:
            change(model)
        return value

    name = "loss" if inside else "step"
    with pytest.raises(unity.PlanError, match=f"^{name} changes more of a module than its arrays") as caught:
        unity.step(step, **OPTIONS)(Net(nnx.Rngs(0)), batch()[0])
    assert caught.value.link == "training#errors"


def test_variables_that_are_replaced_are_returned() -> None:
    def step(model: Net, x: jax.Array) -> jax.Array:
        value, _ = nnx.value_and_grad(unity.loss(lambda model, x: jnp.mean(model(x) ** 2)))(model, x)
        model.first.kernel = nnx.Param(model.first.kernel[...] + 1)
        return value

    model = Net(nnx.Rngs(0))
    expected = model.first.kernel[...] + 2
    planned = unity.step(step, **OPTIONS)
    for _ in range(2):
        planned(model, batch()[0])
    np.testing.assert_allclose(model.first.kernel[...], expected, rtol=1e-6)


def test_static_numbers_of_other_types_are_not_taken_for_each_other() -> None:
    """`jax.jit` tells 2 from 2.0 among static arguments, whose results have other types."""

    class Scaled(eqx.Module):
        weight: jax.Array
        factor: float

    loss = unity.loss(lambda model, x: jnp.mean((x @ model.weight) ** 2))

    def step(model: Scaled, x: jax.Array, counts: jax.Array) -> Any:
        return eqx.filter_grad(loss)(model, x).weight, counts * model.factor

    planned, counts = unity.step(step, **OPTIONS), jnp.arange(4)
    assert planned(Scaled(jnp.ones((32, 32)), 2), batch()[0], counts)[1].dtype == jnp.int32
    with pytest.raises(unity.PlanError, match="not an array among them differs"):
        planned(Scaled(jnp.ones((32, 32)), 2.0), batch()[0], counts)
