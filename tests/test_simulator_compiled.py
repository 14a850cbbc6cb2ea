"""Compiled loops do what the same loops do in Python, to the last bit."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_cases import changed, rolled_change, rolled_graph

from unity.search.simulator import Delta, Task, TaskGraph, full, loop, schedule
from unity.search.simulator.compiled import compiled, interpreted


@contextmanager
def in_python() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("first_difference", "follow", "line_up", "link", "unlink"):
            stack.enter_context(patch.object(schedule, name, interpreted(getattr(loop, name).__wrapped__)))
        yield


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_compiled_is_what_is_interpreted(seed: int) -> None:
    pytest.importorskip("numba")
    rng = random.Random(seed)
    case = rolled_graph(rng)
    tasks, delta = dict(case.graph.tasks), Delta(case.graph)
    with in_python():
        slow = Delta(case.graph)
    for _ in range(4):
        change = rolled_change(rng, case, tasks)
        tasks = changed(tasks, change)
        delta.change(change)
        with in_python():
            slow.change(change)
            whole = full(TaskGraph(tasks, case.graph.devices))
        assert delta.timeline == slow.timeline == whole
        assert delta.simulated == slow.simulated


def doubled(values: np.ndarray, factor: float) -> float:
    total = 0.0
    for k in range(len(values)):
        values[k] *= factor
        total += values[k]
    return total


@pytest.mark.parametrize("way", [compiled, interpreted])
def test_arrays_are_written_to(way) -> None:
    values = np.array([1.0, 2.5])
    assert way(doubled)(values, 2.0) == 7.0
    assert values.tolist() == [2.0, 5.0]


def test_names_may_be_long_and_order_what_is_ready_at_once() -> None:
    devices, names = rolled_graph(random.Random(0)).graph.devices, [-(2**80), -1, 0, 2**61, 2**62, 2**63, 2**90, 2**124]
    found = full(TaskGraph({name: Task(0, 1.0) for name in random.Random(1).sample(names, len(names))}, devices))
    assert list(found.order[0]) == names


def test_names_that_are_too_long_are_refused() -> None:
    devices = rolled_graph(random.Random(0)).graph.devices
    for name in (2**125, -(2**125)):
        with pytest.raises(schedule.SimulationError, match="a name of more than 126 bits"):
            full(TaskGraph({name: Task(0, 1.0)}, devices))


def test_without_numba_loops_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it could not be imported
    values = np.array([1.0, 2.5])
    assert compiled(doubled)(values, 2.0) == 7.0
    assert values.tolist() == [2.0, 5.0]
