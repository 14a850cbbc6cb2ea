"""TensorOpt's frontier tracking against brute force and the project's own frontier, and its options on small models."""

import math

import numpy as np
import pytest
from ci_cases import fewer
from factor_graphs import brute_force, lower_left, problems, segments
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import MODELS

from unity.baselines.tensoropt import TensorOpt, mini_parallelism, mini_time, profiling
from unity.baselines.tensoropt import frontiers as f
from unity.baselines.tensoropt.tracking import track
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.check import check
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.cost import Training
from unity.search.published import Asked, algorithm
from unity.search.session import Search
from unity.search.solver.frontier import frontier
from unity.search.solver.problem import Cost, Edge, Problem

WAYS = ("ldp", "elimination")
EXACT = {"most": None, "cumulative": None, "concatenated": 10**9}


def search_on(name: str, machine: Machine) -> Search:
    model = MODELS[name]()
    captured = capture(model.loss, model.params, model.batch)
    return Search(captured.graph, captured.differentiated, machine, Training())


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=fewer(100))
@given(problems(), st.integers(0, 5))
def test_the_frontier_is_that_of_brute_force_and_of_the_projects_own(way, problem: Problem, first: int) -> None:
    every = brute_force(problem)
    found = track(problem, first % len(problem.sizes), way=way, **EXACT)
    assert found.fixed == ()
    assert [(p.time, p.memory) for p in found.points] == lower_left(every)
    assert set(found.points) <= set(every)
    assert [(p.time, p.memory) for p in found.points] == [(p.time, p.memory) for p in frontier(problem).points]


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=fewer(75))
@given(problems())
def test_heuristic_elimination_gives_possible_strategies(way, problem: Problem) -> None:
    every = brute_force(problem)
    found = track(problem, way=way, most=None, cumulative=None, concatenated=0)
    assert set(found.points) <= set(every)
    assert bool(found.points) == bool(every)
    if not found.fixed:
        assert [(p.time, p.memory) for p in found.points] == lower_left(every)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=fewer(75))
@given(problems(), st.integers(2, 3))
def test_thin_frontiers_keep_the_leanest_and_the_fastest(way, problem: Problem, most: int) -> None:
    every = lower_left(brute_force(problem))
    found = track(problem, way=way, most=most, cumulative=most, concatenated=10**9)
    costs = [(p.time, p.memory) for p in found.points]
    assert costs[:1] == every[:1]
    assert costs[-1:] == every[-1:]


def test_heuristic_elimination_fixes_an_operator_that_all_layers_read_and_may_lose_points() -> None:
    """A mask that every layer of a row reads, and all of them read each other: no other elimination is left."""
    rng = np.random.default_rng(1)
    table = lambda *n: Cost("", rng.random((1, *n)), rng.random((1, *n)))  # noqa: E731
    pairs = [(a, b) for b in range(6) for a in range(b)]
    problem = Problem((3,) * 6, tuple(table(3) for _ in range(6)), tuple(Edge(a, b, table(3, 3)) for a, b in pairs))
    lossy, exact = (track(problem, most=None, cumulative=None, concatenated=n) for n in (0, 10**9))
    assert lossy.fixed
    assert exact.fixed == ()
    assert {(p.time, p.memory) for p in exact.points} - {(p.time, p.memory) for p in lossy.points}
    for point in lossy.points:
        assert any(p.time <= point.time and p.memory <= point.memory for p in exact.points)


def test_equal_layers_are_eliminated_once(monkeypatch) -> None:
    """A residual block: its input goes to two operators and to the sum at the end, which is the next block's input."""
    made = []
    combined = f.combined
    monkeypatch.setattr("unity.baselines.tensoropt.tracking.combined", lambda *a: made.append(a[2]) or combined(*a))

    def eliminations(blocks: int) -> int:
        made.clear()
        track(segments(blocks, (3, 4, 5), ((0, 1), (1, 2), (2, 3), (0, 3))))
        return sum(axes.endswith("->uw") for axes in made)

    assert eliminations(40) == eliminations(10) > 0


@settings(max_examples=fewer(100))
@given(st.integers(0, 2**32 - 1), st.integers(1, 400), st.integers(1, 5))
def test_reduce_keeps_nondominated_tuples(seed: int, count: int, entries: int) -> None:
    rng = np.random.default_rng(seed)
    entry, (time, memory) = np.sort(rng.integers(0, entries, count)), rng.integers(0, 30, (2, count)) * 1.0
    rows = list(zip(entry.tolist(), time.tolist(), memory.tolist(), strict=True))
    wanted = {
        (e, t, m) for e, t, m in rows
        if not any(o == e and (x <= t and y <= m) and (x, y) != (t, m) for o, x, y in rows)
    }  # fmt: skip
    for large in (False, True):
        f_sorted, f.SORTED = f.SORTED, 0 if large else f.SORTED
        kept = f.reduced(entry, time, memory)
        f.SORTED = f_sorted
        assert {rows[k] for k in kept} == wanted
        assert len(kept) == len(wanted)
        assert [(rows[k][0], rows[k][2]) for k in kept] == sorted((rows[k][0], rows[k][2]) for k in kept)


@settings(max_examples=fewer(60))
@given(st.integers(0, 2**32 - 1), st.sampled_from(["hi,ij->hj", "ih,ij->jh", "hi,hi->hi", "i,ij->j", "hi,->h", "i,j->j"]))
def test_product_and_union_are_those_of_all_pairs(seed: int, axes: str) -> None:
    rng = np.random.default_rng(seed)
    given_, result = axes.split("->")
    of_a, of_b = given_.split(",")
    size = {x: int(rng.integers(1, 4)) for x in "hij"}

    def table(of: str) -> f.Frontiers:
        return f.initial(_random(rng, tuple(size[x] for x in of)), None) if of else f.one()

    a, b = table(of_a), table(of_b)
    found = f.combined(a, b, axes, None)
    chunk, f.CHUNK = f.CHUNK, 5
    in_pieces = f.combined(a, b, axes, None)
    f.CHUNK = chunk
    assert all(map(np.array_equal, *((t.entry, t.time, t.memory) for t in (found, in_pieces))))
    wanted: dict[tuple, list[tuple[float, float]]] = {}
    for i in range(len(a)):
        for j in range(len(b)):
            where = dict(zip(of_a, (int(x[i]) for x in a.at), strict=True))
            other = dict(zip(of_b, (int(x[j]) for x in b.at), strict=True))
            if all(where.get(x, v) == v for x, v in other.items()):
                key = tuple((where | other)[x] for x in result)
                wanted.setdefault(key, []).append((a.time[i] + b.time[j], a.memory[i] + b.memory[j]))
    got: dict[tuple, list[tuple[float, float]]] = {}
    for k in range(len(found)):
        got.setdefault(tuple(int(x[k]) for x in found.at), []).append((found.time[k], found.memory[k]))
    assert {key: sorted(costs) for key, costs in got.items()} == {key: _undominated(costs) for key, costs in wanted.items()}


def _random(rng: np.random.Generator, sizes: tuple[int, ...]) -> Cost:
    time, memory = (rng.integers(0, 6, (2, *sizes)).astype(float) for _ in range(2))
    time[rng.random(time.shape) < 0.3] = np.inf
    return Cost("", time, memory)


def _undominated(costs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    kept: list[tuple[float, float]] = []
    for time, memory in sorted(set(costs)):
        if not kept or memory < kept[-1][1]:
            kept.append((time, memory))
    return kept


@pytest.mark.parametrize("name", MODELS)
def test_strategies_are_well_typed_and_of_tensoropts_space(name: str) -> None:
    search = search_on(name, Machine.grid(2, 4, "v100"))
    found = TensorOpt(search)
    sites = found.space.assembled.opened.sites
    for candidate in (found.candidate(found.tracked.points[k]) for k in (0, len(found.tracked.points) // 2, -1)):
        graph = parallelize(search.graph, candidate.assignment)
        check(graph)
        assert not any(node.again for node, _ in graph.walk() if node.body is not None)
        assert not candidate.assignment.recomputed
    for s, site in enumerate(sites):
        types = {found.space.assembled.domains[s].type_of(v, 0) for v in range(len(found.space.assembled.domains[s]))}
        if site.kind == "input" and not site.weight:
            assert len(types) == 1
            assert all(state.kind == "U" or state.dim == 0 for state in next(iter(types)))
        if site.kind == "operator":
            assert not any(state.kind == "S" for t in types for state in t if site.ports)


def test_weights_of_one_operator_are_never_gathered() -> None:
    search = search_on("cnn", Machine.grid(2, 4, "v100"))
    found = TensorOpt(search)
    for point in found.tracked.points:
        graph = parallelize(search.graph, found.candidate(point).assignment)
        weights = [node for k, node in enumerate(graph.inputs) if k in search.differentiated]
        read = [user for w in weights for user, _ in graph.users[id(w)]]
        assert not any(user.kind.startswith("combine") for user in read)


@pytest.mark.parametrize("name", MODELS)
def test_both_ways_find_the_same_ends_and_unity_is_no_slower(name: str) -> None:
    search = search_on(name, Machine.grid(1, 4, "v100"))
    ldp, elimination = (TensorOpt(search, way=way) for way in WAYS)
    if not ldp.tracked.fixed and not elimination.tracked.fixed:
        for a, b in ((0, 0), (-1, -1)):
            one, other = ldp.tracked.points[a], elimination.tracked.points[b]
            assert one.time == pytest.approx(other.time, rel=1e-12)
            assert one.memory == pytest.approx(other.memory, rel=1e-12)
        fastest, leanest = ldp.space.at(0.0), ldp.space.at(math.inf)
        assert fastest is not None
        assert leanest is not None
        assert ldp.tracked.points[0].time == pytest.approx(fastest.time, rel=1e-9)
        assert ldp.tracked.points[-1].memory == pytest.approx(leanest.memory, rel=1e-9)
    for point in ldp.tracked.points:
        assert search.fastest.time <= point.time * (1 + 1e-12)


def test_the_options_mini_time_profiling_and_mini_parallelism() -> None:
    searches = [search_on("gpt", Machine.grid(1, n, "v100")) for n in (1, 2, 4)]
    roomy = profiling(searches, math.inf)
    assert [n for n, _ in roomy] == [1, 2, 4]
    for search, (_, candidate) in zip(searches, roomy, strict=True):
        asked = Asked(math.inf)
        assert candidate.time == mini_time(search, asked).time == algorithm("tensoropt")(search, asked).time
    found = mini_parallelism(searches, math.inf)
    assert found is not None
    assert found[0].machine.devices == 1
    leanest = [TensorOpt(search).frontier[-1].memory for search in searches]
    assert leanest[2] < leanest[1] < leanest[0]
    found = mini_parallelism(searches, (leanest[0] + leanest[1]) / 2)
    assert found is not None
    assert found[0].machine.devices == 2
    assert found[1].memory <= (leanest[0] + leanest[1]) / 2
    assert mini_parallelism(searches, leanest[2] / 2) is None
    assert mini_time(searches[2], Asked(leanest[2] / 2)).memory > leanest[2] / 2


def test_a_smaller_limit_gives_a_strategy_that_fits() -> None:
    found = TensorOpt(search_on("lstm", Machine.grid(1, 4, "v100")))
    for candidate in found.frontier:
        assert found.fastest_under(candidate.memory).memory <= candidate.memory
