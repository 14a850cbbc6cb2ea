"""A simulated task graph that can be changed: which tasks there are, when each runs, and the effect of a change.

After a change only the tasks after the first difference are simulated again. FlexFlow's algorithm 2 updates task by task, and
revisits a task each time one of its predecessors changes. Here the event loop of the full simulation (algorithm 1) resumes at the
first difference, so every task is taken once, when all that it depends on is final. Tasks before the difference cost nothing, nor
does rebuilding the graph. The timeline equals that of a full simulation to the last bit.

On FlexFlow's models most tasks after the first difference do run at other times, but nearly all of them earlier or later by the
same offset. Once that is so, their times are shifted without simulation, and the loop resumes at the next changed task.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from unity.base.gc_pause import uncollected
from unity.baselines.flexflow.delta.columns import GONE, ByColumn, Columns, Numbers, columns_of
from unity.baselines.flexflow.delta.event_loop import NEVER, NONE, Counts, EventLoopState, TaskTable, Times
from unity.baselines.flexflow.delta.task_table import (
    ABSENT,
    FULL,
    UNKNOWN,
    USED,
    OldEntries,
    Register,
    apply_change,
    fill_register,
    link,
    revert_change,
)
from unity.search.simulator.tasks import SimulationError, TaskGraph, TimedTask, cycle_text
from unity.search.simulator.timeline import Timeline

Change = Mapping[int, TimedTask | None]  # tasks to put under names, new or not; None removes one

ROOM = 1.5  # factor by which full arrays grow
SLOTS = 2  # slots of the register, at least, for each task that has room
AGAIN = 4  # the same for slots of the table: a changed task gets new ones
COLUMNS = 7  # fields of a table that are indexed by task; the others are indexed by slot
PLACES = TaskTable._fields[COLUMNS:]


class Undo(NamedTuple):
    """The information that undoes a change.

    Args:
        changed: the names of the changed tasks.
        was: their entries before the change.
        used: how many slots of the table were used.
        total: the seconds of all tasks.
        times: when tasks ran. The next change overwrites these arrays.
    """

    changed: Numbers
    was: OldEntries
    used: int
    total: float
    times: Times

    @property
    def undo(self) -> Change:
        """The change that restores the old tasks under the changed names."""
        return ByColumn[TimedTask | None](self._undo)

    def _undo(self) -> Columns:
        was = self.was
        numbers = was.device.astype(np.int64), was.seconds, was.nbytes, was.waits.astype(np.int64)
        return Columns(self.changed, *numbers, was.names)


class TaskSchedule:
    """Tasks, and when each runs. Mutable: `change` changes tasks and updates all times, `restore` undoes that.

    Raises:
        SimulationError: a task is impossible, or waits for one that does not exist, or that waits for it.
    """

    def __init__(self, tasks: Mapping[int, TimedTask], devices: int) -> None:
        self._register = Register(np.empty(1, np.int64), np.full(1, NONE, np.int32), np.empty(0, np.int32), np.zeros(2, np.int64))
        self._table, self._devices = _table(0, 0), devices
        self._times, self._spare = _times(0), _times(0)
        self._state = _loop_state(0, devices)
        self._total = 0.0  # seconds of all tasks
        self._exact = True  # times are added without rounding
        self.change(tasks)

    @property
    def _rows(self) -> Numbers:
        """The numbers of all tasks, in the order of names."""
        rows = np.flatnonzero(self._table.device != GONE)
        return rows[np.argsort(self._table.name[rows])]

    @property
    def tasks(self) -> Mapping[int, TimedTask]:
        """All tasks by name."""
        t, rows = self._table, self._rows
        predecessors = t.name[t.before[_slots_of_ranges(t.first[rows], t.waits[rows])]]
        columns = t.device[rows].astype(np.int64), t.seconds[rows], t.nbytes[rows], t.waits[rows].astype(np.int64)
        return ByColumn[TimedTask](Columns(t.name[rows], *columns, predecessors))

    @property
    def makespan(self) -> float:
        """Seconds until the last task has ended."""
        return float(self._times.end.max(initial=0.0))

    @property
    def taken(self) -> list[tuple[int, float, float]]:
        """Each task's name, ready time and end, in the order in which tasks are taken."""
        t, times, rows = self._table, self._times, self._rows
        order = rows[np.lexsort((t.name[rows], times.level[rows], times.ready[rows]))]
        return list(zip(*(column[order].tolist() for column in (t.name, times.ready, times.end)), strict=True))

    def change(self, change: Change) -> tuple[Undo, int]:
        """Put tasks under names, or remove them, and simulate the effects. An impossible change changes nothing.

        Returns the information that undoes the change, and how many tasks were simulated.
        """
        c = columns_of(change, self._devices)
        result = self._apply(c)
        if result[0] == FULL:
            self._make_room(len(c.name), len(c.before))
            result = self._apply(c)
        status, place, was, total, exact, taken = result
        if status == ABSENT:
            raise SimulationError(f"task {c.name[place]} is to be taken away, but is not there")
        if status == UNKNOWN:
            raise SimulationError(self._missing_predecessor(c, place))
        past = Undo(c.name, was, int(self._register.sizes[USED]) - len(c.before), self._total, self._times)
        self._times, self._spare = self._spare, self._times
        self._total, self._exact = total, exact
        if taken == NONE:
            why = self._reason()
            self.restore(past)
            raise SimulationError(why)
        return past, taken

    def _apply(self, c: Columns) -> tuple[int, int, OldEntries, float, bool, int]:
        """Enter a change and simulate its effects, if there is room for it."""
        return apply_change(c, self._exact, self._total, self._register, self._table, self._times, self._spare, self._state)

    def restore(self, past: Undo) -> None:
        """Undo the last change without simulating anything."""
        revert_change(past.changed, past.was, past.used, self._register, self._table)
        self._total, self._times, self._spare = past.total, past.times, self._times

    def _missing_predecessor(self, c: Columns, place: int) -> str:
        """Return the message for a predecessor that does not exist, given its index in the change."""
        name, p = c.name[np.searchsorted(np.cumsum(c.waits), place, "right")], c.before[place]
        return f"task {name} waits for task {p}, which is {'taken away' if p in c.name else 'not there'}"

    def _reason(self) -> str:
        """Return the reason why some tasks are never taken."""
        tasks = self.tasks
        for name, task in tasks.items():
            for p in task.before:
                if p not in tasks:
                    return f"task {name} waits for task {p}, which is taken away"
        return f"tasks wait for each other in a circle: {cycle_text(tasks)}"

    def _make_room(self, tasks: int, waits: int) -> None:
        """Make room for more tasks and for more predecessors."""
        free, used = self._register.sizes.tolist()
        if tasks > free:
            self._more_tasks(max(tasks - free, int(len(self._table.device) * (ROOM - 1))))
        if used + waits > len(self._table.before):
            self._more_slots(waits)

    def _more_tasks(self, more: int) -> None:
        """Make room for more tasks."""
        old, was, n = self._table, self._times, len(self._table.device)
        self._table, self._state = (
            _table(n + more, 0)._replace(**{f: getattr(old, f) for f in PLACES}),
            _loop_state(n + more, self._devices),
        )
        self._times, self._spare = _times(n + more), _times(n + more)
        for column, before in (*zip(self._table, old[:COLUMNS], strict=False), *zip(self._times, was, strict=True)):
            column[:n] = before
        free, used = self._register.sizes.tolist()
        slots = 1 << (SLOTS * (n + more) - 1).bit_length()
        names, numbers = np.empty(slots, np.int64), np.full(slots, NONE, np.int32)
        fill_register(np.flatnonzero(self._table.device != GONE), self._table, names, numbers)
        stack = np.empty(n + more, np.int32)
        stack[:more], stack[more : more + free] = np.arange(n, n + more), self._register.free[:free]
        self._register = Register(names, numbers, stack, np.array([more + free, used]))

    def _more_slots(self, waits: int) -> None:
        """Make room for more predecessors, and drop unused slots."""
        t, rows = self._table, np.flatnonzero(self._table.device != GONE)
        counts = t.waits[rows]
        used = int(counts.sum())
        before = np.zeros((len(PLACES), int(AGAIN * (used + waits))), np.int32)
        before[0, :used] = t.before[_slots_of_ranges(t.first[rows], counts)]
        self._table = t._replace(**dict(zip(PLACES, before, strict=True)))
        t.first[rows], t.head[:] = np.cumsum(counts) - counts, NONE
        link(rows, self._table)
        self._register.sizes[USED] = used


def _slots_of_ranges(first: Counts, counts: Counts) -> Numbers:
    """Return the slots of several ranges, one range after the other."""
    ends = np.cumsum(counts)
    return np.repeat(first - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)


def _table(tasks: int, places: int) -> TaskTable:
    """Return a table of tasks that do not exist yet."""
    device, first, waits, head = np.full((4, tasks), GONE, np.int32)
    waits[:] = 0
    seconds, nbytes = np.zeros((2, tasks))
    return TaskTable(np.zeros(tasks, np.int64), device, seconds, nbytes, first, waits, head, *np.zeros((4, places), np.int32))


def _times(tasks: int) -> Times:
    """Return the times of tasks that do not exist yet."""
    return Times(np.full(tasks, NEVER), np.zeros(tasks, np.int32), np.zeros(tasks))


def _loop_state(tasks: int, devices: int) -> EventLoopState:
    """Return the state of a loop that has not started."""
    missing, begun, queue, depth = np.empty((4, tasks), np.int32)
    latest, at = np.empty((2, tasks))
    return EventLoopState(missing, latest, begun, queue, at, depth, np.empty(tasks, np.int64), *np.empty((5, devices)))


class DeltaSimulation:
    """A simulated task graph that can be changed.

    Raises:
        SimulationError: the graph is impossible, as in `search.simulator.timeline.full`.
    """

    @uncollected()
    def __init__(self, graph: TaskGraph) -> None:
        self.devices = graph.devices
        self._schedule = TaskSchedule(graph.tasks, len(graph.devices))
        self._before: Undo | None = None
        self.simulated = len(graph.tasks)  # number of tasks simulated for the last change

    @property
    def makespan(self) -> float:
        """Seconds until the last task has ended."""
        return self._schedule.makespan

    @property
    def graph(self) -> TaskGraph:
        """The task graph in its current state."""
        return TaskGraph(self._schedule.tasks, self.devices)

    @property
    def timeline(self) -> Timeline:
        """The times of all tasks in the current state."""
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
        """Change tasks and simulate the effects. Returns the change that undoes this one.

        Raises:
            SimulationError: a task is impossible, or waits for one that does not exist (any more) or that waits for it. Then
                nothing is changed, and an earlier change can no longer be undone either.
        """
        self._before = None  # the change may replace its arrays by larger ones
        self._before, self.simulated = self._schedule.change(changes)
        return self._before.undo

    def back(self) -> None:
        """Undo the last change without simulation: most proposals of a search are rejected.

        Raises:
            SimulationError: there was no change, or it has been undone already.
        """
        if self._before is None:
            raise SimulationError("there is no change of the task graph to be taken back")
        self._schedule.restore(self._before)
        self._before = None


@uncollected()
def makespan(graph: TaskGraph) -> float:
    """Return the seconds that a task graph takes.

    Raises:
        SimulationError: the graph is impossible, as in `search.simulator.timeline.full`.
    """
    return TaskSchedule(graph.tasks, len(graph.devices)).makespan
