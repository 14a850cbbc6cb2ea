"""The state of a simulation: tasks by number, when each runs, and what a change makes of that (FlexFlow, algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from unity.search.simulator.columns import GONE, ByColumn, Columns, Numbers, columns_of
from unity.search.simulator.entry import WAITED, link, numbered, unlink, written
from unity.search.simulator.loop import NEVER, NONE, Counts, Line, Table, Times, follow
from unity.search.simulator.tasks import SimulationError, Task, circle
from unity.search.simulator.ticks import without_rounding

Change = Mapping[int, Task | None]  # tasks to put under names, new or not; None takes one away

ROOM = 1.5  # how much longer arrays become that are full
COLUMNS = 6  # of a table, that are of tasks themselves
SECONDS = Table._fields.index("seconds")


@dataclass(frozen=True, eq=False)
class Past:
    """What takes a change back.

    Args:
        changed: the names of what changed, and `rows` their numbers.
        columns: what the table said of these.
        before: the table's list of what tasks wait for, in which what was taken is not written to again.
        names, numbers, free, used, total, times: what was in the schedule.
    """

    changed: Numbers
    rows: Numbers
    columns: tuple[NDArray, ...]
    before: Counts
    names: Numbers
    numbers: Numbers
    free: Numbers
    used: int
    total: float
    times: Times

    @cached_property
    def undo(self) -> Change:
        """The tasks that were there, under the names that changed."""
        return ByColumn[Task | None](self._undo)

    def _undo(self) -> Columns:
        name = np.zeros(len(self.numbers) + len(self.free), np.int64)
        name[self.numbers] = self.names
        return _columns(self.changed, self.columns, self.before, name)


class Schedule:
    """Tasks, and when each runs. Mutable: `change` changes tasks and brings all times up to date, `restore` takes that back.

    Raises:
        SimulationError: a task is not possible, or waits for one that is not there, or that waits for it.
    """

    def __init__(self, tasks: Mapping[int, Task], devices: int) -> None:
        self._names, self._numbers, self._free = np.empty((3, 0), np.int64)  # of tasks, in the order of names; of no task
        self._table, self._times, self._devices = _table(0, 0), _times(0), devices
        self._line = _line(0, devices)
        self._used = 0  # places in the table
        self._total = 0.0  # seconds of all tasks
        self._exact = True  # times are added without rounding
        self.change(tasks)

    @property
    def tasks(self) -> Mapping[int, Task]:
        """All tasks."""
        t = self._table
        return ByColumn[Task](_columns(self._names, tuple([column[self._numbers] for column in t[:COLUMNS]]), t.before, t.name))

    @property
    def makespan(self) -> float:
        """Seconds until the last task has ended."""
        return float(self._times.end.max(initial=0.0))

    @property
    def taken(self) -> list[tuple[int, float, float]]:
        """All tasks in the order in which they are taken: each one's name, when it is ready, and when it ends."""
        t, times = self._table, self._times
        order = np.lexsort((t.name, times.level, times.ready))[: len(self._names)]  # what is gone is NEVER ready
        return list(zip(*(column[order].tolist() for column in (t.name, times.ready, times.end)), strict=True))

    def change(self, change: Change) -> tuple[Past, int]:
        """Puts tasks under names, or takes them away, and simulates what follows. Gives what takes it back, and how many tasks were
        simulated. Where a change is not possible, nothing is changed."""
        c = columns_of(change, self._devices)
        self._make_room(len(c.name), len(c.before))
        strange, rows, names, numbers, free = numbered(c, self._names, self._numbers, self._free)
        if strange != NONE:
            raise SimulationError(f"task {c.name[strange]} is to be taken away, but is not there")
        t = self._table
        columns = tuple([column[rows] for column in t[:COLUMNS]])
        register = self._names, self._numbers, self._free
        past = Past(c.name, rows, columns, t.before, *register, self._used, self._total, self._times)
        unknown = written(c, rows, names, numbers, self._used, t)
        if unknown >= 0:
            raise SimulationError(self._unknown(c, unknown))
        self._names, self._numbers, self._free, self._used = names, numbers, free, self._used + len(c.before)
        ready, level, end = self._times
        self._times = Times(ready.copy(), level.copy(), end.copy())
        self._total += float(c.seconds.sum() - columns[SECONDS].sum())
        self._exact = self._exact and without_rounding(c.seconds, self._total)
        taken = NONE if unknown == WAITED else follow(self._exact, rows, t, self._times, self._line)
        if taken == NONE:
            found = self._refusal()
            self.restore(past)
            raise SimulationError(found)
        return past, taken

    def restore(self, past: Past) -> None:
        """All as it was before the last change. Nothing is simulated."""
        unlink(past.rows, self._table)
        for column, before in zip(self._table, past.columns, strict=False):
            column[past.rows] = before
        link(past.rows, self._table)
        self._names, self._numbers, self._free = past.names, past.numbers, past.free
        self._used, self._total, self._times = past.used, past.total, past.times

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
        t, n = self._table, len(self._table.device)
        more = max(tasks - len(self._free), int(n * (ROOM - 1))) if tasks > len(self._free) else 0
        full = self._used + waits > len(t.before)
        if not more and not full:
            return
        rows = self._numbers
        counts = t.waits[rows]
        places = int(ROOM * (counts.sum() + waits)) if full else len(t.before)
        old, self._table = t, _table(n + more, places)
        for column, before in zip(self._table, old[:COLUMNS], strict=False):
            column[:n] = before
        self._used = int(counts.sum())
        self._table.before[: self._used] = old.before[_places(old.first[rows], counts)]
        self._table.first[rows] = np.cumsum(counts) - counts
        link(rows, self._table)
        was, self._times, self._line = self._times, _times(n + more), _line(n + more, self._devices)
        for column, before in zip(self._times, was, strict=True):
            column[:n] = before
        self._free = np.append(self._free, np.arange(n, n + more))


def _columns(names: Numbers, columns: tuple[NDArray, ...], before: Counts, name: Numbers) -> Columns:
    """Tasks with these names, of which a table says so much; `before`: its list of what tasks wait for; `name`: tasks' names."""
    _, device, seconds, nbytes, first, waits = columns
    found = name[before[_places(first, waits)]]
    return Columns(names, device.astype(np.int64), seconds, nbytes, waits.astype(np.int64), found)


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
