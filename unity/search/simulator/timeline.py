"""What a simulation finds: when every task runs, and what follows for devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from unity.search.simulator.schedule import Schedule
from unity.search.simulator.tasks import TaskGraph


@dataclass(frozen=True)
class Timeline:
    """Seconds at which every task is ready, starts and ends, and every device's tasks in the order in which it runs them."""

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
        """Bytes that are sent over each device (only links send any)."""
        return tuple(sum(self.graph.tasks[name].nbytes for name in names) for names in self.order)


def timeline(graph: TaskGraph, schedule: Schedule) -> Timeline:
    """What a schedule says of the graph that it was run for."""
    order: list[list[int]] = [[] for _ in graph.devices]
    ready, start, end = dict[int, float](), dict[int, float](), dict[int, float]()
    free = [0.0] * len(graph.devices)
    for name, readied, ended in schedule.taken:
        d = graph.tasks[name].device
        order[d].append(name)
        ready[name], start[name], end[name] = readied, max(readied, free[d]), ended
        free[d] = ended
    return Timeline(graph, ready, start, end, tuple(map(tuple, order)))
