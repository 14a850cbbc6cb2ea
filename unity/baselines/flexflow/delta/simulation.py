"""The state of a simulation: tasks by number, when each runs, and what a change makes of that (FlexFlow, algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from unity.base.gc_pause import uncollected
from unity.baselines.flexflow.delta.columns import GONE, ByColumn, Columns, Numbers, columns_of
from unity.baselines.flexflow.delta.event_loop import NEVER, NONE, Counts, Line, Table, Times
from unity.baselines.flexflow.delta.task_table import (
    ABSENT,
    FULL,
    UNKNOWN,
    USED,
    Register,
    Was,
    advanced,
    link,
    registered,
    taken_back,
)
from unity.search.simulator.tasks import SimulationError, Task, TaskGraph, circle
from unity.search.simulator.timeline import Timeline

Change = Mapping[int, Task | None]  # tasks to put under names, new or not; None takes one away

ROOM = 1.5  # how much longer arrays become that are full
SLOTS = 2  # of the register, at least, for each task that there is room for
AGAIN = 4  # the same of places: a task that changes has others from then on
COLUMNS = 7  # of a table, that are by task
PLACES = Table._fields[COLUMNS:]


class Past(NamedTuple):
    """What takes a change back.

    Args:
        changed: the names of what changed.
        was: what the table said of these.
        used, total, times: what was in the schedule. The next change writes to these times.
    """

    changed: Numbers
    was: Was
    used: int
    total: float
    times: Times

    @property
    def undo(self) -> Change:
        """The tasks that were there, under the names that changed."""
        return ByColumn[Task | None](self._undo)

    def _undo(self) -> Columns:
        was = self.was
        numbers = was.device.astype(np.int64), was.seconds, was.nbytes, was.waits.astype(np.int64)
        return Columns(self.changed, *numbers, was.names)


class Schedule:
    """Tasks, and when each runs. Mutable: `change` changes tasks and brings all times up to date, `restore` takes that back.

    Raises:
        SimulationError: a task is not possible, or waits for one that is not there, or that waits for it.
    """

    def __init__(self, tasks: Mapping[int, Task], devices: int) -> None:
        self._register = Register(np.empty(1, np.int64), np.full(1, NONE, np.int32), np.empty(0, np.int32), np.zeros(2, np.int64))
        self._table, self._devices = _table(0, 0), devices
        self._times, self._spare = _times(0), _times(0)
        self._line = _line(0, devices)
        self._total = 0.0  # seconds of all tasks
        self._exact = True  # times are added without rounding
        self.change(tasks)

    @property
    def _rows(self) -> Numbers:
        """The numbers of all tasks, in the order of names."""
        rows = np.flatnonzero(self._table.device != GONE)
        return rows[np.argsort(self._table.name[rows])]

    @property
    def tasks(self) -> Mapping[int, Task]:
        """All tasks."""
        t, rows = self._table, self._rows
        found = t.name[t.before[_places(t.first[rows], t.waits[rows])]]
        columns = t.device[rows].astype(np.int64), t.seconds[rows], t.nbytes[rows], t.waits[rows].astype(np.int64)
        return ByColumn[Task](Columns(t.name[rows], *columns, found))

    @property
    def makespan(self) -> float:
        """Seconds until the last task has ended."""
        return float(self._times.end.max(initial=0.0))

    @property
    def taken(self) -> list[tuple[int, float, float]]:
        """All tasks in the order in which they are taken: each one's name, when it is ready, and when it ends."""
        t, times, rows = self._table, self._times, self._rows
        order = rows[np.lexsort((t.name[rows], times.level[rows], times.ready[rows]))]
        return list(zip(*(column[order].tolist() for column in (t.name, times.ready, times.end)), strict=True))

    def change(self, change: Change) -> tuple[Past, int]:
        """Puts tasks under names, or takes them away, and simulates what follows. Gives what takes it back, and how many tasks were
        simulated. Where a change is not possible, nothing is changed."""
        c = columns_of(change, self._devices)
        found = self._advanced(c)
        if found[0] == FULL:
            self._make_room(len(c.name), len(c.before))
            found = self._advanced(c)
        said, place, was, total, exact, taken = found
        if said == ABSENT:
            raise SimulationError(f"task {c.name[place]} is to be taken away, but is not there")
        if said == UNKNOWN:
            raise SimulationError(self._unknown(c, place))
        past = Past(c.name, was, int(self._register.sizes[USED]) - len(c.before), self._total, self._times)
        self._times, self._spare = self._spare, self._times
        self._total, self._exact = total, exact
        if taken == NONE:
            why = self._refusal()
            self.restore(past)
            raise SimulationError(why)
        return past, taken

    def _advanced(self, c: Columns) -> tuple[int, int, Was, float, bool, int]:
        """A change entered and followed, if there is room for it."""
        return advanced(c, self._exact, self._total, self._register, self._table, self._times, self._spare, self._line)

    def restore(self, past: Past) -> None:
        """All as it was before the last change. Nothing is simulated."""
        taken_back(past.changed, past.was, past.used, self._register, self._table)
        self._total, self._times, self._spare = past.total, past.times, self._times

    def _unknown(self, c: Columns, place: int) -> str:
        """Why a task of a change cannot wait for what is at a place in the list of what they wait for."""
        name, p = c.name[np.searchsorted(np.cumsum(c.waits), place, "right")], c.before[place]
        return f"task {name} waits for task {p}, which is {'taken away' if p in c.name else 'not there'}"

    def _refusal(self) -> str:
        """Why some tasks are never taken."""
        tasks = self.tasks
        for name, task in tasks.items():
            for p in task.before:
                if p not in tasks:
                    return f"task {name} waits for task {p}, which is taken away"
        return f"tasks wait for each other in a circle: {circle(tasks)}"

    def _make_room(self, tasks: int, waits: int) -> None:
        """Room for so many more tasks, which wait for so many."""
        free, used = self._register.sizes.tolist()
        if tasks > free:
            self._more_tasks(max(tasks - free, int(len(self._table.device) * (ROOM - 1))))
        if used + waits > len(self._table.before):
            self._more_places(waits)

    def _more_tasks(self, more: int) -> None:
        """Room for so many more tasks."""
        old, was, n = self._table, self._times, len(self._table.device)
        self._table, self._line = (
            _table(n + more, 0)._replace(**{f: getattr(old, f) for f in PLACES}),
            _line(n + more, self._devices),
        )
        self._times, self._spare = _times(n + more), _times(n + more)
        for column, before in (*zip(self._table, old[:COLUMNS], strict=False), *zip(self._times, was, strict=True)):
            column[:n] = before
        free, used = self._register.sizes.tolist()
        slots = 1 << (SLOTS * (n + more) - 1).bit_length()
        names, numbers = np.empty(slots, np.int64), np.full(slots, NONE, np.int32)
        registered(np.flatnonzero(self._table.device != GONE), self._table, names, numbers)
        stack = np.empty(n + more, np.int32)
        stack[:more], stack[more : more + free] = np.arange(n, n + more), self._register.free[:free]
        self._register = Register(names, numbers, stack, np.array([more + free, used]))

    def _more_places(self, waits: int) -> None:
        """Room for so many more that are waited for: what is not used any more is left out."""
        t, rows = self._table, np.flatnonzero(self._table.device != GONE)
        counts = t.waits[rows]
        used = int(counts.sum())
        before = np.zeros((len(PLACES), int(AGAIN * (used + waits))), np.int32)
        before[0, :used] = t.before[_places(t.first[rows], counts)]
        self._table = t._replace(**dict(zip(PLACES, before, strict=True)))
        t.first[rows], t.head[:] = np.cumsum(counts) - counts, NONE
        link(rows, self._table)
        self._register.sizes[USED] = used


def _places(first: Counts, counts: Counts) -> Numbers:
    """All places of ranges that begin at some and have so many, one range after the other."""
    ends = np.cumsum(counts)
    return np.repeat(first - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


def _table(tasks: int, places: int) -> Table:
    """A table of tasks that are not there yet."""
    device, first, waits, head = np.full((4, tasks), GONE, np.int32)
    waits[:] = 0
    seconds, nbytes = np.zeros((2, tasks))
    return Table(np.zeros(tasks, np.int64), device, seconds, nbytes, first, waits, head, *np.zeros((4, places), np.int32))


def _times(tasks: int) -> Times:
    """Times of tasks that are not there yet."""
    return Times(np.full(tasks, NEVER), np.zeros(tasks, np.int32), np.zeros(tasks))


def _line(tasks: int, devices: int) -> Line:
    """Room for what the loop knows."""
    missing, begun, queue, depth = np.empty((4, tasks), np.int32)
    latest, at = np.empty((2, tasks))
    return Line(missing, latest, begun, queue, at, depth, np.empty(tasks, np.int64), *np.empty((5, devices)))


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
        graph, order = self.graph, [list[int]() for _ in self.devices]
        ready, start, end = dict[int, float](), dict[int, float](), dict[int, float]()
        free = [0.0] * len(self.devices)
        for name, ready_at, ends_at in self._schedule.taken:
            device = graph.tasks[name].device
            order[device].append(name)
            ready[name], start[name], end[name] = ready_at, max(ready_at, free[device]), ends_at
            free[device] = ends_at
        return Timeline(graph, ready, start, end, tuple(map(tuple, order)))

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


@uncollected()
def makespan(graph: TaskGraph) -> float:
    """Return the seconds that a task graph takes. Raises as `Delta` does."""
    return Schedule(graph.tasks, len(graph.devices)).makespan
