"""A training step on all devices computes what `jax.jit` of it does, reuses donated buffers, and is refused in clear words."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import unity

OPTIONS: dict[str, Any] = {"machine": unity.Machine.grid(1, 8, "a100"), "budget": 0, "progress": False}
LEAN: dict[str, Any] = {**OPTIONS, "objective": "memory"}  # everything is sharded
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))
ALL_REDUCE = re.compile(r"= (\S.*?) all-reduce(?:-start)?\(")


def squares(params: Any, batch: Any) -> jax.Array:
    hidden = jax.nn.gelu(batch["x"] @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


marked = unity.loss(squares)


def initial() -> tuple[Any, Any]:
    """A state of weights, moments and an average; and a batch."""
    one, two, three = jax.random.split(jax.random.key(0), 3)
    params = {"up": jax.random.normal(one, (64, 128)) / 8, "bias": jnp.zeros(128), "down": jax.random.normal(two, (128, 32)) / 11}
    batch = {"x": jax.random.normal(three, (64, 64)), "y": jnp.ones((64, 32))}
    return {"params": params, "moments": OPTIMIZER.init(params), "average": jax.tree.map(jnp.copy, params), "step": 0}, batch


def train_step(state: Any, batch: Any, loss_fn: Callable[..., Any] = marked) -> tuple[Any, Any]:
    loss, gradient = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, moments = OPTIMIZER.update(gradient, state["moments"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    average = optax.incremental_update(params, state["average"], 0.1)
    return {"params": params, "moments": moments, "average": average, "step": state["step"] + 1}, {"loss": loss}


def trained(step: Callable[..., Any], state: Any, *others: Any, steps: int = 5) -> tuple[Any, list[Any]]:
    metrics = []
    for _ in range(steps):
        state, values = step(state, *others)
        metrics.append(jax.device_get(values))
    return jax.device_get(state), metrics


def text_of(step: Any, *args: Any) -> str:
    """The compiled program of a step."""
    return step.lower(*args).compile().as_text()


def assert_same(one: Any, other: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), one, other)


def test_a_step_computes_what_its_jit_does() -> None:
    state, batch = initial()
    expected = trained(jax.jit(train_step), state, batch)
    for options in (OPTIONS, LEAN):
        step = unity.step(train_step, **options)
        assert_same(trained(step, state, batch), expected)
        assert len(step.plans) == 1


def test_donated_buffers_become_the_next_state() -> None:
    state, batch = initial()
    step = unity.step(train_step, donate_argnums=0, **LEAN)
    state, batch = step.shard(state, batch)
    leaves = len(jax.tree.leaves(state))
    for _ in range(2):
        before, (state, _) = state, step(state, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, step.shard(state, batch)[0])
    assert not any(x.is_deleted() for x in jax.tree.leaves(batch))
    aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text_of(step, state, batch).splitlines()[0])
    assert aliases is not None
    assert [int(k) for k in re.findall(r"\((\d+), \{\}", aliases[1])] == list(range(leaves))
    assert all(x.sharding.shard_shape(x.shape) != x.shape for x in jax.tree.leaves(state["params"]))
    statistics = step.lower(state, batch).compile().memory_analysis()
    assert statistics is not None
    assert statistics.alias_size_in_bytes == sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))


def test_an_array_that_is_donated_twice_is_refused_until_it_is_placed() -> None:
    """The devices with copies would otherwise wait for the one that refuses to donate a buffer twice."""
    state, batch = initial()
    expected = trained(jax.jit(train_step), state, batch)
    state["average"] = state["params"]
    step = unity.step(train_step, donate_argnums=0, **OPTIONS)
    message = refused(step, state, batch)
    assert "args[0]['params']['up'] is also args[0]['average']['up']" in message
    placed, batch = step.shard(state, batch)
    assert_same(trained(step, placed, batch), expected)


def test_moments_and_averages_lie_as_their_weights() -> None:
    state, batch = initial()
    shardings, placed = unity.step(train_step, **LEAN).shardings(state, batch)
    adam = shardings["moments"][1][0]
    assert shardings["params"] == adam.mu == adam.nu == shardings["average"]
    assert not any(sharding.is_fully_replicated for sharding in jax.tree.leaves(shardings["params"]))
    assert shardings["step"].is_fully_replicated
    assert not placed["x"].is_fully_replicated


def test_a_state_is_created_where_it_is_needed() -> None:
    shapes, batch = jax.eval_shape(initial)
    step = unity.step(train_step, donate_argnums=0, **LEAN)
    state, batch = jax.jit(initial, out_shardings=step.shardings(shapes, batch))()
    again, _ = step.shard(state, batch)
    assert all(x is y for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True))
    step(state, batch)


def test_a_global_norm_is_one_reduction_of_a_scalar() -> None:
    state, batch = initial()
    clipped, plain = (optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1e-2)), optax.sgd(1e-2))

    def all_reduces(optimizer: Any) -> list[str]:
        def step(params: Any, batch: Any) -> Any:
            gradient = jax.grad(marked)(params, batch=batch)
            updates, _ = optimizer.update(gradient, optimizer.init(params), params)
            return optax.apply_updates(params, updates)

        compiled = unity.step(step, donate_argnums=0, **LEAN)
        assert_same(jax.device_get(compiled(state["params"], batch)), jax.jit(step)(state["params"], batch))
        return ALL_REDUCE.findall(text_of(compiled, state["params"], batch))

    few, more = all_reduces(plain), all_reduces(clipped)
    assert more.count("f32[]") == few.count("f32[]") + 1
    assert len(more) == len(few) + 1


def test_micro_batches_of_a_scan_share_one_plan_however_the_step_is_written() -> None:
    state, batch = initial()
    batches = jax.tree.map(lambda x: x.reshape(4, 16, *x.shape[1:]), batch)

    def scanned(state: Any, batches: Any) -> tuple[Any, Any]:
        zero = jax.tree.map(jnp.zeros_like, state["params"])
        gradient, losses = jax.lax.scan(lambda total, one: _accumulate(state["params"], total, one), zero, batches)
        return _updated(state, gradient), losses

    def unrolled(state: Any, batches: Any) -> tuple[Any, Any]:
        gradient, losses = jax.tree.map(jnp.zeros_like, state["params"]), []
        for k in range(4):
            gradient, loss = _accumulate(state["params"], gradient, jax.tree.map(lambda x, k=k: x[k], batches))
            losses.append(loss)
        return _updated(state, gradient), jnp.stack(losses)

    expected = trained(jax.jit(scanned), state, batches)
    for step in (scanned, unrolled):
        planned = unity.step(step, donate_argnums=0, **LEAN)
        assert_same(trained(planned, jax.tree.map(jnp.copy, state), batches), expected)
        assert len(planned.plans) == 1


def _accumulate(params: Any, total: Any, batch: Any) -> tuple[Any, Any]:
    loss, gradient = jax.value_and_grad(marked)(params, batch)
    return jax.tree.map(jnp.add, total, gradient), loss


def _updated(state: Any, gradient: Any) -> Any:
    updates, moments = OPTIMIZER.update(gradient, state["moments"], state["params"])
    return {**state, "params": optax.apply_updates(state["params"], updates), "moments": moments}


jitted, rematerialized = jax.jit(marked), jax.checkpoint(marked)


def body(params: Any, batch: Any) -> tuple[Any, Any]:
    """The body of a scan, which JAX traces once for all programs."""
    loss, gradient = jax.value_and_grad(marked)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), loss


@pytest.mark.parametrize("wrapped", [marked, jitted, rematerialized, jax.remat(jitted)])
def test_marks_inside_of_other_functions_are_planned(wrapped: Callable[..., Any]) -> None:
    """The functions were traced before without a plan, and JAX keeps their programs."""
    state, batch = initial()

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        loss, gradient = jax.value_and_grad(wrapped)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), loss

    expected = trained(jax.jit(step), state["params"], batch)
    for _ in range(2):
        planned = unity.step(step, **OPTIONS)
        assert_same(trained(planned, state["params"], batch), expected)
        (plan,) = planned.plans
        assert plan.program.family.search.training.backward
    assert_same(trained(jax.jit(step), state["params"], batch), expected)


def test_a_scan_whose_body_was_traced_before_is_planned() -> None:
    state, batch = initial()
    batches = jax.tree.map(lambda x: x.reshape(2, 32, *x.shape[1:]), batch)

    def step(params: Any, batches: Any) -> tuple[Any, Any]:
        return jax.lax.scan(body, params, batches)

    expected = trained(jax.jit(step), state["params"], batches)
    planned = unity.step(step, donate_argnums=0, **LEAN)
    params = jax.tree.map(jnp.copy, state["params"])
    assert_same(trained(planned, params, batches), expected)
    assert "reduce-scatter" in text_of(planned, state["params"], batches)
    assert not any(s.is_fully_replicated for s in jax.tree.leaves(planned.shardings(state["params"], batches)[0]))


def test_constraints_name_the_arguments_of_the_loss_by_their_numbers() -> None:
    state, batch = initial()
    pin = unity.pin("args[0]['up']", PartitionSpec(None, "device"))
    step = unity.step(train_step, constraints=pin, **OPTIONS)
    shardings, _ = step.shardings(state, batch)
    assert step.plans[0].in_specs[0]["up"] == PartitionSpec(None, "device")
    assert shardings["params"]["up"] == step.plans[0].in_shardings[0]["up"]
    assert not shardings["params"]["up"].is_fully_replicated


def test_two_losses_and_two_optimizers_have_a_plan_each() -> None:
    def drawn(generator: Any, z: Any) -> Any:
        return jnp.tanh(z @ generator["up"]) @ generator["down"]

    def judged(critic: Any, x: Any) -> Any:
        return (jax.nn.gelu(x @ critic["up"]) @ critic["down"]).mean()

    @unity.loss
    def generator_loss(generator: Any, critic: Any, z: Any) -> Any:
        return -judged(critic, drawn(generator, z))

    @unity.loss
    def critic_loss(critic: Any, generator: Any, z: Any, x: Any) -> Any:
        return judged(critic, drawn(generator, z)) - judged(critic, x) + 0.1 * judged(critic, x) ** 2

    one, two = optax.adam(1e-3), optax.sgd(1e-2, momentum=0.9)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        g, c, of_g, of_c = state
        lost_c, gradient = jax.value_and_grad(critic_loss)(c, g, batch["z"], batch["x"])
        updates, of_c = two.update(gradient, of_c)
        c = optax.apply_updates(c, updates)
        lost_g, gradient = jax.value_and_grad(generator_loss)(g, c, batch["z"])
        updates, of_g = one.update(gradient, of_g)
        return (optax.apply_updates(g, updates), c, of_g, of_c), (lost_c, lost_g)

    keys = iter(jax.random.split(jax.random.key(0), 6))
    g = {"up": jax.random.normal(next(keys), (32, 128)) / 6, "down": jax.random.normal(next(keys), (128, 64)) / 11}
    c = {"up": jax.random.normal(next(keys), (64, 128)) / 8, "down": jax.random.normal(next(keys), (128, 8)) / 11}
    batch = {"z": jax.random.normal(next(keys), (64, 32)), "x": jax.random.normal(next(keys), (64, 64))}
    state = (g, c, one.init(g), two.init(c))
    expected = trained(jax.jit(step), state, batch)
    planned = unity.step(step, **LEAN)
    assert_same(trained(planned, state, batch), expected)
    assert [plan.__name__ for plan in planned.plans] == ["critic_loss", "generator_loss"]


def test_a_loss_may_close_over_differentiated_and_other_values() -> None:
    state, batch = initial()

    def step(params: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        def outer(params: Any) -> Any:
            scale = jnp.exp(params["bias"]).mean()

            @unity.loss
            def inner(weights: Any) -> Any:
                noise = jax.random.normal(key, batch["x"].shape)
                return scale * squares({**weights, "bias": params["bias"]}, {**batch, "x": batch["x"] + 0.1 * noise})

            return inner({"up": params["up"], "down": params["down"]})

        loss, gradient = jax.value_and_grad(outer)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), loss

    key = jax.random.key(3)
    expected = trained(jax.jit(step), state["params"], batch, key)
    planned = unity.step(step, **OPTIONS)
    assert_same(trained(planned, state["params"], batch, key), expected)
    assert len(planned.plans[0].program.family.captured.differentiated) == 4  # two weights, the bias and the scale


def through_a_step(params: Any, batch: Any) -> Any:
    """The loss after a step of gradient descent, whose gradient has second derivatives."""
    gradient = jax.grad(marked)(params, batch=batch)
    return marked(jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), batch)


def scaled_and_skipped(params: Any, batch: Any) -> Any:
    """A loss in half precision, scaled; a gradient that is not finite is skipped."""
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), (params, batch))
    gradient = jax.grad(lambda params: 1024.0 * marked(params, half[1]))(half[0])
    gradient = jax.tree.map(lambda g: g.astype(jnp.float32) / 1024, gradient)
    finite = jnp.isfinite(optax.tree.norm(gradient))
    return jax.lax.cond(finite, lambda g: g, lambda g: jax.tree.map(jnp.zeros_like, g), gradient)


def in_a_branch(params: Any, batch: Any) -> Any:
    zero = lambda params: jax.tree.map(jnp.zeros_like, params)  # noqa: E731
    return jax.lax.cond(batch["x"].sum() > -1e9, lambda params: jax.grad(marked)(params, batch), zero, params)


def of_each_row(params: Any, batch: Any) -> Any:
    """Gradients of every row, clipped by themselves, as for private training."""
    rows = jax.tree.map(lambda x: x[:, None], batch)
    gradients = jax.vmap(jax.grad(marked), (None, 0))(params, rows)
    return jax.tree.map(lambda g: jnp.clip(g, -0.1, 0.1).mean(0), gradients)


@pytest.mark.parametrize(
    ("gradient", "tolerance"),
    [(jax.grad(through_a_step), 2e-4), (scaled_and_skipped, 2e-2), (in_a_branch, 2e-4), (of_each_row, 2e-4)],
)
def test_gradients_may_be_of_any_kind(gradient: Callable[..., Any], tolerance: float) -> None:
    state, batch = initial()

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        slope = gradient(params, batch)
        return slope, jax.tree.map(lambda p, g: p - 0.1 * g, params, slope)

    planned = unity.step(step, donate_argnums=0, **OPTIONS)
    params, expected = jax.tree.map(jnp.copy, state["params"]), state["params"]
    for _ in range(3):
        slope, params = planned(params, batch=batch)
        other, expected = jax.jit(step)(expected, batch)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance / 10), slope, other)


def test_the_plan_is_that_of_the_loss() -> None:
    state, batch = initial()
    planned = unity.step(train_step, **LEAN)
    shardings, _ = planned.shardings(state, batch)
    slots = planned.plans[0].program.family.search.training.state.slots
    alone = unity.optimize(squares, state["params"], batch, optimizer_slots=slots, **LEAN)
    assert slots == pytest.approx(3, abs=0.01)  # two moments and the average
    assert (planned.plans[0].time, planned.plans[0].memory) == (alone.time, alone.memory)
    assert shardings["params"] == alone.in_shardings[0]


def test_state_counts_with_the_weights_of_its_shape() -> None:
    """Of a state with one value for each matrix and three for each vector, and of a buffer with another shape."""
    state, batch = initial()
    params = state["params"]
    vectors = {name: w for name, w in params.items() if w.ndim == 1}
    moments = {"all": params, "vectors": [vectors, vectors], "count": jnp.zeros(())}

    def step(params: Any, moments: Any, batch: Any) -> Any:
        gradient = jax.grad(marked)(params, batch)
        return jax.tree.map(lambda p, g, m: p - 0.1 * g - m, params, gradient, moments["all"]), moments

    planned = unity.step(step, **OPTIONS)
    planned.shardings(params, moments, batch)
    family = planned.plans[0].program.family
    slots = {node.tensors[0].shape: family.search.training.state.of(node) for node in family.captured.graph.inputs}
    assert {slots[w.shape] for w in params.values() if w.ndim == 2} == {1}
    assert {slots[w.shape] for w in vectors.values()} == {3}
    described = unity.step(step, optimizer=unity.OptimizerState(5), **OPTIONS)
    described.shardings(params, moments, batch)
    assert described.plans[0].program.family.search.training.state.slots == 5


def test_frozen_weights_have_neither_gradients_nor_slots() -> None:
    state, batch = initial()
    frozen = {"up": state["params"]["up"], "down": state["params"]["down"]}

    def step(bias: Any, moments: Any, batch: Any) -> Any:
        gradient = jax.grad(lambda bias: marked({**frozen, "bias": bias}, batch))(bias)
        updates, moments = OPTIMIZER.update(gradient, moments, bias)
        return optax.apply_updates(bias, updates), moments

    bias = state["params"]["bias"]
    planned = unity.step(step, **OPTIONS)
    planned(bias, OPTIMIZER.init(bias), batch)
    (plan,) = planned.plans
    assert len(plan.program.family.captured.differentiated) == 1
    assert plan.program.family.search.training.state.slots == pytest.approx(2, abs=0.02)


def test_other_weak_types_are_compiled_again_with_the_same_plan() -> None:
    state, batch = initial()
    step = unity.step(train_step, **OPTIONS)
    after, _ = step(state, batch)
    restored, _ = step({**state, "step": jnp.int32(0)}, batch)
    assert_same(restored, after)
    assert len(step.plans) == 1


def test_a_step_follows_the_settings_of_jax() -> None:
    """As `jax.jit`, which traces again under another precision of products."""
    state, batch = initial()
    step = unity.step(train_step, **OPTIONS)
    assert "HIGHEST" not in step.lower(state, batch).as_text()
    with jax.default_matmul_precision("float32"):
        assert "HIGHEST" in step.lower(state, batch).as_text()
    assert "HIGHEST" not in step.lower(state, batch).as_text()


@unity.loss
def noisy(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(x @ w + jax.random.normal(key, (64, 128))) ** 2)


@pytest.mark.parametrize(("name", "other"), [("jax_threefry_partitionable", False), ("jax_random_seed_offset", 5)])
def test_random_numbers_follow_the_settings_of_jax(name: str, other: Any) -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        key = jax.random.key(3)
        return jax.value_and_grad(noisy)(w, x, key), jax.random.normal(key, (4,))

    args = initial()[0]["params"]["up"], jnp.ones((64, 64))
    planned, jitted = unity.step(step, search="data-parallel", **OPTIONS), jax.jit(step)
    usual = getattr(jax.config, name)
    drawn = []
    try:
        for value in (usual, other, usual):
            jax.config.update(name, value)
            jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), planned(*args), jitted(*args))
            drawn.append(jitted(*args)[1])
    finally:
        jax.config.update(name, usual)
    assert not np.allclose(drawn[0], drawn[1])


def refused(step: Any, *args: Any) -> str:
    with pytest.raises(unity.PlanError) as caught:
        step(*args)
    assert caught.value.link == "training#errors"
    return str(caught.value)


def test_a_step_without_a_marked_gradient_is_refused() -> None:
    state, batch = initial()
    unmarked = unity.step(lambda state, batch: train_step(state, batch, squares), **OPTIONS)
    assert "calls no function that is marked by unity.loss" in refused(unmarked, state, batch)
    evaluated = unity.step(lambda state, batch: marked(state["params"], batch), **OPTIONS)
    assert "it only calls squares" in refused(evaluated, state, batch)


def test_arguments_of_other_shapes_or_structures_are_refused() -> None:
    state, batch = initial()
    step = unity.step(train_step, **OPTIONS)
    step(state, batch)
    last = jax.tree.map(lambda x: x[:24], batch)
    assert "args[1]['x']: planned for float32[64, 64], called with float32[24, 64]" in refused(step, state, last)
    assert "args[1]['z'] is not known" in refused(step, state, {**batch, "z": batch["x"]})
    assert "args[0]['step'] is missing" in refused(step, {k: v for k, v in state.items() if k != "step"}, batch)
    step(state, batch)


def test_a_step_in_64_bits_is_refused_where_these_are_not_enabled() -> None:
    @unity.loss
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    step = unity.step(lambda w, x: w - 0.1 * jax.grad(loss)(w, x), **LEAN)
    with jax.enable_x64(True):
        args = jnp.ones((8, 8)), jnp.ones((16, 8))
        assert step(*args).dtype == jnp.float64
    with jax.enable_x64(False):
        assert "was planned with 64-bit types" in refused(step, *args)


def test_arrays_that_are_committed_elsewhere_are_refused_until_they_are_placed() -> None:
    state, batch = initial()
    step = unity.step(train_step, **LEAN)
    elsewhere = jax.device_put(state, jax.devices()[1])
    message = refused(step, elsewhere, batch)
    assert "args[0]['average']['bias']" in message
    assert ".shard(" in message
    step(*step.shard(elsewhere, batch))
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(None, "d")))
    refused(step, state, rows)


def test_unknown_options_are_refused_by_name() -> None:
    with pytest.raises(unity.OptionError, match="no option argnums, memory"):
        unity.step(train_step, memory=3, argnums=0)


def test_a_mesh_with_explicit_axes_is_refused() -> None:
    state, batch = initial()
    with jax.set_mesh(jax.make_mesh((8,), ("d",))), pytest.raises(unity.PlanError, match="explicit axes"):
        unity.step(train_step, **OPTIONS)(state, batch)


def mesh_of(devices: int, kind: AxisType) -> Mesh:
    return Mesh(np.array(jax.devices()[:devices]).reshape(2, -1), ("data", "tensor"), axis_types=(kind,) * 2)


@pytest.mark.parametrize("devices", [8, 4])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_planned_step_runs_under_any_mesh(devices: int, kind: AxisType) -> None:
    state, batch = initial()
    expected = trained(jax.jit(train_step), state, batch, steps=2)
    step = unity.step(train_step, **LEAN)
    step.shardings(state, batch)
    with jax.set_mesh(mesh_of(devices, kind)):
        assert step.lower(state, batch).compile()
        assert_same(trained(step, *step.shard(state, batch), steps=2), expected)


def test_a_step_is_planned_under_a_mesh_with_automatic_axes() -> None:
    state, batch = initial()
    with jax.set_mesh(mesh_of(8, AxisType.Auto)):
        planned = trained(unity.step(train_step, **LEAN), state, batch, steps=2)
    assert_same(planned, trained(jax.jit(train_step), state, batch, steps=2))


def test_a_step_for_a_mesh_with_explicit_axes_takes_its_arrays() -> None:
    state, batch = initial()
    mesh = mesh_of(8, AxisType.Explicit)
    step = unity.step(train_step, mesh=mesh, **LEAN)
    shardings = step.shardings(state, batch)
    placed = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s.spec)), (state, batch), shardings)
    after, metrics = step(*placed)
    assert_same((after, metrics), jax.jit(train_step)(state, batch))
    weight = after["params"]["up"]
    assert list(weight.sharding.mesh.devices.flat) == list(mesh.devices.flat)
    assert weight.sharding.mesh.axis_names == mesh.axis_names
    assert not weight.sharding.is_fully_replicated


def test_a_loss_inside_of_a_shard_map_is_refused() -> None:
    state, batch = initial()
    mesh = mesh_of(8, AxisType.Auto)

    def step(params: Any, batch: Any) -> Any:
        whole, rows = PartitionSpec(), PartitionSpec(("data", "tensor"))
        return jax.shard_map(jax.grad(marked), mesh=mesh, in_specs=(whole, rows), out_specs=whole)(params, batch)

    with pytest.raises(unity.PlanError, match=r"inside of a jax.shard_map .*\(along data, tensor\)") as caught:
        unity.step(step, **OPTIONS)(state["params"], batch)
    assert caught.value.link == "capture#devices-and-kernels"


def test_a_marked_function_is_itself_outside_of_a_step() -> None:
    state, batch = initial()
    assert jnp.array_equal(marked(state["params"], batch), squares(state["params"], batch))
    assert marked.__name__ == "squares"


def test_a_state_may_be_returned_in_another_structure() -> None:
    """What is returned beside it, such as gradients of its structure, does not take its place."""
    state, batch = initial()

    def step(params: Any, moments: Any, batch: Any) -> Any:
        gradient = jax.grad(marked)(params, batch)
        updates, moments = OPTIMIZER.update(gradient, moments, params)
        after: Any = optax.apply_updates(params, updates)
        return {"gradient": gradient, "state": [after["up"], moments], "rest": params}

    params, moments = state["params"], state["moments"]
    planned = unity.step(step, donate_argnums=1, **LEAN)
    for _ in range(3):
        values = planned(params, moments, batch)
        up, moments = values["state"]
        params = {**values["rest"], "up": up}
        assert values["gradient"]["up"].sharding == up.sharding == planned.shardings(params, moments, batch)[0]["up"]


def test_the_attributes_of_a_callable_object_stay_its_own() -> None:
    class Step:
        """A step that is an object."""

        def __init__(self) -> None:
            self.fn, self._plans, self._compiled = None, None, None

        def __call__(self, params: Any, batch: Any) -> Any:
            return jax.value_and_grad(marked)(params, batch)

    state, batch = initial()
    loss, _ = unity.step(Step(), **OPTIONS)(state["params"], batch)
    np.testing.assert_allclose(loss, squares(state["params"], batch), rtol=1e-5)


def test_steps_may_be_scanned_over_once_they_are_planned() -> None:
    state, batch = initial()
    batches = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x]), batch)
    expected, losses = jax.lax.scan(train_step, state, batches)
    step = unity.step(train_step, donate_argnums=0, **LEAN)
    assert "while another function is traced" in refused(lambda: jax.lax.scan(step, state, batches))
    step.shardings(*jax.eval_shape(initial))
    assert_same(jax.lax.scan(step, state, batches), (expected, losses))


def test_a_state_comes_back_where_it_was_whatever_it_is_computed_of() -> None:
    state, batch = initial()

    def step(state: Any, batch: Any) -> Any:
        gradient = jax.grad(marked)(state["params"], batch)
        return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradient), "last": 2 * batch["x"]}

    values = {"params": state["params"], "last": jnp.zeros_like(batch["x"])}
    planned = unity.step(step, donate_argnums=0, **LEAN)
    first, _ = planned.shardings(values, batch)
    for _ in range(2):
        values = planned(values, batch)
        assert jax.tree.map(lambda x: x.sharding, values) == first
    assert jnp.array_equal(values["last"], 2 * batch["x"])


@pytest.mark.parametrize("number", [2, -3, "0", "state", 0.0, (0, 2)])
def test_arguments_that_a_step_does_not_have_cannot_be_donated(number: Any) -> None:
    with pytest.raises(unity.OptionError, match=r"expected numbers of arguments .* of body, which takes 2 arguments"):
        unity.step(body, donate_argnums=number)


def test_donated_arguments_are_numbered_as_in_jit() -> None:
    state, batch = initial()
    for numbers, donated in ((-2, True), ([0], True), (None, False), ((), False)):
        step = unity.step(body, donate_argnums=numbers, **LEAN)
        params, placed = step.shard(jax.tree.map(jnp.copy, state["params"]), batch)
        step(params, placed)
        assert all(x.is_deleted() == donated for x in jax.tree.leaves(params))


def scaled_step(state: Any, scale: Any = 1.0, shift: Any = 0.0, *, batch: Any, rate: Any, note: str = "") -> Any:
    gradient = jax.grad(marked)(state, batch)
    return jax.tree.map(lambda w, g: scale * (w - rate * g) + shift, state, gradient)


def test_a_dict_by_position_is_not_taken_for_arguments_by_name() -> None:
    def either(state: Any, batch: Any, options: Any = None, *, rate: Any = 0.5) -> Any:
        rate = rate if options is None else 10 * options["rate"]
        return jax.tree.map(lambda w, g: w - rate * g, state, jax.grad(marked)(state, batch))

    state, batch = initial()[0]["params"], initial()[1]
    step = unity.step(either, **OPTIONS)
    assert_same(step(state, batch, {"rate": 0.1}), jax.jit(either)(state, batch, {"rate": 0.1}))
    assert_same(step(state, batch, rate=0.1), jax.jit(either)(state, batch, rate=0.1))


def test_arguments_may_be_taken_by_name_alone() -> None:
    state, batch = initial()[0]["params"], initial()[1]
    for named in ({"rate": 0.5}, {"rate": jnp.float32(0.5), "shift": 1.0, "note": "static"}):
        expected = jax.jit(scaled_step, static_argnames="note")(state, batch=batch, **named)
        step = unity.step(scaled_step, donate_argnums=(0, 2), **OPTIONS)
        placed, keywords = step.shard(jax.tree.map(jnp.copy, state), batch=batch, **named)
        assert keywords.keys() == {"batch", *named}
        assert jax.tree.structure(step.shardings(state, batch=batch, **named)) == jax.tree.structure((state, keywords))
        assert_same(step(placed, **dict(reversed(keywords.items()))), expected)
        assert all(x.is_deleted() for x in jax.tree.leaves(placed))
        assert not any(x.is_deleted() for x in jax.tree.leaves(keywords["batch"]))
        assert_same(step(jax.tree.map(jnp.copy, state), **keywords), expected)
        with pytest.raises(unity.PlanError, match=r"scaled_step cannot be called with rates: "):
            step(state, rates=0.5)


def test_only_functions_are_planned() -> None:
    state, _ = initial()
    for wrap in (unity.step, unity.loss, unity.optimize):
        with pytest.raises(unity.OptionError, match=r"(?s)expected a function .*, got dict"):
            wrap(state)


def test_a_static_argument_that_cannot_be_compared_is_refused() -> None:
    state, batch = initial()
    step = unity.step(lambda params, batch, names: body(params, batch), **OPTIONS)
    assert "unhashable type: 'set'" in refused(step, state["params"], batch, {"up", "down"})
    step(state["params"], batch, "up")


def test_a_step_may_be_a_method() -> None:
    class Trainer:
        """An object without arrays, which is a static argument."""

        rate = 0.1

        @partial(unity.step, donate_argnums=1, **OPTIONS)
        def step(self, params: Any, batch: Any) -> Any:
            gradient = jax.grad(self.loss)(params, batch)
            return jax.tree.map(lambda p, g: p - self.rate * g, params, gradient)

        @unity.loss
        def loss(self, params: Any, batch: Any) -> Any:
            return squares(params, batch)

    state, batch = initial()
    expected, _ = body(state["params"], batch)
    assert_same(Trainer().step(state["params"], batch), expected)
    assert isinstance(Trainer.step, unity.TrainingStep)
