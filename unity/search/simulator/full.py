"""Full simulation: every task of a task graph, in the order in which they become ready (FlexFlow, algorithm 1)."""

from __future__ import annotations

from unity.search.simulator.schedule import Schedule
from unity.search.simulator.tasks import SimulationError, TaskGraph, check_tasks, circle
from unity.search.simulator.timeline import Timeline, timeline
from unity.uncollected import uncollected


@uncollected()
def full(graph: TaskGraph) -> Timeline:
    """The timeline of a task graph.

    Raises:
        SimulationError: a task has no device, no possible run time, or a predecessor that is not there; or tasks wait for each
            other in a circle.
    """
    check_tasks(graph.tasks, graph.tasks, len(graph.devices))
    return timeline(graph, scheduled(graph, marked=False))


@uncollected()
def makespan(graph: TaskGraph) -> float:
    """Seconds that a task graph takes: what a search asks for. Raises as `full` does."""
    check_tasks(graph.tasks, graph.tasks, len(graph.devices))
    return scheduled(graph, marked=False).makespan


def scheduled(graph: TaskGraph, marked: bool) -> Schedule:
    """A schedule of a checked task graph, with marks or without. Raises SimulationError if tasks wait in a circle."""
    schedule = Schedule(graph.tasks, len(graph.devices))
    state = schedule.beginning()
    schedule.leave(state)
    schedule.run(state, marked=marked)
    if schedule.taken() < len(schedule.nodes):
        raise SimulationError(f"tasks wait for each other in a circle: {circle(graph.tasks)}")
    return schedule
