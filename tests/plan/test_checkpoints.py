"""What was saved under one plan is restored under another, bit by bit; and where an optimizer's state lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_cases import OPTIMIZER, batch, planned, restored, saved, started, step_of, weights
from ci_cases import by_hand

import unity
from benchmarks.processes import ended, start

WORKER = Path(__file__).parents[1] / "support" / "checkpoint_worker.py"
SECONDS = 500  # until processes are given up

pytestmark = pytest.mark.usefixtures("own_cache")


def trained(plan: unity.Plan, steps: int) -> Any:
    state, step = started(plan), step_of(plan)
    for k in range(steps):
        state, _ = step(state, plan.shard(state[0], batch(k))[1])
    return state


def equal(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), one, other)


@pytest.mark.parametrize(
    "other",
    [
        {"nodes": 1, "devices": 8, "lean": True},
        {"nodes": 2, "devices": 2},
        *by_hand({"nodes": 1, "devices": 1}, {"nodes": 1, "devices": 6, "search": "captured"}),
    ],
    ids=str,
)
def test_state_is_restored_under_another_plan(tmp_path: Path, other: dict[str, Any]) -> None:
    plan, then = planned(1, 8), planned(**other)
    state = trained(plan, 2)
    saved(state, tmp_path / "state")
    found = restored(then, tmp_path / "state")
    equal(found, state)
    for x, sharding in zip(jax.tree.leaves(found), jax.tree.leaves(then.shard.shardings(found)), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    _, value = step_of(then)(found, then.shard(found[0], batch(2))[1])
    _, wanted = step_of(plan)(state, plan.shard(state[0], batch(2))[1])
    np.testing.assert_allclose(value, wanted, rtol=1e-6)


def test_the_plans_differ() -> None:
    """Otherwise the others show nothing."""
    one, lean, captured = planned(1, 8), planned(1, 8, lean=True), planned(1, 6, search="captured")
    specs = [[str(s.spec) for s in jax.tree.leaves(p.in_shardings)] for p in (one, lean)]
    assert specs[0] != specs[1]
    assert one.program.rewriting
    assert not captured.program.rewriting


def test_two_processes_go_on_where_one_stopped_and_back(tmp_path: Path) -> None:
    plan = planned(1, 8)
    state = trained(plan, 2)
    saved(state, tmp_path / "one")
    command = [str(WORKER), str(tmp_path / "one"), str(tmp_path / "two")]
    found = ended(start(command, (2, 2), tmp_path), SECONDS)
    assert all(one.code == 0 for one in found), "\n\n".join(one.err[-4000:] for one in found)
    state, wanted = step_of(plan)(state, plan.shard(state[0], batch(2))[1])
    for one in found:
        np.testing.assert_allclose(float(one.out.splitlines()[-1]), wanted, rtol=1e-6)
    after = restored(plan, tmp_path / "two")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), after, state)


def specs(tree: Any) -> Any:
    return jax.tree.map(lambda s: s.spec, tree)


def test_moments_lie_as_their_weights() -> None:
    plan = planned(1, 8, lean=True)
    params, none = plan.in_shardings[0], jax.sharding.PartitionSpec()
    assert any(any(s.spec) for s in jax.tree.leaves(params))
    adam = plan.shard.shardings(jax.eval_shape(OPTIMIZER.init, weights()))[1][0]
    assert specs(adam.mu) == specs(adam.nu) == specs(params)
    assert adam.count.spec == none
    assert specs(plan.shard.shardings(weights())) == specs(params)


def test_states_for_some_of_the_weights_follow_them() -> None:
    plan = planned(1, 8, lean=True)
    params, none = plan.in_shardings[0], jax.sharding.PartitionSpec()
    kinds = {"up": "slow", "left": "fast", "right": "fast"}
    optimizer = optax.multi_transform({"slow": optax.adam(1e-3), "fast": optax.sgd(0.1, momentum=0.9)}, kinds)
    found = plan.shard.shardings(jax.eval_shape(optimizer.init, weights())).inner_states
    assert specs(found["slow"].inner_state[0].mu["up"]) == specs(params["up"])
    assert specs(found["fast"].inner_state[0].trace["left"]) == specs(params["left"])
    wide = {"w": jnp.zeros((256, 256))}
    factored = optax.adafactor(1e-3).init(wide)
    big = unity.optimize(
        lambda p, x: ((x @ p["w"]) ** 2).mean(), wide, jnp.zeros((8, 256)), machine=unity.Machine.grid(1, 8, "a100"), progress=False
    )
    assert {s.spec for s in jax.tree.leaves(big.frontier[-1].shard.shardings(factored))} == {none}


def test_several_arguments_are_weights() -> None:
    def two(w: Any, v: Any, x: Any) -> Any:
        return ((jnp.tanh(x @ w["a"]) @ v["a"]) ** 2).mean()

    w, v, x = {"a": jnp.zeros((16, 64))}, {"a": jnp.zeros((64, 16))}, jnp.zeros((16, 16))
    machine = unity.Machine.grid(1, 8, "a100")
    plan = unity.optimize(two, w, v, x, argnums=(0, 1), machine=machine, objective="memory", progress=False)
    state = plan.shard.shardings(jax.eval_shape(optax.adam(1e-3).init, (w, v)))
    assert specs(state[0].mu) == specs(plan.in_shardings[:2])
    assert any(any(s.spec) for s in jax.tree.leaves(state))


def test_a_bare_array_is_a_weight() -> None:
    machine = unity.Machine.grid(1, 8, "a100")
    x = jnp.zeros((8, 16))
    plan = unity.optimize(lambda w, x: (x @ w).sum(), jnp.zeros((16, 64)), x, machine=machine, objective="memory", progress=False)
    state = plan.shard.shardings(optax.adam(1e-3).init(jnp.zeros((16, 64))))
    assert state[0].mu.spec == plan.in_shardings[0].spec
    assert state[0].count.spec == jax.sharding.PartitionSpec()


def test_a_checkpoint_of_another_model_is_refused_by_orbax(tmp_path: Path) -> None:
    """Not by unity: nothing of the plan is in a checkpoint."""
    saved({"w": jnp.zeros(3)}, tmp_path / "state")
    with pytest.raises(ValueError, match=r"up|structure|keys|match"):
        restored(planned(1, 4), tmp_path / "state")
