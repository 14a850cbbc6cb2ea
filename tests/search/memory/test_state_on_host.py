"""An optimizer's state in the memory of the host: its bytes, the seconds of the link, and where the search puts it there."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import unity
from unity.planning.ranking import measured
from unity.search.cost.cost import Training
from unity.search.cost.prediction import predict
from unity.search.cost.state_sizes import StateMemory, StateSizes
from unity.search.memory.memory import predict_memory
from unity.search.simulator import simulate
from unity.search.space.live_buffers import SLOTS, UPDATED

MACHINE = unity.Machine.grid(1, 4, "h100")
UNLINKED = replace(MACHINE, host=None)
LAYERS = 3


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


WEIGHTS = [{"up": f(256, 1024), "down": f(1024, 256)}] * LAYERS
BATCH = f(4096, 256)
ON_HOST = unity.OptimizerState(2, host=True)


def loss(weights: Any, x: Any) -> Any:
    for w in weights:
        x = x + jnp.tanh(x @ w["up"]) @ w["down"]
    return jnp.mean(x**2)


def planned(batch: Any = BATCH, **options: Any) -> unity.Plan:
    options = {"machine": MACHINE, "budget": 0, "pipelines": False, "branches": False, "recompute": False, **options}
    return unity.optimize(loss, WEIGHTS, batch, progress=False, **options)


def placed(plan: unity.Plan) -> dict[str, int]:
    """Bytes of Adam's state on one device, by the kind of memory that the plan's shardings place them in."""
    state = ON_HOST(WEIGHTS)
    nbytes: dict[str, int] = {"device": 0, "pinned_host": 0}
    for leaf, s in zip(jax.tree.leaves(state), jax.tree.leaves(plan.shard.shardings(state)), strict=True):
        nbytes[s.memory_kind] += math.prod(s.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return nbytes


def on_host(plan: unity.Plan) -> float:
    return sum(buffer.nbytes for buffer in plan.inspect.memory_timeline().offloaded)


@cache
def limited() -> unity.Plan:
    """A plan under a limit that no plan with all of the state on the device meets."""
    leanest = planned(objective="memory").memory
    with pytest.raises(unity.InfeasibleError, match=r"offload=True, with at least .* MB"):
        planned(memory_limit=0.93 * leanest)
    plan = planned(memory_limit=0.93 * leanest, offload=True)
    assert plan.memory <= 0.93 * leanest
    return plan


@pytest.mark.parametrize("search", ["data-parallel", "fsdp"])
def test_state_on_the_host_takes_none_of_the_devices_memory_and_the_time_of_the_link(search: str) -> None:
    with_state, without = planned(search=search, optimizer=ON_HOST), planned(search=search, optimizer_slots=0)
    assert with_state.memory == without.memory
    assert with_state.inspect.memory_timeline().slots == 0
    assert placed(with_state) == {"device": 0, "pinned_host": on_host(with_state)}
    pieces = [2 * math.prod(s.shard_shape((256, 1024))) * 4 for s in jax.tree.leaves(with_state.in_shardings[0])]
    assert sum(pieces) == on_host(with_state)
    assert MACHINE.host is not None
    seconds = 2 * sum(MACHINE.host.seconds(nbytes) for nbytes in pieces)
    assert with_state.time - without.time == pytest.approx(seconds)


def test_a_plan_that_fits_only_with_state_on_the_host_moves_no_more_than_it_must() -> None:
    plan = limited()
    both = placed(plan)
    assert 0 < both["pinned_host"] == on_host(plan)
    assert 0 < both["device"] == plan.inspect.memory_timeline().slots
    state = plan.program.family.search.training.state
    prediction = predict(plan.program.pcg, MACHINE, plan.program.family.differentiated, state)
    assert plan.time == pytest.approx(prediction.time)
    assert prediction.offloading > 0
    assert plan.inspect.gap is not None
    assert plan.inspect.gap >= 0
    everything = planned(optimizer=ON_HOST, memory_limit=plan.memory)
    assert plan.time < everything.time
    plan.program.check_derivation()


def test_a_larger_limit_moves_the_state_of_fewer_equal_weights() -> None:
    """Without other choices, the more weights' state may stay, the faster is the plan, whatever the order of the weights."""
    kept = {"constraints": [unity.pin(f"weights[{k}]['{name}']", P()) for k in range(LAYERS) for name in ("up", "down")]}
    most = planned(objective="memory", **kept).memory
    weight = 2 * 256 * 1024 * 4
    plans = [planned(memory_limit=most - k * weight, offload=True, **kept) for k in (1, 3)]
    assert [on_host(plan) for plan in plans] == [weight, 3 * weight]
    assert plans[0].time < plans[1].time


def test_state_stays_on_the_device_where_everything_fits() -> None:
    plan, plain = planned(offload=True), planned()
    assert (plan.time, plan.memory, on_host(plan)) == (plain.time, plain.memory, 0)
    assert planned(offload=True, objective="memory").memory < planned(objective="memory").memory


def test_a_simulated_step_moves_state_after_the_last_gradient_over_the_link_to_the_host() -> None:
    plan = planned(optimizer=ON_HOST)
    graph, family = plan.program.pcg, plan.program.family
    training = family.search.training
    prediction = predict(graph, MACHINE, family.differentiated, training.state)
    without = simulate(graph, MACHINE, family.differentiated, training=Training(state=StateSizes(0)))
    for folded in (True, False):
        step = simulate(graph, MACHINE, family.differentiated, training=training, folded=folded)
        links = [name for name in step.busy if name.endswith("link to the host")]
        assert len(links) == (1 if folded else 4)
        for link in links:
            assert step.busy[link] == pytest.approx(prediction.offloading)
            assert step.sent[link] == 2 * on_host(plan)
        assert step.makespan == pytest.approx(without.makespan + prediction.offloading)
        for memory in step.memory.values():
            assert SLOTS not in memory.by_reason
            assert memory.by_reason[UPDATED].max() == 2 * max(h.nbytes for h in plan.inspect.memory_timeline().offloaded)
    together = simulate(graph, MACHINE, family.differentiated, training=training, overlap=False)
    assert together.makespan == pytest.approx(prediction.time)


def test_where_activations_are_small_the_peak_is_the_update_of_the_largest_weight() -> None:
    plan = planned(batch=f(4, 256), optimizer=ON_HOST, search="data-parallel")
    timeline = plan.inspect.memory_timeline()
    largest = max(buffer.nbytes for buffer in timeline.offloaded)
    assert timeline.by_reason[UPDATED] == 2 * largest
    assert timeline.moment == len(timeline.nbytes) - 1
    assert timeline.peak == timeline.arguments + timeline.outputs + 2 * largest == plan.memory
    assert timeline.nbytes[-1] == timeline.nbytes.max()
    check = plan.check()  # of a gradient step, which has no update
    assert check.agrees()
    assert check.memory_lines == planned(batch=f(4, 256), search="data-parallel").check().memory_lines


def test_the_leanest_plan_keeps_the_state_of_a_weight_that_the_update_would_have_twice() -> None:
    def chain(weights: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ weights["large"]) @ weights["down"]) @ weights["up"])

    weights, large, small = {"large": f(256, 4096), "down": f(4096, 64), "up": f(64, 4096)}, 4 * 2**20, 2**20
    options = {"machine": unity.Machine.grid(1, 1, "h100"), "budget": 0, "progress": False}
    plan = unity.optimize(chain, weights, f(4, 256), objective="memory", offload=True, **options)
    every = unity.optimize(chain, weights, f(4, 256), optimizer=ON_HOST, **options)
    assert plan.program.hosted_state == (True, False, True, False)  # down, large, up, x
    assert every.memory - plan.memory == 2 * (2 * large) - (2 * large + 2 * (2 * small))
    search = plan.program.family.search  # the state of two small weights on the device takes little more than that of one twice
    back = search.with_state_back(search.leanest, search.fastest.memory)
    assert (back.memory, back.assignment.hosted) == (search.fastest.memory, frozenset())
    assert back.time == pytest.approx(search.fastest.time)


def test_measured_seconds_count_the_moves_of_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs that are measured compute gradients, without an update."""
    monkeypatch.setattr("unity.planning.ranking.relative", lambda steps: [1.0] * len(steps))
    plan = planned(optimizer=ON_HOST)
    ranking = measured(plan.program.family, plan.program.candidate, math.inf, lambda stage: None)
    assert ranking.tried[0].measured == 1.0 + plan.program.prediction.offloading > 1.0


def test_counts_and_factored_moments_stay_on_the_device() -> None:
    state = StateSizes(2, (), 1000, StateMemory.HOST)
    plan = planned(search="fsdp")
    graph, weights = plan.program.pcg, plan.program.family.differentiated
    with_rest, without = (predict_memory(graph, weights, Training(True, s)).total for s in (state, replace(state, whole=0)))
    assert with_rest - without == 1000
    plan = planned(optimizer=optax.adafactor(1e-3), offload=True, objective="memory")
    assert plan.inspect.memory_timeline().slots == plan.program.family.search.training.state.whole > 0


def test_a_file_has_the_weights_with_state_on_the_host(tmp_path: Path) -> None:
    plan = limited()
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", loss, WEIGHTS, BATCH)
    assert (again.time, again.memory, placed(again)) == (plan.time, plan.memory, placed(plan))
    assert again.program.hosted_state == plan.program.hosted_state
    described = planned(optimizer=ON_HOST)
    described.files.save(tmp_path / "described.json")
    again = unity.load(tmp_path / "described.json", loss, WEIGHTS, BATCH)
    assert (again.memory, placed(again)) == (described.memory, placed(described))


def test_texts_say_what_is_moved_and_for_how_long(tmp_path: Path) -> None:
    plan, plain = planned(optimizer=ON_HOST), planned()
    assert "optimizer's state of all weights on the host: 3.146 MB of each device to the host and back, " in repr(plan)
    assert "weights on the host: 2.621 MB of each device" in repr(limited())
    assert "optimizer's state" in str(plain.inspect.diff(plan))
    plan.files.export(tmp_path / "exported.py")
    assert "The plan has the optimizer's state of all weights in the memory of the host." in (tmp_path / "exported.py").read_text()


def test_a_machine_without_a_link_keeps_state_on_the_device_and_says_so() -> None:
    with pytest.warns(UserWarning, match=r"OptimizerState\(host=True\): the state stays on the device, since h100-1x4 has no link"):
        plan = planned(machine=UNLINKED, optimizer=ON_HOST)
    plain = planned(machine=UNLINKED)
    assert (plan.time, plan.memory, placed(plan)["pinned_host"]) == (plain.time, plain.memory, 0)


def test_a_host_that_is_no_boolean_is_refused() -> None:
    with pytest.raises(unity.OptionError, match="host='pinned': expected True"):
        unity.OptimizerState(host="pinned")  # pyright: ignore[reportArgumentType]
