"""Operators that the backward pass reruns with their reader: their prices, programs and files."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from ci_cases import fewer, one_in
from factor_graphs import lower_left
from hypothesis import given, settings
from hypothesis import strategies as st
from rerun_models import CASES, OWN, drawn, named, perceptron, right
from small_models import MACHINE, counted
from test_assemble import all_points, rounded

import unity
from unity.machine.machine import Machine
from unity.pcg.analysis.recomputation_marks import runs_again
from unity.pcg.capture.capture import capture
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.assembly import assemble
from unity.search.cost.cost import Training
from unity.search.cost.prediction import predict
from unity.search.memory.memory import predict_memory
from unity.search.simulator import simulate
from unity.search.solver.frontier import frontier
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Point


def again(graph: PCG) -> list[str]:
    return [node.kind for node, _ in graph.walk() if runs_again(node)]


DRAWN = {"name": st.sampled_from(sorted(OWN)), "seed": st.integers(0, 2**32 - 1)}


@settings(max_examples=fewer(50))
@given(**DRAWN)
def test_the_search_counts_at_least_the_cost_of_the_graph(name: str, seed: int) -> None:
    captured, assembled, point, graph = drawn(name, seed)
    assert counted(assembled, point, "time") >= predict(graph, MACHINE, captured.differentiated).time * (1 - 1e-9)
    held = predict_memory(graph, captured.differentiated, Training())
    assert counted(assembled, point, "memory") >= held.additive * (1 - 1e-9)


@pytest.mark.parametrize("weight", [0.0, 1e-9, np.inf])
def test_without_shared_changes_the_search_counts_exactly_the_cost(weight: float) -> None:
    captured, assembled = named("perceptron")
    (point,) = Minimizer(assembled.problem).at([weight])
    graph = parallelize(captured.graph, assembled.assignment(point))
    assert point.time == pytest.approx(predict(graph, MACHINE, captured.differentiated).time)
    assert point.memory == pytest.approx(predict_memory(graph, captured.differentiated, Training()).additive)
    assert bool(again(graph)) == (weight > 0)


@settings(max_examples=fewer(15))
@given(**DRAWN)
def test_a_simulated_step_takes_what_is_predicted(name: str, seed: int) -> None:
    captured, _, _, graph = drawn(name, seed)
    found = simulate(graph, MACHINE, captured.differentiated, overlap=False)
    assert found.makespan == pytest.approx(predict(graph, MACHINE, captured.differentiated).time, rel=1e-9)


@pytest.mark.parametrize(
    ("bend", "saved"),
    [
        (jax.nn.gelu, 4096 * 128 * 4),  # what the product reads
        (jax.nn.softmax, 4096 * (128 + 1) * 4),  # that, the exponentials and their sums; but the scores are kept instead
    ],
)
def test_the_frontier_is_that_of_brute_force(bend: Any, saved: int) -> None:
    params = [jax.ShapeDtypeStruct(s, "float32") for s in ((16, 128), (128, 8))]
    captured = capture(lambda w, x: (bend(x @ w[0]) @ w[1]).sum(), params, jax.ShapeDtypeStruct((4096, 16), "float32"))
    kept, may = (
        assemble(captured.graph, captured.differentiated, Machine.grid(1, 2, "v100"), Training(), rerun=rerun)
        for rerun in (False, True)
    )
    found = frontier(may.problem)
    assert found.exact
    costs = [Point(t, m, (), None) for t, m in all_points(may.problem)]  # pyright: ignore[reportArgumentType]
    assert rounded((p.time, p.memory) for p in found.points) == rounded(lower_left(costs))
    lean, leaner = (min(frontier(assembled.problem).points, key=lambda p: p.memory) for assembled in (kept, may))
    assert lean.memory - leaner.memory == pytest.approx(saved / 2)
    graph = parallelize(captured.graph, may.assignment(leaner))
    assert len(again(graph)) == 1
    assert leaner.memory == pytest.approx(predict_memory(graph, captured.differentiated, Training()).additive)


@pytest.mark.parametrize("name", one_in(2, sorted(CASES)))
def test_rerunning_plans_compute_and_send_what_they_predict(name: str) -> None:
    seeds = [k for k in range(40) if again(drawn(name, k)[3])][:1]
    assert seeds or name in ("lstm", "gpt_scanned")  # where nothing may: in remats, and of several readers
    right(name, seeds)


@cache
def lean() -> unity.Plan:
    """The leanest plan of a model that keeps much."""
    model = perceptron(layers=4, b=4096, d=32, wide=512)
    params, batch = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, "float32"), (model.params, model.batch))
    plan = unity.optimize(model.loss, params, batch, machine=Machine.grid(1, 8, "a100"), progress=False)
    return plan.frontier[-1]


@pytest.mark.usefixtures("as_users_compile")
def test_the_compiled_program_keeps_no_rerun_result() -> None:
    plan = lean()
    assert len(again(plan.program.pcg)) >= 3
    found = plan.check()
    assert found.agrees(0.0)
    bent = 4096 * 512 * 4 / 8
    everything = 4 * 2 * bent  # what is kept else: of each layer what comes in, and what it is bent to
    assert found.memory.temporaries < everything
    assert abs(found.timeline.step / found.memory.total - 1) < 0.15


def test_a_plan_file_keeps_the_reruns(tmp_path: Path) -> None:
    plan, model = lean(), perceptron(layers=4, b=4096, d=32, wide=512)
    params, batch = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, "float32"), (model.params, model.batch))
    plan.files.save(tmp_path / "plan.json")
    loaded = unity.load(tmp_path / "plan.json", model.loss, params, batch)
    assert again(loaded.program.pcg) == again(plan.program.pcg)
    assert loaded.program.pcg.key == plan.program.pcg.key


def test_an_export_reruns_operators(tmp_path: Path) -> None:
    plan = lean()
    plan.files.export(tmp_path / "step.py")
    assert "checkpoint" in (tmp_path / "step.py").read_text()


def test_reruns_are_printed() -> None:
    plan = lean()
    said = io.StringIO()
    plan.explain(file=said)
    assert ", again" in said.getvalue()
    assert "it runs again in the backward pass" in str(plan.frontier[0].inspect.diff(plan))
