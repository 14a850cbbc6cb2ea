"""Assembly: every point of a problem is a strategy that runs, and the optimum is that of brute force."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import fewer, one_in
from factor_graphs import lower_left
from hypothesis import given, settings
from small_functions import Function, functions
from small_models import MODELS, random_point

from benchmarks.quality import Restricted, baselines
from benchmarks.quality import fastest as fastest_of
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.check import check
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.assembly import Listed, assemble
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.search.solver.frontier import frontier
from unity.search.solver.problem import Point

MACHINES = [Machine.grid(2, 4, "v100"), Machine.grid(1, 6, "v100"), Machine.grid(3, 2, "v100")]


def search_on(model, machine, training=True):
    captured = capture(model.loss, model.params, model.batch)
    return Search(captured.graph, captured.differentiated, machine, Training(training))


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: m.name)
@settings(max_examples=fewer(8))
@given(functions)
def test_every_point_is_a_well_typed_graph(machine: Machine, function: Function) -> None:
    captured = capture(function.loss, function.params, function.batch)
    assembled = assemble(captured.graph, captured.differentiated, machine, Training())
    for seed in range(3):
        point = random_point(assembled, np.random.default_rng(seed))
        check(parallelize(captured.graph, assembled.assignment(point)))


@pytest.mark.parametrize("name", MODELS)
def test_every_point_is_a_well_typed_graph_in_scans_and_remats_too(name: str) -> None:
    model = MODELS[name]()
    captured = capture(model.loss, model.params, model.batch)
    assembled = assemble(captured.graph, captured.differentiated, Machine.grid(2, 4, "v100"), Training())
    for seed in range(3):
        point = random_point(assembled, np.random.default_rng(seed))
        check(parallelize(captured.graph, assembled.assignment(point)))


def test_operators_that_number_their_variables_differently_share_no_choices() -> None:
    def convolved(x, w):
        return jnp.tanh(jax.lax.conv_general_dilated(jnp.cos(x), w, (1, 1), "SAME")).sum()

    def numbered_differently(x, w):
        return jnp.exp(jnp.sin(w).sum()) + convolved(x, w)

    args = jax.ShapeDtypeStruct((8, 4, 16, 16), "float32"), jax.ShapeDtypeStruct((4, 4, 3, 3), "float32")
    listed = Listed()
    for function in (convolved, numbered_differently):
        captured = capture(function, *args)
        given = captured.graph, captured.differentiated, MACHINES[1], Training()
        shared, alone = assemble(*given, listed=listed), assemble(*given)
        exchanged = [[{e.variable for c in d.choices for e in c.halos} for d in a.domains] for a in (shared, alone)]
        assert exchanged[0] == exchanged[1]
        assert any(exchanged[0])


def test_equal_sites_share_their_tables() -> None:
    two, four = (search_on(MODELS["gpt"](layers=n), MACHINES[0]).assembled for n in (2, 4))
    assert len({id(d) for d in two.domains}) == len({id(d) for d in four.domains})
    assert len({e.cost.key for e in two.problem.edges}) == len({e.cost.key for e in four.problem.edges})


def product_sum(w, x):
    return (x @ w).sum()


def squares(w, x):
    return (jnp.tanh(x) @ w).sum()


def two_products(w, x):
    return ((x @ w[0]) @ w[1]).sum()


TINY = {
    "product": (product_sum, jax.ShapeDtypeStruct((16, 32), "float32")),
    "squares": (squares, jax.ShapeDtypeStruct((16, 32), "float32")),
    "two products": (two_products, [jax.ShapeDtypeStruct(s, "float32") for s in ((16, 32), (32, 8))]),
}


def all_points(problem) -> list[tuple[float, float]]:
    """The costs of all values with all alternatives, added up by broadcasting."""
    n, wide = len(problem.sizes), [t for t in problem.tables if len(t[1].time) > 1]
    time, memory = np.zeros(()), np.zeros(())
    for scope, cost in problem.tables:
        shape = [1] * (n + len(wide))
        for v in scope:
            shape[v] = problem.sizes[v]
        own = next((k for k, t in enumerate(wide) if t[0] == scope and t[1] is cost), None)
        order = sorted(range(len(scope)), key=lambda k: scope[k])
        aligned = [np.transpose(x, (*(1 + k for k in order), 0)) for x in (cost.time, cost.memory)]
        if own is None:
            aligned = [x[..., 0] for x in aligned]
        else:
            shape[n + own] = len(cost.time)
        time, memory = time + aligned[0].reshape(shape), memory + aligned[1].reshape(shape)
    time, memory = np.broadcast_arrays(time, memory)
    good = np.isfinite(time)
    return list(zip(time[good].tolist(), memory[good].tolist(), strict=True))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_optimum_is_that_of_brute_force(name: str, training: bool, nodes: int) -> None:
    loss, params = TINY[name]
    captured = capture(loss, params, jax.ShapeDtypeStruct((64, 16), "float32"))
    machine = Machine.grid(nodes, 2 // nodes, "v100")
    search = Search(captured.graph, captured.differentiated, machine, Training(training))
    problem = search.assembled.problem
    every = all_points(problem)
    assert search.assembled.whole
    assert search.fastest.time == pytest.approx(min(t for t, _ in every), rel=1e-12)
    found = frontier(problem)
    assert found.exact
    wanted = [Point(t, m, (), None) for t, m in every]  # pyright: ignore[reportArgumentType]
    got, all_there_are = [(p.time, p.memory) for p in found.points], lower_left(wanted)
    assert rounded(got) == rounded(all_there_are)


def rounded(costs):
    """Without what differs by the order in which sums were taken; of points that then are equal in one cost, the better."""
    kept: list[tuple[float, float]] = []
    for time, memory in sorted((float(f"{t:.9e}"), float(f"{m:.9e}")) for t, m in costs):
        if not kept or memory < kept[-1][1]:
            kept.append((time, memory))
    return kept


@pytest.mark.parametrize(("name", "machine"), one_in(3, itertools.product([*MODELS, "big gpt"], MACHINES[:2])), ids=str)
def test_the_optimum_is_never_slower_than_strategies_by_hand(name: str, machine: Machine) -> None:
    big = {"layers": 2, "d": 512, "vocabulary": 4096, "b": 96, "s": 128}
    search = search_on(MODELS["gpt"](**big) if name == "big gpt" else MODELS[name](), machine)
    restricted = Restricted(search)
    times = {}
    for baseline in baselines(len(machine.axes)):
        point = fastest_of(restricted.on(baseline))
        if point is not None:
            times[baseline] = point.time
    assert len(times) > len(machine.axes)
    assert search.fastest.time <= min(times.values()) * (1 + 1e-12)


def test_brute_force_counts_all_choices_of_a_tiny_problem() -> None:
    """The brute force itself, on a problem that can be counted."""
    captured = capture(*TINY["product"], jax.ShapeDtypeStruct((64, 16), "float32"))
    problem = assemble(captured.graph, captured.differentiated, Machine.grid(1, 2, "v100"), Training()).problem
    total = 0
    for values in itertools.product(*map(range, problem.sizes)):
        ways = [int(np.isfinite(c.time[(slice(None), *(values[v] for v in scope))]).sum()) for scope, c in problem.tables]
        total += int(np.prod(ways))
    assert len(all_points(problem)) == total
