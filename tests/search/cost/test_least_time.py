"""The bound on the time of every strategy, compared with all strategies of small programs and with exact optima of larger ones."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand
from small_models import MACHINE, Small, f, made, named

from unity.explain.brief import gap_in_words
from unity.machine.machine import Machine
from unity.optimize import optimize
from unity.pcg.capture.capture import Captured
from unity.pcg.parallel.parallelize import parallelize
from unity.plan.plan import Plan
from unity.plan.plan_family import PlanFamily
from unity.search.cost.assembly import Assembled, assemble
from unity.search.cost.cost import Training, site_cost
from unity.search.cost.least_time import least_time
from unity.search.cost.state_sizes import NO_STATE, StateSizes
from unity.search.memory.memory import predict_memory
from unity.search.session import Search
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Alternatives, Point
from unity.search.space.configurations import domain_of_picks, fits, shapes_of

EIGHT = Machine.grid(1, 8, "a100")


def perceptron(layers: int, rows: int, width: int) -> Small:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return Small(loss, [f(width, width)] * layers, f(rows, width))


def every_value(assembled: Assembled) -> Assembled:
    """Return the problem with every value of every site in every order, reruns included."""
    machine, domains, costs = assembled.machine, [], []
    for site, old in zip(assembled.opened.sites, assembled.domains, strict=True):
        picks = np.array([*product(range(len(old.choices)), repeat=len(machine.axes))], np.int16)
        own = domain_of_picks(
            old.choices, picks[fits(old.choices, shapes_of(site), picks, machine.axes)], shapes_of(site), machine.axes
        )
        domains.append(own)
        costs.append(site_cost(site, own, machine, assembled.training))
    return replace(assembled, domains=tuple(domains), costs=tuple(costs), port_costs={})


def searched(model: Small, machine: Machine) -> Search:
    captured, _ = made(model, machine)
    return Search(captured.graph, captured.differentiated, machine, Training())


@pytest.mark.parametrize("known", [math.inf, None])
@pytest.mark.parametrize(("rows", "width"), [(64, 4096), (4096, 64), (1024, 1024)])
def test_without_a_limit_the_bound_is_the_optimum_of_all_strategies(rows: int, width: int, known: float | None) -> None:
    search = searched(perceptron(2, rows, width), EIGHT)
    (best,) = Minimizer(every_value(search.assembled).problem).at([0.0])
    assert best.exact
    known = search.fastest.time if known is None else known
    assert search.least_time(known, math.inf) == pytest.approx(min(best.time, known), rel=1e-7)


def strategies(assembled: Assembled) -> list[tuple[float, tuple[int, ...]]]:
    """Return every strategy with the seconds that it takes at least, its best alternatives chosen; the fastest first."""
    problem, sizes = assembled.problem, assembled.problem.sizes
    total = np.zeros(sizes)
    for scope, cost in problem.tables:
        table = cost.time.min(0) if len(scope) == 1 or scope[0] < scope[1] else cost.time.min(0).T
        total += table.reshape([n if v in scope else 1 for v, n in enumerate(sizes)])
    order = np.argsort(total, axis=None)[: np.isfinite(total).sum()]
    values = np.stack(np.unravel_index(order, sizes), axis=1).tolist()
    return [(float(total[tuple(v)]), tuple(v)) for v in values]


def memory(captured: Captured, assembled: Assembled, values: tuple[int, ...]) -> float:
    """Return the bytes of the leanest alternatives of a strategy."""
    problem = assembled.problem
    chosen = list[int]()
    for scope, cost in problem.tables:
        entry = (slice(None), *(values[v] for v in scope))
        chosen.append(int(np.where(np.isfinite(cost.time[entry]), cost.memory[entry], np.inf).argmin()))
    point = Point(0.0, 0.0, values, Alternatives(tuple(chosen[: len(values)]), tuple(chosen[len(values) :])))
    graph = parallelize(captured.graph, assembled.assignment(point))
    return predict_memory(graph, captured.differentiated, assembled.training).total


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.5, 0.9])
@pytest.mark.parametrize(("layers", "rows", "width"), [(1, 32, 64), (2, 8, 128)])
def test_no_strategy_of_all_that_fits_is_below_the_bound(layers: int, rows: int, width: int, share: float) -> None:
    machine = Machine.grid(1, 2, "a100")
    captured, assembled = made(perceptron(layers, rows, width), machine)
    everything = every_value(replace(assembled, rerun=False))
    every = strategies(everything)
    search = Search(captured.graph, captured.differentiated, machine, Training())
    limit = search.leanest.memory + share * (search.fastest.memory - search.leanest.memory)
    fitting = search.under(limit)
    assert fitting is not None
    bound = search.least_time(fitting.time, limit)
    assert bound is not None
    assert every[0][0] * (1 - 1e-6) <= bound <= fitting.time
    below = [values for time, values in every if time < bound]
    assert all(memory(captured, everything, values) > limit for values in below)


@pytest.mark.parametrize(("name", "share"), [("cnn", 0.3), ("lstm", 0.3), *by_hand(("cnn", 0.0), ("gpt_scanned", 0.3))])
def test_no_point_of_the_frontier_is_below_the_bound_for_its_memory(name: str, share: float) -> None:
    captured, _ = named(name)
    search = Search(captured.graph, captured.differentiated, MACHINE, Training())
    (point,) = search.minimizer.at([share * search.rate])
    candidate = search.candidate(search.assembled, point)
    bound = search.least_time(2 * candidate.time, candidate.memory)  # as if this strategy were not known
    assert bound is not None
    assert 0.9 * search.fastest.time <= bound <= candidate.time


def test_a_limit_on_the_arguments_raises_the_bound() -> None:
    """Weights that must be divided are gathered or their products reduced, which the bound counts."""
    search = searched(perceptron(4, 4096, 1024), EIGHT)
    lean = search.leanest
    free, tight = (search.least_time(lean.time, limit) for limit in (math.inf, lean.memory))
    assert free is not None
    assert tight is not None
    assert free * 1.01 < tight <= lean.time


@pytest.mark.parametrize("backward", [False, True])
def test_state_that_every_device_stores_leaves_less_room_in_training_alone(backward: bool) -> None:
    captured, _ = made(perceptron(2, 64, 64), EIGHT)
    state = StateSizes(0, (), 10**6)  # many times what the arguments take
    with_state, without = (Search(captured.graph, captured.differentiated, EIGHT, Training(backward, s)) for s in (state, NO_STATE))
    lean = without.leanest
    assert with_state.leanest.memory == lean.memory + backward * state.whole
    bound = without.least_time(2 * lean.time, lean.memory)
    assert bound is not None
    assert bound <= lean.time
    assert with_state.least_time(2 * lean.time, lean.memory + backward * state.whole) == bound


def test_the_only_strategy_of_one_device_is_the_bound() -> None:
    search = searched(perceptron(2, 64, 64), EIGHT.alone)
    assert search.least_time(math.inf, math.inf) == pytest.approx(search.fastest.time)


def test_a_machine_of_many_axes_has_no_bound() -> None:
    captured, _ = made(perceptron(1, 1024, 1024), MACHINE)
    assembled = assemble(captured.graph, captured.differentiated, Machine.grid(32, 32, "a100"), Training())
    assert least_time(assembled, math.inf, math.inf) is None


@pytest.mark.parametrize("search", ["unity", "data-parallel", "megatron"])
def test_a_plan_says_how_far_from_the_best_it_is(search: str) -> None:
    model = perceptron(3, 64, 2048)
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, "float32"), (model.params, model.batch))
    plan = optimize(model.loss, *shapes, machine=EIGHT, search=search, budget=0, pipelines=False, progress=False)
    best = optimize(model.loss, *shapes, machine=EIGHT, search="captured", pipelines=False, progress=False)
    assert plan.inspect.bound is not None
    assert plan.inspect.gap is not None
    assert plan.inspect.bound <= best.time * (1 + 1e-9)
    assert plan.inspect.gap == pytest.approx(plan.time / plan.inspect.bound - 1)
    assert plan.inspect.gap < 1e-6 if search == "unity" else plan.inspect.gap > 0.01
    text = io.StringIO()
    plan.explain(file=text)
    assert gap_in_words(plan) in text.getvalue()
    assert gap_in_words(plan) in repr(plan)


@pytest.mark.parametrize(
    ("slower", "limit", "words"),
    [
        (0.01301, 16e9, "at most 1.4 % from the best possible sharding of this program within 16 GB"),
        (2e-6, math.inf, "at most 0.1 % from the best possible sharding of this program"),
        (1e-9, 16e9, "no sharding of this program within 16 GB is faster"),
    ],
)
def test_a_gap_is_rounded_up(slower: float, limit: float, words: str) -> None:
    search = searched(perceptron(1, 64, 64), EIGHT)
    captured, _ = made(perceptron(1, 64, 64), EIGHT)
    family = PlanFamily(lambda params, x: None, captured, search, 0.0, limit=limit)
    plan = Plan(family, replace(search.fastest, time=search.fastest.time * (1 + slower)))
    assert gap_in_words(plan) == words
