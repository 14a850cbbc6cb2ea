"""FlexFlow's search: its chains, what full and delta simulation say of them, and plans that are found with it."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models
from ci_cases import CI, fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import MODELS, Small, f, named

from benchmarks.optimal import Bound, DepthFirst
from unity.baselines.flexflow import Stop, explored, initial
from unity.baselines.flexflow.delta.simulation import DeltaSimulation, makespan
from unity.baselines.flexflow.mesh import options
from unity.baselines.flexflow.strategy.configs import check_degrees, check_placed, drawn, every_config
from unity.baselines.flexflow.strategy.operators import Operators, operators
from unity.baselines.flexflow.strategy.pieces import reference
from unity.baselines.flexflow.strategy.strategy import Strategy
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured, capture
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.cost import Training
from unity.search.published import Asked, algorithm
from unity.search.session import Search
from unity.search.simulator import SimulationError, Topology, full
from unity.search.solver.minimizer import minimize

TWO, FOUR = Machine.grid(1, 2, "p100"), Machine.grid(1, 4, "p100")
EIGHT = Machine.grid(2, 4, "p100")


@cache
def model(name: str, machine: Machine = FOUR) -> Operators:
    captured, _ = named(name)
    return operators(captured.graph, captured.differentiated, Topology.uniform(machine))


def walked(o: Operators, seed: int, proposals: int, **options):
    return explored(o, initial(o, 8, seed), seed=seed, stop=Stop(None, proposals, early=False), **options)


WALKED, PROPOSALS = (("cnn", "lstm"), 6) if CI else (sorted(MODELS), 15)


@settings(max_examples=1 if CI else 2)
@given(name=st.sampled_from(WALKED), seed=st.integers(0, 2**32 - 1), beta=st.sampled_from([0.0, 1.0, 20.0]))
def test_full_and_delta_simulation_lead_through_the_same_chain(name: str, seed: int, beta: float) -> None:
    """To the last bit; and so does the same seed."""
    o = model(name)
    found = walked(o, seed, PROPOSALS, beta=beta)
    assert found == walked(o, seed, PROPOSALS, beta=beta, delta=False) == walked(o, seed, PROPOSALS, beta=beta)


@settings(max_examples=fewer(8))
@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**32 - 1))
def test_the_result_has_the_reported_time_and_is_no_worse_than_the_initial_strategies(name: str, seed: int) -> None:
    o = model(name)
    found = walked(o, seed, 60)
    starts = initial(o, 8, seed)
    assert [chain.start for chain in found.chains] == list(starts)
    for chain in found.chains:
        assert chain.first == makespan(Strategy(o, starts[chain.start]).graph)
        assert found.best.best <= chain.best <= chain.first
        assert chain.best == makespan(Strategy(o, chain.configs).graph)
        assert chain.proposals == 60


def test_zero_beta_accepts_every_proposal_and_infinite_beta_none_that_is_slower() -> None:
    """The two ends of equation 1: β = 0, and β without end."""
    o = model("gpt")
    assert all(chain.accepted == chain.proposals for chain in walked(o, 0, 50, beta=0.0).chains)
    greedy = walked(o, 0, 200, beta=float("inf"))
    assert all(chain.accepted < chain.proposals for chain in greedy.chains)
    assert all(chain.best < chain.first for chain in greedy.chains)


def two_layers(b: int, d: int) -> Small:
    def loss(params: dict, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.relu(x @ params["a"]) @ params["b"])

    return Small(loss, {"a": f(d, d), "b": f(d, d)}, f(b, d))


@pytest.mark.parametrize("sizes", [(4096, 64), (64, 2048), (8, 8)], ids=["samples", "weights", "neither"])
def test_the_best_of_all_strategies_of_a_tiny_graph_is_found(sizes: tuple[int, int]) -> None:
    """Every operator's every degree and placement on two devices, tried one after the other; and by the pruned depth-first search
    that proves what is best where these are too many."""
    small = two_layers(*sizes)
    with jax.enable_x64(True):
        captured = capture(small.loss, small.params, small.batch)
    o = operators(captured.graph, captured.differentiated, Topology.uniform(TWO))
    assert 2 <= len(o.numbers) <= 4
    may = {k: list(every_config(o.nodes[k], 2)) for k in o.numbers}
    every = itertools.product(*may.values())
    best = min(makespan(Strategy(o, dict(zip(o.numbers, configs, strict=True))).graph) for configs in every)
    exact = DepthFirst(Bound(o, may), math.inf, {})
    exact.run()
    assert (exact.best, exact.left) == (best, math.inf)
    found = explored(o, initial(o, sizes[0]), stop=Stop(None, 1500, early=False))
    assert found.best.best == best


def test_a_chain_ends_after_half_of_its_proposals_without_progress() -> None:
    o = model("cnn")
    (chain, _) = explored(o, initial(o, 8)).chains
    assert chain.proposals >= 2 * 10 * len(o.numbers)
    again = explored(o, initial(o, 8), stop=Stop(None, chain.proposals // 2, early=False)).chains[0]
    assert again.best == chain.best


@settings(max_examples=fewer(25))
@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**32 - 1))
def test_an_undone_change_leaves_nothing_behind(name: str, seed: int) -> None:
    """Neither in the strategy's tasks, nor for the changes that come after it."""
    o, rng = model(name), random.Random(seed)
    strategy = Strategy(o, {k: drawn(o.nodes[k], 4, rng) for k in o.numbers})
    delta = DeltaSimulation(strategy.graph)
    with pytest.raises(SimulationError, match="no change of the strategy to be taken back"):
        strategy.back()
    for _ in range(5):
        k = rng.choice(o.numbers)
        before = strategy.graph.tasks, dict(strategy.configs), delta.timeline
        delta.change(strategy.change(k, drawn(o.nodes[k], 4, rng)))
        if rng.random() < 0.6:
            strategy.back()
            delta.back()
            assert (strategy.graph.tasks, strategy.configs, delta.timeline) == before
        assert delta.graph.tasks == strategy.graph.tasks == Strategy(o, strategy.configs).graph.tasks
        assert delta.timeline == full(strategy.graph)


def searched(small: Small, machine: Machine, **asked) -> tuple[Captured, Search, Plan]:
    captured = capture(small.loss, small.params, small.batch)
    search = Search(captured.graph, captured.differentiated, machine, Training())
    found = algorithm("flexflow")(search, Asked(limit=np.inf, **asked))
    return captured, search, Plan(PlanFamily(small.loss, captured, search, 0.0), found)


@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_plans_compute_the_same(name: str) -> None:
    """Values and gradients, on eight devices; and no plan is faster than the exact search's, by the same costs."""
    with jax.enable_x64(True):
        small = MODELS[name]()
        _, search, plan = searched(small, EIGHT, seed=3, budget=200)
        params, batch = small_models.arrays(small.params), small_models.arrays(small.batch)
        expected = jax.jit(jax.value_and_grad(small.loss))(params, batch)
        got = jax.value_and_grad(plan)(*plan.shard(params, batch))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
        assert plan.time >= minimize(search.assembled.problem, [0.0])[0].time * (1 - 1e-9)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_value_and_its_configuration_have_the_same_pieces(name: str) -> None:
    """The piece of a device is the one that its place on the mesh says; of several devices with one piece it is the first's."""
    captured, assembled = named(name)
    sizes = [axis.size for axis in assembled.machine.axes]
    o = operators(captured.graph, captured.differentiated, Topology.uniform(assembled.machine))
    parallel = 0
    for k in o.numbers:
        may = options(assembled, o.nodes[k])
        for config, value in may.items():
            check_degrees(o.nodes[k], config.degrees)
            check_placed(o.nodes[k], config, o.topology)
            if value >= 0:
                site = assembled.opened.of_node[id(o.nodes[k])]
                type_ = assembled.domains[site].type_of(value, reference(o.nodes[k]))
                first: dict[int, int] = {}
                for device in range(assembled.machine.devices):
                    place = [0] * len(config.degrees)
                    for at, size, state in zip(np.unravel_index(device, sizes), sizes, type_, strict=True):
                        if state.kind == "P":
                            place[state.dim] = place[state.dim] * size + int(at)
                    first.setdefault(int(np.ravel_multi_index(place, config.degrees)) if place else 0, device)
                assert tuple(first[i] for i in range(config.pieces)) == config.devices
                parallel += config.pieces > 1
        assert any(c.pieces == 1 for c in may)
    assert parallel


@pytest.mark.parametrize("machine", [Machine.grid(1, 1, "p100"), TWO], ids=["1", "2"])
@pytest.mark.parametrize("fn", [lambda p, x: jnp.mean(x @ p), lambda p, x: x], ids=["one", "none"])
def test_a_graph_with_nothing_to_choose_is_accepted(machine: Machine, fn) -> None:
    """One device; or a function without an operator."""
    _, search, plan = searched(Small(fn, f(8, 8), f(8, 8)), machine, budget=5)
    assert plan.time == pytest.approx(search.fastest.time)


def test_equal_seeds_give_equal_plans_and_chains_stay_on_the_mesh() -> None:
    small = two_layers(2**20, 64)
    with jax.enable_x64(True):
        found = [searched(small, EIGHT, seed=1, budget=60)[2] for _ in range(2)]
    assert found[0].program.pcg.key == found[1].program.pcg.key
    samples = next(n for n in found[0].program.pcg.inputs if n.tensors[0].shape == (2**20, 64))
    assert all(s.kind == "P" and s.dim == 0 for s in samples.types[0]), "data parallelism, where samples are many"
