"""Compiled loops give the same results as the same loops in Python, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_cases import changed, rolled_change, rolled_graph
from small_models import MODELS, named

from unity.base.compiled_loops import interpreted
from unity.baselines.flexflow.delta import event_loop, simulation, task_table
from unity.baselines.flexflow.delta.simulation import DeltaSimulation
from unity.baselines.flexflow.strategy import encoding, strategy, task_builder, wiring
from unity.baselines.flexflow.strategy.configs import ParallelConfig, drawn
from unity.baselines.flexflow.strategy.operators import Operators, operators
from unity.baselines.flexflow.strategy.strategy import Strategy
from unity.machine.machine import Machine
from unity.search.simulator import SimulationError, TaskGraph, TimedTask, Topology, full

LOOPS = {
    (task_table, event_loop): ("follow",),
    (task_table, task_table): ("enter",),
    (simulation, task_table): ("apply_change", "fill_register", "link", "revert_change"),
    (encoding, encoding): ("diff_records",),
    (strategy, task_builder): ("build_tasks",),
    (wiring, wiring): ("_write_times",),
}


@contextmanager
def in_python() -> Iterator[None]:
    with ExitStack() as stack:
        for (user, module), names in LOOPS.items():
            for name in names:
                stack.enter_context(patch.object(user, name, interpreted(getattr(module, name).__wrapped__)))
        yield


@settings(max_examples=fewer(20))
@given(seed=st.integers(0, 2**32 - 1))
def test_compiled_and_interpreted_loops_simulate_alike(seed: int) -> None:
    pytest.importorskip("numba")
    rng = random.Random(seed)
    case = rolled_graph(rng)
    tasks, delta = dict(case.graph.tasks), DeltaSimulation(case.graph)
    with in_python():
        slow = DeltaSimulation(case.graph)
    for _ in range(4):
        change = rolled_change(rng, case, tasks)
        tasks = changed(tasks, change)
        delta.change(change)
        with in_python():
            slow.change(change)
            whole = full(TaskGraph(tasks, case.graph.devices))
        assert delta.timeline == slow.timeline == whole
        assert delta.simulated == slow.simulated


@cache
def model(name: str) -> Operators:
    captured, _ = named(name)
    return operators(captured.graph, captured.differentiated, Topology.uniform(Machine.grid(1, 4, "p100")))


@settings(max_examples=fewer(15))
@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 2**32 - 1))
def test_compiled_and_interpreted_loops_build_equal_tasks(name: str, seed: int) -> None:
    """Pieces may be on one device, too, where they are not all different."""
    pytest.importorskip("numba")
    o, rng = model(name), random.Random(seed)

    def config(k: int) -> ParallelConfig:
        found = drawn(o.nodes[k], 4, rng)
        return found if rng.random() < 0.7 else replace(found, devices=tuple(rng.choices(range(4), k=found.pieces)))

    configs = {k: config(k) for k in o.numbers}
    fast = Strategy(o, configs)
    with in_python():
        slow = Strategy(o, configs)
    for _ in range(3):
        k = rng.choice(o.numbers)
        other = config(k)
        change = fast.change(k, other)
        with in_python():
            assert slow.change(k, other) == change
    assert fast.graph.tasks == slow.graph.tasks


def test_long_names_break_ties_between_tasks_that_are_ready_at_once() -> None:
    devices, names = rolled_graph(random.Random(0)).graph.devices, [1 - 2**63, -1, 0, 2**61, 2**62, 2**63 - 1]
    found = DeltaSimulation(TaskGraph({name: TimedTask(0, 1.0) for name in random.Random(1).sample(names, len(names))}, devices))
    assert list(found.timeline.order[0]) == names


def test_names_that_are_too_long_are_refused() -> None:
    devices = rolled_graph(random.Random(0)).graph.devices
    for name in (2**63, -(2**63)):
        for tasks in ({name: TimedTask(0, 1.0)}, {0: TimedTask(0, 1.0, (name,))}):
            with pytest.raises(SimulationError, match=f"task {name} has a name of more than 64 bits"):
                DeltaSimulation(TaskGraph(tasks, devices))
