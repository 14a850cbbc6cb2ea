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
from unity.search.simulator.tasks import SimulationError, Task, TaskGraph, check_tasks, circle
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
        self._exact = exact(task.seconds for task in graph.tasks.values())
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
        nodes = self._schedule.nodes
        for name, task in changes.items():
            if task is None and name not in nodes:
                raise SimulationError(f"task {name} is to be taken away, but is not there")
        self._check(changes)
        undo = {name: nodes[name].task if name in nodes else None for name in changes}
        gone = {name: nodes[name] for name, task in changes.items() if task is None}
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

    def _check(self, changes: Change) -> None:
        nodes = self._schedule.nodes
        put = {name: task for name, task in changes.items() if task is not None}
        gone = changes.keys() - put.keys()
        for name in gone:
            for n in (*nodes[name].alone, *nodes[name].joint):
                if n.name not in changes:
                    raise SimulationError(f"task {n.name} waits for task {name}, which is taken away")
        wanted = {p for task in put.values() for p in task.before}
        known = {p for p in wanted if p in put or (p in nodes and p not in gone)}
        check_tasks(put, known, len(self.devices))

    def _simulate(self, changes: Change) -> tuple[Past, bool]:
        """What was overwritten, and whether no task waits for another for ever."""
        s = self._schedule
        touched = s.replace(changes)
        state, past = s.back_to(s.first(touched), touched)
        self._exact = self._exact and exact(task.seconds for task in changes.values() if task is not None)
        rejoin = Rejoin(s, past, touched, self._exact)
        done = rejoin.run(state)
        self.simulated = len(s.order) - rejoin.begun - rejoin.moved
        return past, done
