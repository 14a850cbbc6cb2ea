"""Mistakes that newcomers make: a step in the place of its loss, another mesh, a misspelled option, a limit that is too small."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import unity
from unity.planning.infeasible import no_pipeline

MACHINE = unity.Machine.grid(1, 8, "a100")
ARRAY = jax.ShapeDtypeStruct((64, 64), "float32")
ARGS = {"up": ARRAY, "down": ARRAY}, ARRAY


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ params["up"]) @ params["down"])


def train_step(params: Any, x: Any) -> Any:
    return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x)), loss(params, x)


def momentum_step(params: Any, velocity: Any, x: Any) -> Any:
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, jax.grad(loss)(params, x))
    return jax.tree.map(jnp.subtract, params, velocity), velocity, loss(params, x)


def plan(fn: Callable[..., Any] = loss, **options: Any) -> unity.Plan:
    return unity.optimize(fn, *ARGS, machine=MACHINE, progress=False, search="captured", **options)


@pytest.mark.parametrize("fn", [train_step, jax.grad(loss), jax.value_and_grad(loss)])
def test_a_step_or_gradient_in_the_place_of_its_loss_is_said(fn: Callable[..., Any]) -> None:
    with pytest.warns(UserWarning, match="unity.step") as caught:
        plan(fn)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(fn, training=False)
        plan(loss)


def test_a_step_with_state_like_its_weights_is_said() -> None:
    with pytest.warns(UserWarning, match="unity.step"):
        unity.optimize(momentum_step, ARGS[0], *ARGS, machine=MACHINE, progress=False, search="captured")


def test_a_loss_that_returns_the_average_of_its_weights_is_no_mistake() -> None:
    def distilled(params: Any, teacher: Any, x: Any) -> Any:
        following = jax.tree.map(lambda t, w: 0.99 * t + 0.01 * jax.lax.stop_gradient(w), teacher, params)
        return (loss(params, x) - loss(jax.lax.stop_gradient(teacher), x)) ** 2, following

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unity.optimize(distilled, ARGS[0], *ARGS, machine=MACHINE, progress=False, search="captured")


def test_a_mesh_of_other_axes_and_too_few_devices_are_refused() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    planned = plan(mesh=mesh)
    assert planned.on(mesh).inspect.mesh == mesh
    for shape, names in [((4, 2), ("tensor", "data")), ((4, 2), ("data", "tensor")), ((8,), ("data",))]:
        with pytest.raises(unity.PlanError, match=r"this plan is for the mesh \{'data': 2, 'tensor': 4\}"):
            planned.on(jax.make_mesh(shape, names))
    with pytest.raises(unity.PlanError, match=r"8 devices .* but 4 are given"):
        planned.on(jax.devices()[:4])
    first = jax.devices()[0]
    with pytest.raises(unity.PlanError, match=rf"`devices` names {re.escape(str(first))} twice"):
        planned.on([first] * 8)
    twice_beyond = [*jax.devices()[:8], first]
    assert planned.on(twice_beyond).inspect.mesh.size == 8


def test_a_misspelled_option_is_recognized() -> None:
    with pytest.raises(unity.OptionError, match="did you mean memory_limit"):
        plan(memory_limt=1e9)
    with pytest.raises(unity.OptionError, match="did you mean donate_argnums"):
        unity.step(train_step, donate_argnum=0)


def test_a_kind_of_device_in_the_place_of_a_cluster_is_recognized() -> None:
    with pytest.raises(unity.MachineError, match=r"unity.Machine.grid\(4, 8, 'h100'\) is a machine of these"):
        unity.Machine.preset("h100-4x8")


def test_rules_of_an_argument_that_is_not_there_are_refused() -> None:
    for argument in ("params", 2, -1):
        with pytest.raises(unity.PlanError, match="a number from 0 to 1"):
            plan().inspect.spec_rules(argument)  # pyright: ignore[reportArgumentType]


def test_the_leanest_plan_that_a_refusal_names_exists() -> None:
    """It is a pipeline here, which needs less memory than every sharding of the program."""

    def deep(params: Any, x: Any) -> Any:
        for layer in params:
            x = x + jnp.tanh(x @ layer["up"]) @ layer["down"]
        return jnp.mean(x**2)

    wide = {"up": jax.ShapeDtypeStruct((256, 512), "float32"), "down": jax.ShapeDtypeStruct((512, 256), "float32")}
    args = [wide] * 4, jax.ShapeDtypeStruct((4096, 256), "float32")
    options: dict[str, Any] = {
        "machine": unity.Machine.grid(1, 4, "a100"),
        "progress": False,
        "search": "captured",
        "recompute": False,
    }
    with pytest.raises(unity.InfeasibleError, match="the leanest plan that was tried, a pipeline, needs") as refusal:
        unity.optimize(deep, *args, memory_limit=11e6, **options)
    named = re.search(r"memory_limit=(\d+)\)", str(refusal.value))
    assert named is not None
    leanest = unity.optimize(deep, *args, memory_limit=int(named[1]), **options)
    assert 11e6 < leanest.memory <= int(named[1])
    assert "stages" in str(leanest.program.transformations[0])


def test_no_pipeline_is_called_the_leanest_plan_where_another_plan_needs_less() -> None:
    def deep(p: Any, x: Any, y: Any) -> Any:
        for w in p["layers"]:
            x = x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]
        return jnp.mean((x @ p["out"] - y) ** 2)

    f = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")  # noqa: E731
    layers = [{"up": f(16, 64), "bias": f(64), "down": f(64, 16)} for _ in range(2)]
    args = {"layers": layers, "out": f(16, 8)}, f(32, 16), f(32, 8)
    options: dict[str, Any] = {"machine": unity.Machine.grid(1, 8, "a100"), "progress": False, "recompute": False}
    leanest = unity.optimize(deep, *args, objective="memory", **options)
    for limit in (8e3, 10e3, 11e3, 13e3):
        with pytest.raises(unity.InfeasibleError) as refusal:
            unity.optimize(deep, *args, memory_limit=limit, **options)
        named = re.search(r"memory_limit=(\d+)", str(refusal.value))
        assert named is not None
        assert limit < int(named[1]) <= leanest.memory + 1
        assert "at most 1/1 " not in str(refusal.value)


def test_a_reason_against_a_pipeline_is_stated_once() -> None:
    machine, shape = unity.Machine.grid(1, 4, "a100"), unity.PipelineShape(4, 4)
    message = no_pipeline(machine, shape, ["4 stages cannot share 2 steps"] * 6 + ["a loop"], "1 GB")
    assert message.count("cannot share") == message.count("a loop") == 1


def scanned_layers(weights: Any, x: Any, y: Any) -> Any:
    h, _ = jax.lax.scan(lambda h, p: (h + jax.nn.gelu(h @ p[0]) @ p[1], None), x, weights)
    return jnp.mean((h - y) ** 2)


@pytest.mark.parametrize("further", [{}, {"micro_batches": 3}], ids=str)
def test_a_refusal_names_no_more_memory_than_plans_need_and_a_limit_that_has_one(further: dict[str, Any]) -> None:
    def refused(limit: float) -> str:
        with pytest.raises(unity.InfeasibleError) as caught:
            unity.optimize(scanned_layers, *args, memory_limit=limit, **options)
        return str(caught.value)

    f = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")  # noqa: E731
    args = (f(6, 24, 24), f(6, 24, 24)), f(60, 6, 24), f(60, 6, 24)
    options: dict[str, Any] = {"machine": unity.Machine.grid(1, 12, "a100"), "progress": False, "search": "captured"}
    options |= {"pipelines": False, **further}
    needed = re.search(r"the leanest plan needs .*\n.*memory_limit=(\d+)\)", refused(40e3 if further else 50e3))
    assert needed is not None
    leanest = unity.optimize(scanned_layers, *args, memory_limit=int(needed[1]), **options)
    assert leanest.memory <= int(needed[1])
    roomier = unity.optimize(scanned_layers, *args, memory_limit=45e3 if further else 57e3, **options)
    assert int(needed[1]) <= roomier.memory + 1
    bound = re.search(r"needs at least .*\n.*memory_limit=(\d+) at least", refused(1e3))
    assert bound is not None
    assert int(bound[1]) <= leanest.memory
