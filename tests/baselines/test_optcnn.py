"""OptCNN: what its eliminations find is the best of all strategies, chains end as two layers, and its strategies are its own."""

from __future__ import annotations

import itertools
from functools import cache

import jax
import numpy as np
import pytest
from ci_cases import fewer
from factor_graphs import brute_force, problems, segments
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import MODELS, Small, arrays, f, made

from benchmarks.models import tiny
from unity.base.errors import InfeasibleError
from unity.baselines.optcnn import IrreducibleError, optimal, point_of
from unity.baselines.optcnn_space import layerwise, light
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.types.parallel_type import PARTIAL
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.assembly import Assembled
from unity.search.cost.cost import Training
from unity.search.published import Asked, algorithm
from unity.search.session import Search
from unity.search.solver.minimizer import minimize
from unity.search.solver.problem import Cost, Edge, Problem
from unity.search.space.sites import copies

FOUR = Machine.grid(1, 4, "p100")


@settings(max_examples=fewer(120))
@given(problems(), st.data())
def test_the_strategy_is_as_fast_as_the_best_of_all(problem: Problem, data: st.DataObject) -> None:
    """With any variables at the rim being part of the layers beside them."""
    rim = data.draw(st.lists(st.booleans(), min_size=len(problem.sizes), max_size=len(problem.sizes)))
    every = brute_force(problem)
    if not every:
        with pytest.raises(InfeasibleError):
            optimal(problem, rim)
        return
    found = optimal(problem, rim)
    point = point_of(problem, found.values)
    assert point in every
    assert point.time == found.seconds == min(p.time for p in every)


def series_parallel(draw: st.DrawFn, budget: int) -> list[tuple[int, int]]:
    """A graph between nodes 0 and 1, by replacing one of its edges at a time: with two in a row, or with two side by side."""
    edges, count = [(0, 1)], 2
    for _ in range(budget):
        i, j = edges.pop(draw(st.integers(0, len(edges) - 1)))
        if draw(st.booleans()):
            edges += [(i, count), (count, j)]
            count += 1
        else:
            edges += [(i, j), (i, j)]
    return edges


@given(st.data(), st.integers(0, 12))
def test_series_parallel_graphs_end_as_two_layers(data: st.DataObject, budget: int) -> None:
    edges = data.draw(st.composite(series_parallel)(budget))
    count = 1 + max(map(max, edges))
    rng = np.random.default_rng(0)
    tables = [Cost("", rng.random((1, 2, 2)), np.zeros((1, 2, 2))) for _ in edges]
    unary = tuple(Cost("", rng.random((1, 2)), np.zeros((1, 2))) for _ in range(count))
    problem = Problem((2,) * count, unary, tuple(Edge(i, j, t) for (i, j), t in zip(edges, tables, strict=True)))
    found = optimal(problem)
    assert (found.nodes, found.final) == (count, 2)
    assert found.node_eliminations == count - 2
    assert found.seconds == pytest.approx(minimize(problem, [0.0])[0].time)


def test_a_final_graph_that_is_too_large_and_too_dense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer is joined to every other: nothing can be eliminated, and in so little memory nothing else helps."""
    rng = np.random.default_rng(0)
    own, pairs = Cost("", np.zeros((1, 30)), np.zeros((1, 30))), list(itertools.combinations(range(8), 2))
    tables = [Cost("", rng.random((1, 30, 30)), np.zeros((1, 30, 30))) for _ in pairs]
    monkeypatch.setattr("unity.baselines.optcnn.minimize", lambda problem, weights: minimize(problem, weights, 1000))
    with pytest.raises(IrreducibleError, match=r"leave 8 layers with 6\.6e\+11 strategies"):
        optimal(Problem((30,) * 8, (own,) * 8, tuple(Edge(i, j, table) for (i, j), table in zip(pairs, tables, strict=True))))


@given(problems())
def test_elimination_gives_the_result_of_enumeration(problem: Problem) -> None:
    """Other eliminations find what enumeration finds."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("unity.baselines.optcnn.ENUMERATED", 0)
        every = brute_force(problem)
        if not every:
            with pytest.raises(InfeasibleError):
                optimal(problem)
            return
        found = optimal(problem)
    assert point_of(problem, found.values) in every
    assert found.seconds == pytest.approx(min(p.time for p in every), rel=1e-12)


def test_a_large_final_graph_is_enumerated_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of the blocks makes no difference."""
    problem = segments(2, (3, 4, 5), ((0, 1), (1, 2), (0, 2), (0, 3), (2, 3)))
    whole = optimal(problem)
    monkeypatch.setattr("unity.baselines.optcnn.BLOCK", 7)
    assert optimal(problem) == whole
    assert whole.seconds == min(p.time for p in brute_force(problem))


@cache
def named(name: str) -> tuple[Search, Assembled]:
    captured, _ = made(MODELS[name](), FOUR)
    search = Search(captured.graph, captured.differentiated, FOUR, Training())
    return search, search.assembled


@pytest.mark.parametrize("name", sorted(MODELS))
def test_it_is_the_best_of_its_strategies_and_never_better_than_the_exact_search(name: str) -> None:
    search, assembled = named(name)
    problem = layerwise(assembled)
    found = optimal(problem, light(assembled.opened))
    assert found.seconds == pytest.approx(minimize(problem, [0.0])[0].time, rel=1e-9)
    assert found.final < found.nodes
    candidate = algorithm("optcnn")(search, Asked(limit=np.inf))
    assert candidate.time == pytest.approx(found.seconds, rel=1e-9)
    assert candidate.time >= search.fastest.time * (1 - 1e-9)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_its_strategies_split_outputs_alone_and_gather_no_parameter(name: str) -> None:
    """The restriction allows the paper's strategies and no others, judged by types rather than by the names of choices."""
    _, assembled = named(name)
    problem, whole = layerwise(assembled), assembled.problem
    opened = assembled.opened
    for s, site in enumerate(opened.sites):
        left = np.isfinite(problem.unary[s].time[0])
        for value in np.flatnonzero(left) if site.kind == "operator" else ():
            types = [assembled.domains[s].type_of(int(value), len(site.ports) + k) for k in range(len(site.results))]
            assert all(t.shape == () for t in site.results) or all(PARTIAL not in t for t in types)
        assert left[np.isfinite(whole.unary[s].time[0])].any()
    stored = {s for s, site in enumerate(opened.sites) if site.weight}
    for s, site in enumerate(opened.sites):
        stored |= {s} if copies(site) and site.ports[0].source in stored else set()
    rng = np.random.default_rng(0)
    for (s, p), edge in zip(assembled.ports, problem.edges, strict=True):
        if edge.first in stored:
            pairs = np.argwhere(np.isfinite(edge.cost.time.min(0)))
            for first, second in pairs[rng.permutation(len(pairs))[:20]]:
                before = assembled.domains[edge.first].type_of(int(first), assembled.position(opened.sites[s].ports[p]))
                after = assembled.domains[s].type_of(int(second), p)
                assert all(old.kind != "P" or old == new for old, new in zip(before, after, strict=True))


def test_the_plan_computes_the_same() -> None:
    """Values and gradients, on eight devices."""
    with jax.enable_x64(True):
        small = MODELS["cnn"]()
        captured = capture(small.loss, small.params, small.batch)
        search = Search(captured.graph, captured.differentiated, Machine.grid(2, 4, "p100"), Training())
        plan = Plan(PlanFamily(small.loss, captured, search, 0.0), algorithm("optcnn")(search, Asked(limit=np.inf)))
        params, batch = arrays(small.params), arrays(small.batch)
        expected = jax.jit(jax.value_and_grad(small.loss))(params, batch)
        got = jax.value_and_grad(plan)(*plan.shard(params, batch))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)


def test_a_chain_of_layers_is_a_chain_of_layers() -> None:
    """Weights, biases, the batch and the loss are part of the layers beside them; two products are left of six."""

    def loss(params: list, x):
        for w, b in params:
            x = (x @ w + b) ** 2
        return x.mean()

    _, assembled = made(Small(loss, [(f(32, 32), f(32))] * 6, f(64, 32)), FOUR)
    found = optimal(layerwise(assembled), light(assembled.opened))
    assert found.final == 2
    assert found.edge_eliminations == 0


def test_the_best_of_more_strategies_than_a_float_can_count_is_found() -> None:
    """An unrolled network leaves hundreds of layers; one strategy costs nothing, and all others do."""
    rng = np.random.default_rng(0)
    wanted, pairs = rng.integers(0, 30, 240), [(i, j) for i in range(240) for j in (i + 1, i + 2, i + 3) if j < 240]

    def planted(i: int, j: int) -> Edge:
        time = 1.0 + rng.random((1, 30, 30))
        time[0, wanted[i], wanted[j]] = 0.0
        return Edge(i, j, Cost("", time, np.zeros((1, 30, 30))))

    own = Cost("own", np.zeros((1, 30)), np.zeros((1, 30)))
    found = optimal(Problem((30,) * 240, (own,) * 240, tuple(planted(i, j) for i, j in pairs)))
    assert found.final > 200
    assert found.values == tuple(wanted)
    assert found.seconds == 0


def test_recurrent_networks_have_a_strategy_too() -> None:
    """The best of its own, scanned; its time is what the strategy costs."""
    model = tiny("nmt", hidden=64, batch=16)
    captured = capture(model.loss, model.params, model.batch)
    search = Search(captured.graph, captured.differentiated, FOUR, Training())
    candidate = algorithm("optcnn")(search, Asked(limit=np.inf))
    problem = layerwise(search.assembled)
    assert candidate.time == pytest.approx(minimize(problem, [0.0])[0].time, rel=1e-9)
    assert candidate.time >= search.fastest.time * (1 - 1e-9)
