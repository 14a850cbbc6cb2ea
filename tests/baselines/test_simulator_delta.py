"""Delta simulation: after any sequence of changes the timeline equals that of a full simulation, to the last bit."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_cases import (
    Case,
    Change,
    changed,
    changes,
    layered_change,
    layered_graph,
    rolled_change,
    rolled_graph,
    task_graphs,
)

from unity.baselines.flexflow.delta import simulation
from unity.baselines.flexflow.delta.simulation import DeltaSimulation
from unity.search.simulator import Resource, SimulationError, TaskGraph, TimedTask, full

Tasks = dict[int, TimedTask]
TWO = (Resource("a", "compute"), Resource("b", "link"))


@settings(max_examples=fewer(120))
@given(case=task_graphs(), data=st.data())
def test_delta_equals_full_simulation_to_the_last_bit(case: Case, data: st.DataObject) -> None:
    delta, tasks = DeltaSimulation(case.graph), dict(case.graph.tasks)
    for _ in range(data.draw(st.integers(1, 8))):
        change = data.draw(changes(case, tasks))
        before = delta.timeline
        undo = delta.change(change)
        taken_back = data.draw(st.sampled_from(["no", "by a change", "at once"]))
        if taken_back != "no":
            if taken_back == "at once":
                delta.back()
            else:
                delta.change(undo)
            assert delta.timeline == before
            assert delta.makespan == before.makespan
            continue
        tasks = changed(tasks, change)
        found = full(TaskGraph(tasks, case.graph.devices))
        assert delta.timeline == found
        assert delta.makespan == found.makespan


def follows(rng: random.Random, graph: TaskGraph, steps: int, taken_back: float, draw: Callable[[int, Tasks], Change]) -> None:
    """Compare delta simulation with full simulation after `steps` changes, some of which are undone at once."""
    delta, tasks = DeltaSimulation(graph), dict(graph.tasks)
    for step in range(steps):
        change = draw(step, tasks)
        delta.change(change)
        if rng.random() < taken_back:
            delta.back()
        else:
            tasks = changed(tasks, change)
        assert delta.timeline == full(TaskGraph(tasks, graph.devices))


@settings(max_examples=fewer(25))
@given(seed=st.integers(0, 2**32 - 1))
def test_delta_equals_full_simulation_after_many_changes_of_a_larger_graph(seed: int) -> None:
    """Changes that are taken back leave no trace."""
    rng = random.Random(seed)
    case = rolled_graph(rng)
    follows(rng, case.graph, 12, 0.4, lambda _, tasks: rolled_change(rng, case, tasks))


@settings(max_examples=fewer(60))
@given(seed=st.integers(0, 2**32 - 1))
def test_delta_equals_full_simulation_after_changes_of_synchronized_layers(seed: int) -> None:
    """Tasks come, go, and move to other devices; what was taken away leaves room for others."""
    rng = random.Random(seed)
    graph = layered_graph(rng)
    follows(rng, graph, 8, 0.3, lambda _, tasks: layered_change(rng, TaskGraph(tasks, graph.devices)))


def chain(n: int, seconds: float = 1.0) -> TaskGraph:
    return TaskGraph({k: TimedTask(0, seconds, (k - 1,) if k else ()) for k in range(n)}, TWO)


def test_a_change_may_make_tasks_earlier_and_later() -> None:
    delta = DeltaSimulation(chain(300))
    delta.change({200: TimedTask(0, 0.25, (199,))})
    assert delta.makespan == 299.25
    delta.change({100: TimedTask(1, 3.0, (99,)), 150: None, 151: TimedTask(0, 1.0, (149,))})
    assert delta.makespan == 300.25
    assert delta.timeline == full(delta.graph)


@pytest.mark.parametrize(("seconds", "simulated"), [(1.0, 9), (0.1, 100)], ids=["exact", "rounded"])
def test_only_what_comes_after_the_change_is_simulated(seconds: float, simulated: int) -> None:
    """If times are exact, simulation ends as soon as all tasks have a common offset."""
    delta = DeltaSimulation(chain(1000, seconds))
    delta.change({900: TimedTask(0, 2 * seconds, (899,))})
    assert delta.simulated == simulated
    assert delta.timeline == full(delta.graph)


@pytest.mark.parametrize("seconds", [2048.0, 2.0**-43])
def test_rounded_times_are_not_shifted(seconds: float) -> None:
    delta = DeltaSimulation(chain(1000))
    delta.change({950: TimedTask(0, seconds, (949,))})
    assert delta.simulated == 50
    assert delta.timeline == full(delta.graph)


@pytest.mark.parametrize("later", [-0.75, 0.0, 2.5])
def test_tasks_with_a_common_offset_are_shifted_between_two_changes(later: float) -> None:
    delta = DeltaSimulation(chain(1000))
    delta.change({100: TimedTask(0, 1.0 + later, (99,)), 600: TimedTask(0, 3.0, (599,)), 700: TimedTask(1, 0.5, (699,)), 999: None})
    assert delta.makespan == 1000.5 + later
    assert delta.simulated < 60
    assert delta.timeline == full(delta.graph)


def test_a_task_that_runs_longer_than_before_delays_its_device() -> None:
    """Device 0 is as before, but device 1 is kept busy by a task that now takes longer."""
    tasks = dict(chain(100).tasks) | {200: TimedTask(1, 2.0, (3,)), 201: TimedTask(1, 1.0, (60,))}
    delta = DeltaSimulation(TaskGraph(tasks, TWO))
    delta.change({200: TimedTask(1, 70.0, (3,))})
    assert delta.timeline == full(delta.graph)
    assert delta.timeline.start[201] == 74.0


@pytest.mark.parametrize("seconds", range(130, 145))
def test_tasks_that_were_ready_earlier_are_not_lost(seconds: int) -> None:
    """The chain is one second later. Task 1002, five seconds later, is ready together with one of the chain, which comes first."""
    tasks = dict(chain(300).tasks) | {
        1000: TimedTask(1, 5.0),
        1001: TimedTask(2, float(seconds), (1000,)),
        1002: TimedTask(1, 1.0, (1001,)),
    }
    delta = DeltaSimulation(TaskGraph(tasks, (*TWO, Resource("c", "compute"))))
    delta.change({50: TimedTask(0, 2.0, (49,)), 1000: TimedTask(1, 10.0)})
    assert delta.timeline == full(delta.graph)
    assert delta.simulated < 200


def test_running_tasks_are_not_lost() -> None:
    """Device 0 is free when it was before, but the first of its tasks, which task 50 waits for, ends later."""
    tasks = {k: TimedTask(1, 0.25, (k - 1,) if k > 10 else ()) for k in range(10, 40)}
    tasks |= {0: TimedTask(0, 1.0), 1: TimedTask(0, 3.0), 50: TimedTask(2, 1.0, (0, 11))}
    delta = DeltaSimulation(TaskGraph(tasks, (*TWO, Resource("c", "compute"))))
    delta.change({0: TimedTask(0, 3.0), 1: TimedTask(0, 1.0)})
    assert delta.timeline == full(delta.graph)
    assert delta.timeline.start[50] == 3.0


def test_tasks_taken_in_one_run_but_not_yet_in_the_other_are_not_lost() -> None:
    """At 10 and 11 all looks as before: device 0 is free at 13. But then task 101 was its last, behind 102, which ended at 12; now
    103 is, and 102 has ended at 10. Task 105 waits for it and for task 12, and need not wait till 12."""
    tasks = {k: TimedTask(1, 0.25 if k == 12 else 1.0, (k - 1,) if k > 1 else ()) for k in range(1, 31)}
    tasks |= {100: TimedTask(2, 3.0), 101: TimedTask(0, 1.0, (100,)), 102: TimedTask(0, 1.0, (104,)), 103: TimedTask(0, 3.0, (20,))}
    tasks |= {104: TimedTask(3, 2.0), 105: TimedTask(4, 1.0, (102, 12))}
    delta = DeltaSimulation(TaskGraph(tasks, (*TWO, *(Resource(name, "compute") for name in "cde"))))
    delta.change({102: TimedTask(0, 10.0, (104,))})
    assert (delta.timeline.end[102], delta.timeline.end[101]) == (12.0, 13.0)
    delta.change({100: TimedTask(2, 3.0, (20,)), 103: TimedTask(0, 3.0, (2,)), 104: TimedTask(3, 0.0)})
    assert (delta.timeline.end[102], delta.timeline.end[103]) == (10.0, 13.0)
    assert delta.timeline == full(delta.graph)
    assert delta.timeline.start[105] == 11.25


def test_a_change_is_undone_once(monkeypatch: pytest.MonkeyPatch) -> None:
    delta = DeltaSimulation(chain(1000))
    before = delta.timeline
    with pytest.raises(SimulationError, match="no change of the task graph to be taken back"):
        delta.back()
    delta.change({100: TimedTask(0, 2.0, (99,)), 5000: TimedTask(1, 3.0, (99,)), 999: None})
    monkeypatch.setattr(simulation, "apply_change", None)  # nothing is simulated
    delta.back()
    assert delta.timeline == before
    with pytest.raises(SimulationError, match="no change of the task graph to be taken back"):
        delta.back()


def test_a_refused_change_leaves_nothing_to_undo() -> None:
    """Room that was made for it is kept."""
    delta = DeltaSimulation(chain(10))
    delta.change({9: TimedTask(0, 2.0, (8,))})
    before = delta.timeline
    refused = {k: TimedTask(1, 1.0, tuple(range(10))) for k in range(10, 60)} | {3: TimedTask(0, 1.0, (9,))}
    with pytest.raises(SimulationError, match="circle"):
        delta.change(refused)
    with pytest.raises(SimulationError, match="no change of the task graph to be taken back"):
        delta.back()
    assert delta.timeline == before
    delta.change({9: TimedTask(0, 1.0, (8,))})
    delta.back()
    assert delta.timeline == before


@settings(max_examples=fewer(50))
@given(names=st.lists(st.one_of(st.integers(-(2**63) + 1, 2**63 - 1), st.integers(0, 30).map(lambda k: k << 40)), max_size=60))
def test_names_are_found_after_other_names_come_and_go(names: list[int]) -> None:
    """A name that is there is taken away, and one that is not there is put; every third change is taken back."""
    delta, tasks = DeltaSimulation(TaskGraph({}, TWO)), Tasks()
    for step, name in enumerate(names):
        change = {name: None if name in tasks else TimedTask(0, 1.0)}
        delta.change(change)
        if step % 3 == 2:
            delta.back()
        else:
            tasks = changed(tasks, change)
        assert delta.graph.tasks == tasks


def test_arrays_grow_as_needed() -> None:
    """For more tasks than there were, and for more that they wait for, again and again."""
    delta = DeltaSimulation(chain(3))
    for k in range(3, 43):
        delta.change({k: TimedTask(1, 0.5, (1, k - 1))})
        delta.change({2: TimedTask(0, 1.0 + k, (1,))})
        delta.change({0: TimedTask(0, 1.0), k - 1: None, k: TimedTask(1, 0.5, (1,))} if k % 10 == 0 else {})
    assert len(delta.graph.tasks) == 39
    assert delta.timeline == full(delta.graph)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: None}, "task 2 waits for task 1, which is taken away"),
        ({77: None}, "task 77 is to be taken away, but is not there"),
        ({9: TimedTask(0, 1.0, (77,))}, "task 9 waits for task 77, which is not there"),
        ({9: TimedTask(0, 2.0, (8,)), 8: None}, "task 9 waits for task 8, which is taken away"),
        ({9: TimedTask(0, -1.0)}, "task 9 takes -1.0 seconds"),
        ({9: TimedTask(5, 1.0)}, "task 9 is on device 5"),
        ({3: TimedTask(0, 1.0, (9,))}, "circle"),
    ],
)
def test_an_impossible_change_changes_nothing(change: dict[int, TimedTask | None], message: str) -> None:
    delta = DeltaSimulation(chain(10))
    before = delta.timeline
    with pytest.raises(SimulationError, match=message):
        delta.change(change)
    assert delta.timeline == before
    delta.change({9: TimedTask(0, 5.0, (8,))})
    assert delta.makespan == 14
