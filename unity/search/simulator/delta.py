"""Delta simulation: after a change of some tasks, only what comes after the first difference is simulated again.

FlexFlow's algorithm 2 updates task by task, and takes a task up again as often as one of its predecessors changes. Here the loop
of the full simulation goes on from a mark before the first difference, so that every task is taken once, with all that it depends
on final. Tasks before the difference, and building the task graph, cost nothing; and where what follows is what was there before,
by some time later, it is not simulated again either, but moved (`rejoin`). The timeline is the same, to the last bit.

There would be little to spare in going from task to task: on FlexFlow's models nearly all that follows the first difference does
run at other times, up to a place where all devices wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from unity.search.simulator.full import scheduled
from unity.search.simulator.rejoin import Rejoin
from unity.search.simulator.schedule import Past
from unity.search.simulator.states import Node
from unity.search.simulator.tasks import SimulationError, Task, TaskGraph, check_tasks, circle, possible
from unity.search.simulator.ticks import exact
from unity.search.simulator.timeline import Timeline, timeline
from unity.uncollected import uncollected

Change = Mapping[int, Task | None]  # tasks to put under names, new or not; None takes one away


@dataclass(frozen=True, eq=False)
class _Before:
    """What takes a change back."""

    undo: Change
    gone: Mapping[int, Node]  # that it took away
    past: Past | None  # None: it changed nothing


class Delta:
    """A simulated task graph that can be changed. Raises SimulationError as `full` does."""

    @uncollected()
    def __init__(self, graph: TaskGraph) -> None:
        check_tasks(graph.tasks, graph.tasks, len(graph.devices))
        self.devices = graph.devices
        self._schedule = scheduled(graph, marked=True)
        self._exact = exact({task.seconds for task in graph.tasks.values()})
        self._before: _Before | None = None
        self.simulated = len(graph.tasks)  # tasks, for the last change

    @property
    def makespan(self) -> float:
        """Seconds until the last task has ended."""
        return self._schedule.makespan

    @property
    def graph(self) -> TaskGraph:
        """The task graph as it is now."""
        found = {name: node.task for name, node in self._schedule.nodes.items()}
        return TaskGraph({name: task for name, task in found.items() if task is not None}, self.devices)

    @property
    def timeline(self) -> Timeline:
        """When every task runs now."""
        return timeline(self.graph, self._schedule)

    @uncollected()
    def change(self, changes: Change) -> Change:
        """Changes tasks and simulates what follows. Gives the change that undoes this one.

        Raises:
            SimulationError: a task is not possible, or waits for one that is not there (any more) or that waits for it. Then
                nothing is changed.
        """
        undo, gone = dict[int, Task | None](), dict[int, Node]()
        for name, task in changes.items():
            node = self._schedule.nodes.get(name)
            undo[name] = None if node is None else node.task
            if task is None:
                if node is None:
                    raise SimulationError(f"task {name} is to be taken away, but is not there")
                gone[name] = node
        self._check(changes, gone)
        past, done = self._simulate(changes) if changes else (None, True)
        self._before = _Before(undo, gone, past)
        if not done:
            what = circle(self.graph.tasks)
            self.back()
            raise SimulationError(f"tasks wait for each other in a circle: {what}")
        return undo

    def back(self) -> None:
        """Takes the last change back. Nothing is simulated again: a search that rejects most of what it looks at saves that time.

        Raises:
            SimulationError: there was none, or it was taken back already.
        """
        before = self._before
        if before is None:
            raise SimulationError("there is no change of the task graph to be taken back")
        self._before = None
        if before.past is not None:
            self._schedule.replace(before.undo, before.gone)
            self._schedule.restore(before.past)

    def _check(self, changes: Change, gone: Mapping[int, Node]) -> None:
        nodes = self._schedule.nodes
        for name, node in gone.items():
            for n in (*node.alone, *node.joint):
                if n.name not in changes:
                    raise SimulationError(f"task {n.name} waits for task {name}, which is taken away")
        put = {name: task for name, task in changes.items() if task is not None}
        wanted = set[int]().union(*(task.before for task in put.values()))
        known = (nodes.keys() & wanted) - gone.keys() | (put.keys() & wanted)
        if wanted != known or not possible(put.values(), len(self.devices)):
            check_tasks(put, known, len(self.devices))

    def _simulate(self, changes: Change) -> tuple[Past, bool]:
        """What was overwritten, and whether no task waits for another for ever."""
        s = self._schedule
        if self._exact and not exact({task.seconds for task in changes.values() if task is not None}):
            self._exact = False
            s.settle()
        touched = s.replace(changes)
        state, past = s.back_to(s.first(touched), touched)
        rejoin = Rejoin(s, past, touched, self._exact)
        done = rejoin.run(state)
        self.simulated = s.taken(past.mark) - rejoin.taken_over
        return past, done
