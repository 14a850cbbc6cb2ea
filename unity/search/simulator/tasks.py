"""The task graph: which task runs on which device, for how long, and after which others (FlexFlow, section 5.1 and table 3).

Links are devices like any other, so computation and communication overlap where they use different ones. A device runs its tasks
first in, first out, in the order of their keys:

    (ready time, level, name)

A task is ready when the last of its predecessors has ended. Its *level* is 0, or, if its last predecessor became ready at that very
moment (because it takes no time), one more than that predecessor's. So a predecessor's key is lower than its successors', whatever
the names and however short the tasks; and because a task's name does not depend on other tasks, ties are broken in the same way
after a change. Keys, starts and ends of all tasks are determined uniquely (by induction over keys), which is why full and delta
simulation agree to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import networkx as nx

from unity.base.errors import UnityError

Names = tuple[int, ...]


class SimulationError(UnityError, ValueError):
    """A task graph, a topology or a strategy cannot be simulated. The message names what is wrong with it."""

    docs = "costs"


class TimedTask(NamedTuple):
    """A task: its device (by number), its run time in seconds, the names of its predecessors, and the bytes that it sends."""

    device: int
    seconds: float
    before: Names = ()
    nbytes: float = 0.0


@dataclass(frozen=True)
class Resource:
    """A device of the task graph. `kind` is "compute", "link", or "barrier", a device for tasks that take no time."""

    name: str
    kind: str


@dataclass(frozen=True)
class TaskGraph:
    """Tasks by name (any integers), and the devices that they run on, by number."""

    tasks: Mapping[int, TimedTask]
    devices: tuple[Resource, ...]


def union(names: Iterable[Names]) -> Names:
    """Return all names once, in order of appearance."""
    return tuple(dict.fromkeys(name for group in names for name in group))


def check_tasks(tasks: Mapping[int, TimedTask], devices: int) -> None:
    """Raise SimulationError unless every task has one of the devices and a finite time."""
    for name, task in tasks.items():
        if not 0 <= task.device < devices:
            raise SimulationError(f"task {name} is on device {task.device}; there are {devices}, numbered from 0")
        if not 0 <= task.seconds < math.inf:
            raise SimulationError(f"task {name} takes {task.seconds!r} seconds, which must be a finite number, zero or above")


def cycle_text(tasks: Mapping[int, TimedTask]) -> str:
    """Return a cycle of tasks that wait for each other, as text."""
    graph = nx.DiGraph([(p, name) for name, task in tasks.items() for p in task.before])
    return " → ".join(str(p) for p, _ in nx.find_cycle(graph))
