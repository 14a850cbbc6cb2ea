import math
from itertools import combinations
from unittest.mock import patch

import numpy as np
import pytest
from ci_cases import fewer
from factor_graphs import brute_force, problems, segments
from hypothesis import given, settings
from hypothesis import strategies as st

from unity.base.compiled_loops import load
from unity.search.solver import elimination, minplus
from unity.search.solver.domains import all_values, domains
from unity.search.solver.elimination import BUDGET, TableCache
from unity.search.solver.elimination_order import _EliminationOrder, schedule
from unity.search.solver.minimizer import Minimizer, minimize
from unity.search.solver.problem import Cost, Edge, Point, Problem

# Sums of fewer than 50 numbers below 100, with weights below 10, in another order; and `elimination.NUDGE`.
ROUNDING = 1e-7


def objective(point: Point, weight: float) -> tuple[float, float]:
    """Return the cost to minimize, then the cost that breaks ties."""
    if math.isinf(weight):
        return point.memory, point.time
    return point.time + weight * point.memory, point.memory


@settings(max_examples=fewer(150))
@given(problems(), st.lists(st.floats(0.01, 10), max_size=3))
def test_the_minimum_is_that_of_brute_force(problem: Problem, some: list[float]) -> None:
    weights = [0.0, 0.5, 1.0, *some, math.inf]
    every = brute_force(problem)
    found = minimize(problem, np.array(weights))
    assert len(found) == (len(weights) if every else 0)
    for weight, point in zip(weights, found, strict=False):
        best = min(objective(p, weight) for p in every)
        assert objective(point, weight)[0] == pytest.approx(best[0], rel=ROUNDING)
        assert point in every
        assert point.exact


@settings(max_examples=fewer(100))
@given(st.lists(problems(), min_size=2, max_size=4), st.sampled_from([0.0, 0.5, math.inf]), st.sampled_from([BUDGET, 40]))
def test_shared_tables_are_computed_once_and_change_no_result(some: list[Problem], weight: float, entries: int) -> None:
    """To the last bit; also if most of it is forgotten at once."""
    solved = TableCache(entries)
    for problem in [*some, *some]:
        assert Minimizer(problem, solved=solved).least(weight) == Minimizer(problem).least(weight)
    assert sum(table.size for table in solved.tables.values()) <= entries


def test_an_equal_problem_is_not_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    solved, problem = TableCache(), segments(4, (3, 4), ((0, 1),))
    least = Minimizer(problem, solved=solved).least(0.5)
    monkeypatch.setattr("unity.search.solver.elimination._eliminate", None)
    assert Minimizer(problem, solved=solved).least(0.5) == least


@st.composite
def factors(draw: st.DrawFn) -> tuple[dict[tuple[int, ...], np.ndarray], int]:
    """Tables of whole numbers on a variable and some of its neighbours, all of which some table has; and how many these are."""
    count = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 4), min_size=count + 1, max_size=count + 1))
    scopes = draw(st.lists(st.sets(st.integers(1, count), min_size=min(2, count), max_size=3), min_size=2, max_size=5))
    alone = set(range(1, count + 1)) - set().union(*scopes)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tables = {}
    for scope in [*scopes, *({label} for label in alone)]:
        labels = tuple(rng.permutation([0, *scope]).tolist())
        tables[labels] = rng.integers(0, 50, (2, *(sizes[label] for label in labels))).astype(float)
    return tables, count


@settings(max_examples=fewer(150))
@given(factors(), st.sampled_from([(0, 1), (0, 20), (100, 20), (10**9, 1), (10**9, 10**9)]))
def test_large_tables_are_equal_in_parts_and_at_once(given_: tuple[dict, int], limits: tuple[int, int]) -> None:
    tables, count = given_
    every = range(count + 1)
    total = sum(
        np.einsum(x, [9, *own], [9, *sorted(own)]).reshape(2, *(x.shape[1 + own.index(k)] if k in own else 1 for k in every))
        for own, x in tables.items()
    )
    whole, temporary = limits
    with patch.object(elimination, "WHOLE", whole), patch.object(elimination, "TEMPORARY", temporary):
        found = elimination._eliminate(dict(tables), tuple(range(1, count + 1)))
    np.testing.assert_array_equal(found, np.min(total, axis=1))


@settings(max_examples=fewer(100))
@given(problems())
def test_ties_go_to_less_of_the_other_cost(problem: Problem) -> None:
    every = brute_force(problem)
    for weight, point in zip((0.0, 1.0, math.inf), minimize(problem, np.array([0.0, 1.0, math.inf])), strict=False):
        assert objective(point, weight) == min(objective(p, weight) for p in every)


def test_a_little_time_is_not_given_for_much_memory() -> None:
    choice = Cost("", np.array([[1.0, 1.0 + 1e-10]]), np.array([[1e3, 1.0]]))
    (point,) = minimize(Problem((2,), (choice,), ()), np.array([0.0]))
    assert point.values == (0,)


@settings(max_examples=fewer(100))
@given(problems())
def test_heuristic_elimination_is_reported_and_gives_allowed_values(problem: Problem) -> None:
    minimizer = Minimizer(problem, budget=0)
    every = brute_force(problem)
    found = minimizer.at([0.5])
    assert bool(found) == bool(every)
    for point in found:
        assert point in every
        if point.exact:
            assert objective(point, 0.5)[0] == pytest.approx(min(objective(p, 0.5)[0] for p in every), rel=ROUNDING)


def test_a_dense_graph_needs_heuristic_elimination_only_beyond_the_budget() -> None:
    rng = np.random.default_rng(0)
    pairs = [(a, b) for a in range(6) for b in range(a)]
    tables = [Cost("", rng.random((1, 3, 3)), rng.random((1, 3, 3))) for _ in pairs]
    edges = tuple(Edge(a, b, table) for (a, b), table in zip(pairs, tables, strict=True))
    problem = Problem((3,) * 6, (Cost("", np.zeros((1, 3)), np.zeros((1, 3))),) * 6, edges)
    (fixed,) = minimize(problem, np.array([1.0]), budget=3**3)
    (exact,) = minimize(problem, np.array([1.0]))
    assert not fixed.exact
    assert exact.exact
    assert exact.time + exact.memory <= fixed.time + fixed.memory


# A residual block: its input goes to two operators and to the sum at the end, which is the next block's input.
RESIDUAL = ((0, 1), (1, 2), (2, 3), (0, 3))


def tangle(seed: int, count: int, edges: int) -> Problem:
    """A problem of a random graph. Sizes differ, so that not all variables have few neighbours."""
    rng = np.random.default_rng(seed)
    sizes = tuple(int(n) for n in rng.integers(1, 4, count))
    pairs = {(int(a), int(b)) for a, b in rng.integers(0, count, (edges, 2)) if a < b}
    unary = tuple(Cost(f"{n}", np.zeros((1, n)), np.zeros((1, n))) for n in sizes)
    shapes = {(a, b): (1, sizes[a], sizes[b]) for a, b in pairs}
    return Problem(sizes, unary, tuple(Edge(a, b, Cost(f"{s}", np.zeros(s), np.zeros(s))) for (a, b), s in shapes.items()))


@settings(max_examples=fewer(40), deadline=None)
@given(st.builds(tangle, st.integers(0, 10**6), st.integers(2, 16), st.integers(0, 60)), st.sampled_from([BUDGET, 100]))
def test_what_is_known_of_variables_is_kept_as_the_graph_changes(problem: Problem, budget: int) -> None:
    """How many edges an elimination would add, and which variables have tables of a size, or few neighbours."""
    smallest = _EliminationOrder._smallest

    def checked(order: _EliminationOrder) -> list[int]:
        chosen = smallest(order)
        for v, fill in order._fills.items():
            assert fill == sum(a not in order.neighbours(b) for a, b in combinations(order.neighbours(v), 2))
        known = {v: entries for entries, some in order._by_entries.items() for v in some}
        assert known == {v: math.prod(order.sizes[n] for n in order.neighbours(v)) for v in order.alive}
        assert order._nodes == {v for v in order.alive if len(order.neighbours(v)) <= 2}
        return chosen

    with patch.object(_EliminationOrder, "_smallest", checked):
        schedule(problem, all_values(problem), budget)


def test_equal_segments_are_solved_once() -> None:
    def made(count: int) -> int:
        return Minimizer(segments(count, (3, 4, 5), RESIDUAL)).elimination.schedule.products

    assert made(100) == made(10) <= 5


@pytest.mark.parametrize("pairs", [((0, 1), (1, 2), (2, 3)), RESIDUAL])
def test_a_ring_of_equal_segments_is_halved(pairs: tuple[tuple[int, int], ...]) -> None:
    ring = segments(128, (3, 4, 5), pairs, ring=True)
    assert Minimizer(ring).elimination.schedule.products <= 3 + 2 * math.log2(128)


def test_a_chain_is_one_sweep_without_any_product() -> None:
    assert Minimizer(segments(100, (3,), ((0, 1),))).elimination.schedule.products == 0


def test_forbidden_values_are_left_out_through_the_whole_chain() -> None:
    same = np.where(np.eye(4, dtype=bool), 0.0, np.inf)[None]
    free, one = np.zeros((1, 4)), np.where(np.arange(4) == 2, 0.0, np.inf)[None]
    keep = Cost("same", same, np.zeros_like(same))
    unary = (*(Cost("free", free, free) for _ in range(9)), Cost("one", one, free))
    problem = Problem((4,) * 10, unary, tuple(Edge(v, v + 1, keep) for v in range(9)))
    assert domains(problem).sizes == (1,) * 10
    assert minimize(problem, np.array([0.0]))[0].values == (2,) * 10


def test_every_variable_is_eliminated_once_after_all_that_it_needs() -> None:
    problem = segments(5, (2, 3), ((0, 1), (1, 2), (0, 2)))
    plan = schedule(problem, domains(problem), BUDGET)
    assert sorted(step.variable for step in plan.steps) == list(range(10))
    seen = set(plan.leaves)
    for step in plan.steps:
        assert seen.issuperset(step.factors)
        seen.update(step.results)


@settings(max_examples=fewer(60))
@given(st.integers(0, 2**32 - 1), st.sampled_from(["real", "twins", "sparse"]))
def test_the_product_is_the_minimum_over_all_terms(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    n, k, m = rng.integers(60, 110, 3)
    a, middle, b = rng.random((2, n, k)), rng.random((2, k)), rng.random((2, k, m))
    if kind == "twins":
        rows, left, right, columns = (rng.integers(0, 9, size) for size in (n, k, k, m))
        a, b = a[:, rows][:, :, left], b[:, right][:, :, columns]
    if kind == "sparse":
        a[rng.random(a.shape) < 0.9], b[:, rng.random((k, m)) < 0.5] = np.inf, np.inf
        a[:, 3], b[:, :, 5], middle[:, :7] = np.inf, np.inf, np.inf
    assert n * k * m > minplus.DIRECT
    whole = np.stack([((x + u)[:, :, None] + y).min(1) for x, u, y in zip(a, middle, b, strict=True)])
    for looped in {False, load()}:
        for least in (minplus.DIRECT, minplus.LOOPED) if looped else (minplus.LOOPED,):
            with patch.object(minplus, "pays", lambda _, looped=looped: looped), patch.object(minplus, "LOOPED", least):
                assert np.array_equal(minplus.product(a, middle, b), whole)


def test_inconsistent_problems_are_refused() -> None:
    one = Cost("", np.zeros((1, 2)), np.zeros((1, 2)))
    pair = Cost("", np.zeros((1, 2, 3)), np.zeros((1, 2, 3)))
    with pytest.raises(ValueError, match="they must exist, and differ"):
        Problem((2,), (one,), (Edge(0, 0, pair),))
    with pytest.raises(ValueError, match=r"is a table of \(2, 3\) values"):
        Problem((2, 2), (one, one), (Edge(0, 1, pair),))
    with pytest.raises(ValueError, match="not finite where time is"):
        Cost("", np.zeros((1, 2)), np.full((1, 2), np.inf))


def test_a_variable_of_one_value_may_have_any_number_of_neighbours() -> None:
    """A weight that every step of an unrolled network reads; an array has 64 dimensions at most."""
    rng, steps = np.random.default_rng(0), 100
    chain = Cost("chain", rng.random((1, 3, 3)), np.zeros((1, 3, 3)))
    read = Cost("read", rng.random((1, 1, 3)), np.zeros((1, 1, 3)))
    nothing, one = Cost("own", np.zeros((1, 3)), np.zeros((1, 3))), Cost("one", np.ones((1, 1)), np.zeros((1, 1)))
    edges = [Edge(v, v + 1, chain) for v in range(steps - 1)] + [Edge(steps, v, read) for v in range(steps)]
    (found,) = minimize(Problem((3,) * steps + (1,), (nothing,) * steps + (one,), tuple(edges)), [0.0])
    best = read.time[0, 0]
    for _ in range(steps - 1):
        best = (best[:, None] + chain.time[0]).min(0) + read.time[0, 0]
    assert found.exact
    assert found.time == pytest.approx(1.0 + best.min())


def test_a_variable_may_have_any_number_of_neighbours_of_one_value() -> None:
    """Steps of an unrolled network, where a search leaves them one choice, and three weights that all of them read."""
    rng, steps = np.random.default_rng(0), 100
    read = [Cost(f"read {k}", rng.random((1, 3, 1)), np.zeros((1, 3, 1))) for k in range(3)]
    nothing, one = Cost("own", np.zeros((1, 3)), np.zeros((1, 3))), Cost("one", np.ones((1, 1)), np.zeros((1, 1)))
    edges = [Edge(k, 3 + step, read[k]) for step in range(steps) for k in range(3)]
    (found,) = minimize(Problem((3,) * 3 + (1,) * steps, (nothing,) * 3 + (one,) * steps, tuple(edges)), [0.0])
    assert found.exact
    assert found.time == pytest.approx(steps * (1.0 + sum(cost.time[0].min() for cost in read)))


def test_a_guess_too_large_to_be_exact_still_bounds_an_exact_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses keep to tables of `GUESSED` entries, and lead to the same minimum."""
    problem = segments(6, (4, 5, 6), ((0, 1), (1, 2), (0, 2), (0, 3)), ring=True)
    (whole,) = minimize(problem, [0.5])
    monkeypatch.setattr("unity.search.solver.minimizer.LARGE", 0)
    monkeypatch.setattr("unity.search.solver.minimizer.PER_ENTRY", 0)
    monkeypatch.setattr("unity.search.solver.single_objective.FEW", -1)
    for entries in (0, 4, 200_000):
        monkeypatch.setattr("unity.search.solver.single_objective.GUESSED", entries)
        (found,) = minimize(problem, [0.5])
        assert found.exact
        assert objective(found, 0.5)[0] == pytest.approx(objective(whole, 0.5)[0], rel=ROUNDING)
