"""Full simulation: a timeline satisfies FlexFlow's assumptions, which determine it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from simulator_cases import Case, task_graphs

from unity.search.simulator import Resource, SimulationError, TaskGraph, TimedTask, Timeline, full

TWO = (Resource("a", "compute"), Resource("b", "link"))


def simulated(**tasks: TimedTask) -> Timeline:
    """Tasks whose names are the letters of the alphabet."""
    return full(TaskGraph({ord(k): t for k, t in tasks.items()}, TWO))


def after(*letters: str) -> tuple[int, ...]:
    return tuple(map(ord, letters))


def levels(found: Timeline) -> dict[int, int]:
    """A task that is ready at the moment at which a predecessor became ready comes after it."""
    tasks, known = found.graph.tasks, {}

    def level(name: int) -> int:
        if name not in known:
            same = [p for p in tasks[name].before if found.ready[p] == found.ready[name]]
            known[name] = max((level(p) + 1 for p in same), default=0)
        return known[name]

    return {name: level(name) for name in tasks}


@given(task_graphs())
def test_a_timeline_obeys_the_assumptions(case: Case) -> None:
    """A3, A4: first in, first out, and as soon as the operands and the device are there; with these, all times are determined."""
    found, level = full(case.graph), {}
    level = levels(found)
    assert sorted(n for names in found.order for n in names) == sorted(case.graph.tasks)
    for name, task in case.graph.tasks.items():
        assert found.ready[name] == max((found.end[p] for p in task.before), default=0.0)
        assert found.end[name] == found.start[name] + task.seconds
    for device, names in enumerate(found.order):
        assert list(names) == sorted(names, key=lambda n: (found.ready[n], level[n], n))
        free = 0.0
        for name in names:
            assert case.graph.tasks[name].device == device
            assert found.start[name] == max(found.ready[name], free)
            free = found.end[name]
    assert found.makespan == max(found.end.values(), default=0.0)


def test_computing_and_communicating_overlap_on_different_devices() -> None:
    found = simulated(
        a=TimedTask(0, 1.0),
        b=TimedTask(1, 5.0, after("a"), 100.0),
        c=TimedTask(0, 2.0, after("a")),
        d=TimedTask(0, 1.0, after("b", "c")),
    )
    assert [found.start[n] for n in after(*"abcd")] == [0, 1, 1, 6]
    assert found.makespan == 7
    assert found.busy == (4.0, 5.0)
    assert found.nbytes == (0.0, 100.0)


def test_the_first_to_be_ready_runs_first_even_if_it_is_longer() -> None:
    found = simulated(
        a=TimedTask(1, 1.0), b=TimedTask(1, 1.0, after("a")), x=TimedTask(0, 9.0, after("a")), c=TimedTask(0, 1.0, after("b"))
    )
    assert found.order[0] == after(*"xc")
    assert found.makespan == 11


def test_a_task_without_time_does_not_overtake_what_it_waits_for() -> None:
    found = simulated(z=TimedTask(0, 0.0), a=TimedTask(0, 0.0, after("z")), b=TimedTask(0, 1.0, after("a")), y=TimedTask(0, 1.0))
    assert found.order[0] == after(*"yzab")  # all are ready at 0: y and z wait for nothing


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({1: TimedTask(2, 1.0)}, "task 1 is on device 2; there are 2"),
        ({1: TimedTask(0, -1.0)}, "task 1 takes -1.0 seconds"),
        ({1: TimedTask(0, math.nan)}, "task 1 takes nan seconds"),
        ({1: TimedTask(0, math.inf)}, "task 1 takes inf seconds"),
        ({1: TimedTask(0, 1.0, (7,))}, "task 1 waits for task 7, which is not there"),
        ({1: TimedTask(0, 1.0, (2,)), 2: TimedTask(0, 1.0, (1,)), 3: TimedTask(0, 1.0)}, "circle: (1 → 2|2 → 1)"),
    ],
)
def test_impossible_task_graphs_are_named(tasks: dict[int, TimedTask], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        full(TaskGraph(tasks, TWO))


def test_an_empty_graph_takes_no_time() -> None:
    assert full(TaskGraph({}, TWO)).makespan == 0.0
