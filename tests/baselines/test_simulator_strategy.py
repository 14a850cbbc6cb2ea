"""FlexFlow's strategies: the transfers that they need, and the equality of a changed strategy with a new one."""

from __future__ import annotations

import random
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import MODELS, Small, named

from unity.baselines.flexflow.delta.simulation import DeltaSimulation
from unity.baselines.flexflow.strategy import encoding
from unity.baselines.flexflow.strategy.configs import ParallelConfig, data_parallel, drawn, on_one
from unity.baselines.flexflow.strategy.operators import Operators, operators
from unity.baselines.flexflow.strategy.strategy import Strategy
from unity.machine.hardware import MachineError
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.parallelize import Assignment, parallelize
from unity.search.cost.prediction import predict
from unity.search.simulator import SimulationError, Topology, full

FOUR = Machine.grid(1, 4, "p100")


@cache
def model(name: str, machine: Machine = FOUR) -> Operators:
    captured, _ = named(name)
    return operators(captured.graph, captured.differentiated, Topology.uniform(machine))


def small(model: Small, topology: Topology) -> Operators:
    captured = capture(model.loss, model.params, model.batch)
    return operators(captured.graph, captured.differentiated, topology)


def two_layers(topology: Topology) -> Operators:
    def loss(params: dict, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.relu(x @ params["a"]) @ params["b"])

    params = {"a": jax.ShapeDtypeStruct((128, 512), jnp.float32), "b": jax.ShapeDtypeStruct((512, 256), jnp.float32)}
    return small(Small(loss, params, jax.ShapeDtypeStruct((64, 128), jnp.float32)), topology)


def kinds(o: Operators) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for k in o.numbers:
        found.setdefault(o.nodes[k].kind, []).append(k)
    return found


def bytes_sent(s: Strategy) -> float:
    return sum(t.nbytes for t in s.graph.tasks.values())


@settings(max_examples=fewer(20))
@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**32 - 1), overlap=st.booleans())
def test_changed_strategies_equal_new_ones_and_delta_equals_full_simulation(name: str, seed: int, overlap: bool) -> None:
    changed(model(name), random.Random(seed), overlap)


def changed(o: Operators, rng: random.Random, overlap: bool) -> None:
    """Changes operators one after the other; after each change everything is as if it were made anew."""
    strategy = Strategy(o, {k: drawn(o.nodes[k], 4, rng) for k in o.numbers}, overlap)
    delta = DeltaSimulation(strategy.graph)
    for _ in range(4):
        k = rng.choice(o.numbers)
        delta.change(strategy.change(k, drawn(o.nodes[k], 4, rng)))
        anew = Strategy(o, strategy.configs, overlap).graph
        assert delta.graph.tasks == anew.tasks == strategy.graph.tasks
        assert delta.timeline == full(anew)


@settings(max_examples=fewer(10))
@given(seed=st.integers(0, 2**32 - 1), overlap=st.booleans())
def test_values_without_a_gradient_are_sent_again_when_their_user_changes(seed: int, overlap: bool) -> None:
    """A mask, computed from numbers of words: its maker has nothing to do backward, so it does not compute anew."""

    def loss(params: dict, batch: dict) -> jax.Array:
        mask = jnp.cumsum(batch["words"], axis=1)[..., None] % 3 > 0
        hidden = jnp.tanh(jnp.where(mask, batch["x"] @ params["a"], 0.0))
        return jnp.sum(jnp.where(mask, hidden @ params["b"], 1.0) ** 2)

    f32 = jnp.float32
    params = {"a": jax.ShapeDtypeStruct((32, 64), f32), "b": jax.ShapeDtypeStruct((64, 32), f32)}
    batch = {"words": jax.ShapeDtypeStruct((8, 16), jnp.int32), "x": jax.ShapeDtypeStruct((8, 16, 32), f32)}
    o = small(Small(loss, params, batch), Topology.uniform(FOUR))
    assert any(not e.flows for edges in o.incoming for e in edges)
    changed(o, random.Random(seed), overlap)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_on_one_device_a_step_takes_the_predicted_time(name: str) -> None:
    """Nothing is sent, and operators run one after the other."""
    o = model(name)
    found = full(Strategy(o, {k: on_one(o.nodes[k], 2) for k in o.numbers}).graph)
    assert found.makespan == found.busy[2]
    assert sum(found.nbytes) == 0
    whole = parallelize(o.graph, Assignment((), {id(n): ((),) * len(n.tensors) for n, _ in o.graph.walk()}, {}, {}))
    terms = predict(whole, Machine.grid(1, 1, "p100"), o.differentiated).operators
    there = {id(n) for k, n in enumerate(whole.nodes) if k not in o.numbers}
    assert found.makespan == pytest.approx(sum(t.forward + t.backward for t in terms if id(t.node) not in there))


def test_the_backward_pass_of_a_view_takes_no_time_and_is_waited_for() -> None:
    """Between two products on other devices: the first one's gradients come from the second, through the reshape."""

    def loss(params: dict, x: jax.Array) -> jax.Array:
        return jnp.sum((x @ params["a"]).reshape(64, 16, 32) @ params["b"])

    params = {"a": jax.ShapeDtypeStruct((128, 512), jnp.float32), "b": jax.ShapeDtypeStruct((32, 32), jnp.float32)}
    o = small(Small(loss, params, jax.ShapeDtypeStruct((64, 128), jnp.float32)), Topology.uniform(FOUR))
    (view,) = kinds(o)["reshape"]
    first, second = kinds(o)["dot_general"]
    configs = {k: on_one(o.nodes[k]) for k in o.numbers} | {first: on_one(o.nodes[first], 1), view: on_one(o.nodes[view], 2)}
    found = full(Strategy(o, configs).graph)
    assert o.whole[view] == (0.0, 0.0)
    last, middle, sender = (encoding.task_name(k, encoding.BACKWARD) for k in (first, view, second))
    assert found.end[sender] < found.start[middle] == found.end[middle] < found.start[last]
    assert bytes_sent(Strategy(o, configs)) == 4 * 64 * 512 * 4


def test_moving_an_operator_sends_its_operands_and_results() -> None:
    """Forward its operand there and its result back, backward their cotangents."""
    o = two_layers(Topology.uniform(FOUR))
    strategy = Strategy(o, {k: on_one(o.nodes[k]) for k in o.numbers})
    (relu,) = kinds(o)["relu"]
    strategy.change(relu, on_one(o.nodes[relu], 3))
    hidden = 64 * 512 * 4
    assert bytes_sent(strategy) == 4 * hidden
    found = full(strategy.graph)
    sends = {t.device for t in strategy.graph.tasks.values() if t.nbytes}
    assert {found.graph.devices[d].name for d in sends} == {"device 0, devices", "device 3, devices"}


def test_data_parallelism_sends_weights_gradients_alone() -> None:
    o = two_layers(Topology.uniform(FOUR))
    strategy = Strategy(o, {k: data_parallel(o.nodes[k], 64, 4) for k in o.numbers})
    weights = (128 * 512 + 512 * 256) * 4
    loss = 4
    assert bytes_sent(strategy) == pytest.approx(4 * (weights + loss) * 2 * 3 / 4)
    busy = full(strategy.graph).busy[:4]
    assert len(set(busy)) == 1


def test_splitting_columns_sends_no_gradient_but_the_operand() -> None:
    """The first product's columns over all devices: each has its own of the weight, and all read the batch, which is there."""
    o = two_layers(Topology.uniform(FOUR))
    configs = {k: on_one(o.nodes[k]) for k in o.numbers}
    first, second = kinds(o)["dot_general"]
    (relu,) = kinds(o)["relu"]
    configs[first] = configs[relu] = ParallelConfig((1, 4), (0, 1, 2, 3))
    strategy = Strategy(o, configs)
    hidden = 64 * 512 * 4
    assert bytes_sent(strategy) == 2 * hidden * 3 / 4  # three quarters go to device 0, their cotangents come back
    strategy.change(second, ParallelConfig((4, 1), (0, 1, 2, 3)))
    result = 64 * 256 * 4
    weight = 512 * 256 * 4
    # a device has a quarter of the columns and needs a quarter of the rows: of 16 parts it has 1 of its 4
    assert bytes_sent(strategy) == pytest.approx(2 * hidden * 3 / 4 + 2 * result * 3 / 4 + 4 * weight * 2 * 3 / 4)


def test_statistics_of_a_split_batch_are_summed() -> None:
    def loss(params: dict, x: jax.Array) -> jax.Array:
        centred = x - x.mean(0)
        return jnp.sum((centred * params["g"]) ** 2)

    o = small(
        Small(loss, {"g": jax.ShapeDtypeStruct((32,), jnp.float32)}, jax.ShapeDtypeStruct((64, 32), jnp.float32)),
        Topology.uniform(FOUR),
    )
    strategy = Strategy(o, {k: data_parallel(o.nodes[k], 64, 4) for k in o.numbers})
    rings = {t.nbytes for t in strategy.graph.tasks.values() if t.nbytes}
    assert 32 * 4 * 2 * 3 / 4 in rings


def test_slow_devices_and_links_delay_their_tasks() -> None:
    links = {(i, j): (1e9, 0.0) for i in range(2) for j in range(2) if i != j}
    o = two_layers(Topology.joined("uneven", FOUR, [1.0, 0.25], links))
    alone = [full(Strategy(o, {k: on_one(o.nodes[k], d) for k in o.numbers}).graph).makespan for d in range(2)]
    assert alone[1] == pytest.approx(4 * alone[0])
    (relu,) = kinds(o)["relu"]
    there = Strategy(o, {k: on_one(o.nodes[k], int(k == relu)) for k in o.numbers})
    relu_seconds = sum(o.seconds(relu, (1, 1)))
    assert full(there.graph).makespan == pytest.approx(alone[0] + 3 * relu_seconds + 4 * 64 * 512 * 4 / 1e9)


def test_impossible_configurations_are_named() -> None:
    o = two_layers(Topology.uniform(FOUR))
    configs = {k: on_one(o.nodes[k]) for k in o.numbers}
    (relu,) = kinds(o)["relu"]
    strategy = Strategy(o, configs)
    before = strategy.graph.tasks
    for config, error, message in (
        (ParallelConfig((3, 1), (0, 1, 2)), SimulationError, r"dimension 0 of \(64, 512\) is split 3 times"),
        (ParallelConfig((0, 1), ()), SimulationError, "split 0 times"),
        (ParallelConfig((2,), (0, 1)), SimulationError, r"degrees \(2,\) for 2 dimensions"),
        (ParallelConfig((2, 1), (0,)), SimulationError, "1 devices for 2 pieces"),
        (ParallelConfig((1, 1), (7,)), MachineError, r"none of the devices \[7\]"),
        (ParallelConfig((2, 1), (0, 7)), MachineError, r"has no devices \[7\]"),
    ):
        with pytest.raises(error, match=message):
            strategy.change(relu, config)
    assert strategy.graph.tasks == before
    del configs[relu]
    with pytest.raises(SimulationError, match="1 operators have no configuration"):
        Strategy(o, configs)


def test_too_many_operands_or_devices_for_task_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    o = two_layers(Topology.uniform(FOUR))
    configs = {k: on_one(o.nodes[k]) for k in o.numbers}
    monkeypatch.setattr(encoding, "PURPOSES", encoding.TRANSFERS + 2)
    with pytest.raises(SimulationError, match=r"test_simulator_strategy.py:\d+.*: 2 operands; a strategy has names for 1"):
        Strategy(o, configs)
    monkeypatch.undo()
    monkeypatch.setattr(encoding, "ROW", 3)
    with pytest.raises(SimulationError, match="4 devices; a strategy has names for the tasks of 3"):
        Strategy(o, configs)
