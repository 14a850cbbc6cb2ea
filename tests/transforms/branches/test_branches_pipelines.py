"""Branches on devices of their own and a pipeline in one plan: what each of them is alone, they are together."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from ci_cases import BY_HAND, by_hand
from jax import lax
from stepped import stepped

import unity
from benchmarks.forked_layers import batch, loss, losses, planned, weights
from unity.base.errors import DerivationError, InfeasibleError
from unity.pcg.ir.graph import BRANCHES, PIPELINE
from unity.transforms.branches import Branching
from unity.transforms.pipelining import Pipelining

TREE = unity.Machine.grid(2, 4)
OPTIMIZER = optax.adamw(0.02)

pytestmark = pytest.mark.usefixtures("own_cache")


def both_of(plan: unity.Plan) -> tuple[Branching, Pipelining]:
    assert plan.program.branching is not None
    assert plan.program.pipelining is not None
    return plan.program.branching, plan.program.pipelining


def close(found: Any, wanted: Any, most: float) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        assert np.abs(np.asarray(a) - np.asarray(b)).max() <= most * max(1e-3, float(np.abs(np.asarray(b)).max()))


@pytest.mark.parametrize(("schedule", "pack"), [("1f1b", True), *by_hand(("gpipe", False))])
def test_both_compute_the_same_and_send_what_was_predicted(schedule: str, pack: bool) -> None:
    with jax.enable_x64(True):
        args = weights(np.float64), batch(dtype=np.float64)
        plan = planned(TREE, np.float64, pipeline=unity.PipelineShape(2, 4, schedule), pack=pack)
        kinds = [n.kind for n in plan.program.pcg.nodes]
        assert (kinds.count(BRANCHES), kinds.count(PIPELINE)) == (1, 1)
        branching, pipelining = both_of(plan)
        assert bool(branching.packing) == pack
        assert pipelining.schedule.kind == schedule
        step, found = stepped(plan, *args)
        close(step, jax.jit(jax.value_and_grad(loss))(*args), 1e-10)
        assert not found.deviations, str(found)


@BY_HAND
def test_fifty_steps_have_the_losses_of_one_device() -> None:
    plan = planned(TREE, pack=True)
    params = plan.shard(weights())
    found, after = losses(plan, params, lambda b: plan.shard(params, b)[1], 50)
    wanted, alone = losses(loss, weights(), lambda b: b, 50)
    np.testing.assert_allclose(found, wanted, rtol=2e-5)
    assert wanted[-1] < 0.7 * wanted[0]
    close(plan.shard.unpack(after), alone, 1e-4)


def test_what_was_found_is_said_saved_and_made_again(tmp_path: Path) -> None:
    plan = planned(TREE, pack=True)
    text = io.StringIO()
    plan.explain(file=text)
    branching, pipelining = both_of(plan)
    assert str(branching) in text.getvalue()
    assert str(pipelining) in text.getvalue()
    plan.program.check_derivation()
    plan.files.save(tmp_path / "plan.json")
    loaded = unity.load(tmp_path / "plan.json", loss, weights(), batch())
    assert loaded.program.pcg.key == plan.program.pcg.key
    assert loaded.program.original.key == plan.program.original.key
    assert loaded.program.packing == plan.program.packing
    close(jax.jit(loaded)(*loaded.shard(weights(), batch())), loss(weights(), batch()), 2e-5)
    assert plan.inspect.simulate().makespan > 0
    assert plan.inspect.memory_timeline().peak > 0
    again = planned(TREE, pack=True)  # from the cache
    assert again.program.pcg.key == plan.program.pcg.key
    other = planned(TREE, pipelines=False, pack=True).program.branching
    assert other is not None
    with pytest.raises(DerivationError, match="leads to another program"):
        replace(branching, program=other.program).check()


def test_both_are_found_where_both_gain() -> None:
    """Two devices and a slow link: weights are so large that only samples, and what towers make, had better cross it."""

    def fn(params: Any, x: Any, y: Any) -> Any:
        u, v = x, y
        for a, b in zip(params["a"], params["b"], strict=True):
            u, v = jnp.tanh(u @ a), jnp.tanh(v @ b)
        found = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), u + v, params["layers"])[0]
        return (found**2).mean()

    width = 8192
    params = {"a": [array(width, width)] * 4, "b": [array(width, width)] * 4, "layers": array(16, width, width)}
    machine = unity.Machine.grid(2, 1, "a100", inter=(2e10, 1e-6))
    args = params, array(512, width), array(512, width)
    options: dict[str, Any] = {"machine": machine, "search": "captured", "pack": True, "progress": False}
    plans = {
        name: unity.optimize(fn, *args, **options, **ways)
        for name, ways in {
            "both": {}, "pipeline": {"branches": False}, "branches": {"pipelines": False},
            "neither": {"branches": False, "pipelines": False},
        }.items()
    }  # fmt: skip
    both = plans["both"]
    assert both.program.pipelining is not None
    assert both.program.branching is not None
    assert both.time < 0.95 * min(plan.time for name, plan in plans.items() if name != "both")


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_layers_inside_of_branches_stay_one_pipeline_or_branches() -> None:
    """What is walked in micro-batches is in no branch: branches that are asked for are found without the pipeline."""

    def fn(params: Any, x: Any) -> Any:
        u = lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, params["a"])[0]
        v = lax.scan(lambda c, w: (jnp.sin(c @ w), None), x, params["b"])[0]
        return ((u * v) ** 2).mean()

    args = {"a": array(4, 16, 16), "b": array(4, 16, 16)}, array(32, 16)
    options: dict[str, Any] = {"machine": TREE, "search": "captured", "progress": False}
    plan = unity.optimize(fn, *args, branch_groups=2, **options)
    assert plan.program.branching is not None
    assert plan.program.pipelining is None
    with pytest.raises(InfeasibleError, match="no branches"):
        unity.optimize(fn, *args, branch_groups=2, pipeline=unity.PipelineShape(2, 4), **options)


def test_a_training_goes_on_without_either_and_back(tmp_path: Path) -> None:
    plans = {"with": planned(TREE, pack=True), "without": planned(TREE, branches=False, pipelines=False)}
    assert both_of(plans["with"])[0].packing

    def step_of(plan: Callable[..., Any]) -> Any:
        @jax.jit
        def step(params: Any, moments: Any, x: Any) -> Any:
            value, gradient = jax.value_and_grad(plan)(params, x)
            updates, moments = OPTIMIZER.update(gradient, moments, params)
            return optax.apply_updates(params, updates), moments, value

        return step

    steps = {name: step_of(plan) for name, plan in plans.items()}
    state = weights(), OPTIMIZER.init(weights())
    alone, step = state, step_of(loss)
    for k, name in enumerate(("with", "without", "with")):
        plan = plans[name]
        params, moments = (plan.shard.state(tree) for tree in state)
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, plan.shard(weights()))
        shapes = jax.eval_shape(OPTIMIZER.init, params)
        for x, s in zip(jax.tree.leaves(moments), jax.tree.leaves(plan.shard.shardings(shapes)), strict=True):
            assert x.sharding.is_equivalent_to(s, x.ndim)
        params, moments, value = steps[name](params, moments, plan.shard(params, batch(k))[1])
        state = plan.shard.unpack(params), plan.shard.unpack(moments)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / str(k), state)
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(tmp_path / str(k), jax.eval_shape(lambda: (weights(), OPTIMIZER.init(weights()))))
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), found, state)
        state = found
        *alone, wanted = step(*alone, batch(k))
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    close(state[0], alone[0], 1e-4)
