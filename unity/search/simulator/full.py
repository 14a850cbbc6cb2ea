"""Full simulation: every task of a task graph, in the order in which they become ready (FlexFlow, algorithm 1)."""

from __future__ import annotations

from unity.base.gc_pause import uncollected
from unity.search.simulator.schedule import Schedule
from unity.search.simulator.tasks import TaskGraph
from unity.search.simulator.timeline import Timeline, timeline


@uncollected()
def full(graph: TaskGraph) -> Timeline:
    """The timeline of a task graph.

    Raises:
        SimulationError: a task has no device, no possible run time, or a predecessor that is not there; or tasks wait for each
            other in a circle.
    """
    return timeline(graph, Schedule(graph.tasks, len(graph.devices)))


@uncollected()
def makespan(graph: TaskGraph) -> float:
    """Seconds that a task graph takes: what a search asks for. Raises as `full` does."""
    return Schedule(graph.tasks, len(graph.devices)).makespan
