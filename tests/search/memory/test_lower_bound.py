"""The lower bound on memory: no strategy needs less, and the leanest of large models needs little more."""

from __future__ import annotations

import math

import checkpointed_models  # noqa: F401 (its models are drawn, too)
import jax
import pytest
from ci_cases import by_hand, fewer, one_in
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelined_models import LAYERS, WIDTH, loss, planned
from random_layers import programs
from rerun_models import EVERY, drawn, named
from small_models import MACHINE, Small, f

from benchmarks.models import get
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.parallelize import parallelize
from unity.pcg.parallel.stages import SCHEDULES
from unity.search.cost.cost import Training
from unity.search.cost.state_sizes import StateMemory, StateSizes
from unity.search.memory.backend import CPU, GPU
from unity.search.memory.lower_bound import least_memory
from unity.search.memory.memory import predict_memory
from unity.search.session import Search
from unity.search.solver.minimizer import Minimizer

TRAININGS = (Training(), Training(True, StateSizes(0)), Training(True, StateSizes(1, (), 1000, StateMemory.HOST)), Training(False))


@given(name=st.sampled_from(sorted(EVERY)), seed=st.integers(0, 2**32 - 1), training=st.sampled_from(TRAININGS))
def test_no_strategy_of_a_model_needs_less(name: str, seed: int, training: Training) -> None:
    captured, _, _, graph = drawn(name, seed)
    least = least_memory(captured.graph, captured.differentiated, training, MACHINE).total
    for backend in (GPU, CPU):
        assert least <= predict_memory(graph, captured.differentiated, training, backend).total * (1 + 1e-9)


@pytest.mark.parametrize("name", one_in(3, sorted(EVERY)))
def test_the_leanest_strategy_of_a_model_needs_no_less(name: str) -> None:
    machine = Machine.grid(1, 2, "a100")  # few devices, where the bound is near
    captured, assembled = named(name, machine)
    (point,) = Minimizer(assembled.problem).at([math.inf])
    graph = parallelize(captured.graph, assembled.assignment(point))
    for training in TRAININGS:
        least = least_memory(captured.graph, captured.differentiated, training, machine).total
        for backend in (GPU, CPU):
            assert least <= predict_memory(graph, captured.differentiated, training, backend).total * (1 + 1e-9)


@settings(max_examples=fewer(50))
@given(program=programs(), devices=st.sampled_from([2, 4, 6]))
def test_the_leanest_plan_of_a_random_program_needs_no_less(program: Small, devices: int) -> None:
    machine = Machine.grid(1, devices, "a100")
    with jax.enable_x64(True):
        captured = capture(program.loss, program.params, program.batch)
    search = Search(captured.graph, captured.differentiated, machine, Training())
    assert search.least_memory.total <= search.leanest.memory * (1 + 1e-9)


def test_no_plan_with_a_pipeline_needs_less() -> None:
    weights = {"in": f(WIDTH, WIDTH), "layers": f(LAYERS, WIDTH, WIDTH), "out": f(WIDTH, WIDTH)}
    for schedule in SCHEDULES:
        plan = planned(loss, (weights, f(8, WIDTH), f(8, WIDTH)), kind=schedule, leanest=True)
        assert plan.program.family.search.least_memory.total <= plan.memory


@pytest.mark.parametrize("remat", [True, *by_hand(False)])
def test_the_bound_of_a_language_model_is_near_its_leanest_plan(remat: bool) -> None:
    model = get("llama3_8b", layers=8, seq=2048, vocab=2048, remat=remat)
    captured = capture(model.loss, model.params, model.batch)
    search = Search(captured.graph, captured.differentiated, Machine.preset("dgx-h100"), Training())
    # what the bound leaves out is mostly the softmax's inner value in float32, twice as wide as the scores
    assert 0.7 * search.leanest.memory < search.least_memory.total <= search.leanest.memory
