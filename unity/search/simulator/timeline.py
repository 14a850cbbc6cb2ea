"""The full simulation of a task graph, and its result: when every task runs (FlexFlow, algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

from unity.base.gc_pause import uncollected
from unity.search.simulator.tasks import SimulationError, TaskGraph, check_tasks, cycle_text


@dataclass(frozen=True)
class Timeline:
    """Seconds at which every task is ready, starts and ends, and each device's tasks in the order in which it runs them."""

    graph: TaskGraph
    ready: Mapping[int, float]
    start: Mapping[int, float]
    end: Mapping[int, float]
    order: tuple[tuple[int, ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last task has ended."""
        return max(self.end.values(), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds for which each device runs tasks."""
        return tuple(sum(self.graph.tasks[name].seconds for name in names) for names in self.order)

    @cached_property
    def nbytes(self) -> tuple[float, ...]:
        """Bytes sent over each device (only links send any)."""
        return tuple(sum(self.graph.tasks[name].nbytes for name in names) for names in self.order)


@uncollected()
def full(graph: TaskGraph) -> Timeline:
    """Simulate a task graph: take its tasks from a heap in the order of their keys (see `tasks`).

    Raises:
        SimulationError: a task has no device, no possible run time, or a predecessor that does not exist; or tasks wait for each
            other in a cycle.
    """
    tasks = graph.tasks
    check_tasks(tasks, len(graph.devices))
    users: dict[int, list[int]] = {name: [] for name in tasks}
    for name, task in tasks.items():
        for predecessor in task.before:
            if predecessor not in users:
                raise SimulationError(f"task {name} waits for task {predecessor}, which is not there")
            users[predecessor].append(name)
    missing = {name: len(task.before) for name, task in tasks.items()}  # predecessors that have not been taken
    ready = dict.fromkeys(tasks, 0.0)  # when the last predecessor taken so far ends
    start, end = dict[int, float](), dict[int, float]()
    order: list[list[int]] = [[] for _ in graph.devices]
    free = [0.0] * len(graph.devices)
    heap = [(0.0, 0, name) for name, task in tasks.items() if not task.before]
    heapify(heap)
    while heap:
        now, level, name = heappop(heap)
        device, seconds, _, _ = tasks[name]
        order[device].append(name)
        start[name] = begins = max(free[device], now)
        free[device] = end[name] = ends = begins + seconds
        for user in users[name]:
            missing[user] -= 1
            if ends > ready[user]:
                ready[user] = ends
            if not missing[user]:
                moment = ready[user]
                heappush(heap, (moment, level + 1 if moment == now else 0, user))
    if len(end) < len(tasks):
        raise SimulationError(f"tasks wait for each other in a circle: {cycle_text(tasks)}")
    return Timeline(graph, ready, start, end, tuple(map(tuple, order)))
