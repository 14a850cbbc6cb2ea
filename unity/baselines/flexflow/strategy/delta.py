"""Delta simulation: after a change of some tasks, only what comes after the first difference is simulated again.

FlexFlow's algorithm 2 updates task by task, and takes a task up again as often as one of its predecessors changes. Here the loop
of the full simulation goes on from the moment of the first difference, so that every task is taken once, with all that it depends
on final. Tasks before the difference, and building the task graph, cost nothing. The timeline is the same, to the last bit.

On FlexFlow's models nearly all that follows the first difference does run at other times, but most of it only so much later or
earlier, all alike. Once it does, its times are moved without being simulated, and the loop goes on at the next task that changed.
"""

from __future__ import annotations

from unity.base.gc_pause import uncollected
from unity.search.simulator.schedule import Change, Past, Schedule
from unity.search.simulator.tasks import SimulationError, TaskGraph
from unity.search.simulator.timeline import Timeline, timeline


class Delta:
    """A simulated task graph that can be changed. Raises SimulationError as `full` does."""

    @uncollected()
    def __init__(self, graph: TaskGraph) -> None:
        self.devices = graph.devices
        self._schedule = Schedule(graph.tasks, len(graph.devices))
        self._before: Past | None = None
        self.simulated = len(graph.tasks)  # tasks, for the last change

    @property
    def makespan(self) -> float:
        """Seconds until the last task has ended."""
        return self._schedule.makespan

    @property
    def graph(self) -> TaskGraph:
        """The task graph as it is now."""
        return TaskGraph(self._schedule.tasks, self.devices)

    @property
    def timeline(self) -> Timeline:
        """When every task runs now."""
        return timeline(self.graph, self._schedule)

    @uncollected()
    def change(self, changes: Change) -> Change:
        """Changes tasks and simulates what follows. Gives the change that undoes this one.

        Raises:
            SimulationError: a task is not possible, or waits for one that is not there (any more) or that waits for it. Then
                nothing is changed, nor can an earlier change be taken back.
        """
        self._before = None  # what takes it back is of arrays that may have grown since
        self._before, self.simulated = self._schedule.change(changes)
        return self._before.undo

    def back(self) -> None:
        """Takes the last change back. Nothing is simulated again: a search that rejects most of what it looks at saves that time.

        Raises:
            SimulationError: there was none, or it was taken back already.
        """
        if self._before is None:
            raise SimulationError("there is no change of the task graph to be taken back")
        self._schedule.restore(self._before)
        self._before = None
