"""The optimum of small executions in the simulator: bounds that are none too high, and nothing better that is left out."""

import itertools
import math
import random
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import pytest
from ci_cases import fewer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.models import tiny
from benchmarks.optimum.bound import Bound
from benchmarks.optimum.depth_first import DepthFirst
from benchmarks.optimum.layers import Layers
from unity.baselines.flexflow.delta.simulation import makespan
from unity.baselines.flexflow.strategy.configs import ParallelConfig, drawn, every_config
from unity.baselines.flexflow.strategy.operators import Operators, operators
from unity.baselines.flexflow.strategy.strategy import Strategy
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.search.simulator import Topology


@cache
def lenet(devices: int = 4) -> Operators:
    model = tiny("lenet5", batch=64)
    captured = capture(model.loss, model.params, model.batch)
    return operators(captured.graph, captured.differentiated, Topology.uniform(Machine.grid(1, devices, "p100")))


@cache
def products(devices: int, samples: int, width: int) -> Operators:
    """Two products, one after the other."""

    def loss(params: dict, x: jnp.ndarray) -> jnp.ndarray:
        return jnp.sum(jnp.tanh(x @ params["a"]) @ params["b"])

    weights = {name: jnp.zeros((width, width)) for name in "ab"}
    captured = capture(loss, weights, jnp.zeros((samples, width)))
    return operators(captured.graph, captured.differentiated, Topology.uniform(Machine.grid(1, devices, "p100")))


def wired(topology: Topology) -> Operators:
    """Two products on other devices."""
    o = products(4, 64, 2048)
    return operators(o.graph, o.differentiated, topology)


@cache
def executions() -> dict[str, Operators]:
    one = products(4, 64, 2048).topology
    two = Topology.uniform(Machine.grid(2, 2, "p100"))  # each device has a link for its own node, and one for the other
    return {"lenet": lenet(), "one": wired(one), "two": wired(two), "unlike": wired(replace(one, speeds=(1.0, 3.0, 0.7, 1.9)))}


def any_config(o: Operators, k: int, rng: random.Random) -> ParallelConfig:
    """At random; half of the time on the first devices, in order, so that neighbours often have the same."""
    config = drawn(o.nodes[k], 4, rng)
    return config if rng.random() < 0.5 else ParallelConfig(config.degrees, tuple(range(config.pieces)))


@settings(max_examples=fewer(20))
@example(seed=16, which="one")  # the bound is what is simulated, to the tick, and a ring in it is rounded down
@example(seed=2, which="two")
@example(seed=0, which="unlike")
@given(seed=st.integers(0, 2**32 - 1), which=st.sampled_from(["lenet", "one", "two", "unlike"]))
def test_no_bound_exceeds_the_simulated_time(seed: int, which: str) -> None:
    """Both searches compare the two for whatever they simulate."""
    o, rng = executions()[which], random.Random(seed)
    configs = {k: any_config(o, k, rng) for k in o.numbers}
    seconds = makespan(Strategy(o, configs).graph)
    for search in (Layers, DepthFirst):
        exact = search(Bound(o, {k: [config] for k, config in configs.items()}), math.inf, {})
        exact.run()
        assert (exact.best, exact.configs, exact.simulated) == (seconds, configs, 1)


def test_a_transfer_between_other_devices_waits_for_no_gradients() -> None:
    """Gradients of a reader keep the links of its own devices: the operator before it, which has another one too, may go on."""
    o = products(4, 64, 2048)
    every = (
        ParallelConfig((1, 2), (0, 1)),
        ParallelConfig((2, 1), (1, 0)),
        ParallelConfig((2, 1), (2, 0)),
        ParallelConfig((2, 2), (2, 1, 0, 3)),
    )
    configs = dict(zip(o.numbers, every, strict=True))
    exact = Layers(Bound(o, {k: [config] for k, config in configs.items()}), math.inf, {})
    exact.run()
    assert (exact.best, exact.simulated) == (makespan(Strategy(o, configs).graph), 1)


@settings(max_examples=fewer(6))
@given(seed=st.integers(0, 2**32 - 1))
def test_the_best_of_all_is_found(seed: int) -> None:
    """With a random choice of configurations for every operator."""
    o, rng = lenet(), random.Random(seed)
    many = rng.sample(o.numbers, 6)
    may = {k: [any_config(o, k, rng) for _ in range(1 + (k in many))] for k in o.numbers}
    every = [dict(zip(may, configs, strict=True)) for configs in itertools.product(*may.values())]
    seconds = [makespan(Strategy(o, configs).graph) for configs in every]
    exact = Layers(Bound(o, may), math.inf, {})
    exact.run()
    assert (exact.best, exact.left) == (min(seconds), math.inf)
    for known in (0.0, min(seconds) / 2, min(seconds)):  # nothing is better
        exact = Layers(Bound(o, may), known, {})
        exact.run()
        assert (exact.best, exact.configs, exact.left) == (known, {}, math.inf)


@pytest.mark.parametrize(("devices", "samples", "width"), [(2, 4096, 64), (2, 64, 2048), (3, 9, 9)])
def test_devices_that_are_alike_may_be_exchanged(devices: int, samples: int, width: int) -> None:
    """The optimum of every placement is that of those that take devices in their order."""
    o = products(devices, samples, width)
    bound = Bound(o, {k: list(every_config(o.nodes[k], devices)) for k in o.numbers})
    assert bound.alike
    found: list[Layers | DepthFirst] = [Layers(bound, math.inf, {}, any_device=fold) for fold in (True, False)]
    found.append(DepthFirst(bound, math.inf, {}))
    for exact in found:
        exact.run()
    assert len({exact.best for exact in found}) == 1
    assert all(exact.left == math.inf for exact in found)
    assert found[0].nodes < found[1].nodes


def test_unvisited_strategies_are_reported() -> None:
    o, rng = lenet(), random.Random(0)
    many = rng.sample(o.numbers, 4)
    may = {k: [any_config(o, k, rng) for _ in range(3 if k in many else 1)] for k in o.numbers}
    every, some = Layers(Bound(o, may), math.inf, {}), Layers(Bound(o, may), math.inf, {}, width=3)
    every.run()
    some.run()
    assert some.left <= every.best <= some.best
    assert every.left == math.inf


def test_two_nodes_have_devices_that_are_not_alike() -> None:
    two = executions()["two"]
    assert not Bound(two, {k: list(every_config(two.nodes[k], 2)) for k in two.numbers}).alike
