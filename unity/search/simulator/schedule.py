"""The state of a simulation: tasks by number, when each runs, and what a change makes of that (FlexFlow, algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from unity.search.simulator.loop import NEVER, NONE, Changed, Line, Table, Times, first_difference, follow, line_up, link, unlink
from unity.search.simulator.tasks import LOW, Names, SimulationError, Task, check_tasks, circle, possible
from unity.search.simulator.ticks import without_rounding

Change = Mapping[int, Task | None]  # tasks to put under names, new or not; None takes one away

GONE = -1  # the device of a task that is not there
ROOM = 1.5  # how much longer arrays become that are full
COLUMNS = 6  # of a table, that are of tasks themselves
NOTHING: tuple[Sequence[int], Sequence[float], Sequence[Names], Sequence[float]] = (), (), (), ()  # of no tasks


@dataclass(frozen=True, eq=False)
class Past:
    """What takes a change back.

    Args:
        undo: the tasks that were there, under the names that changed.
        lost: the numbers of the names that were taken away.
        rows: the numbers of what changed; what the table says of those was `columns`.
        times, free, used: what was in the schedule.
    """

    undo: Change
    lost: Mapping[int, int]
    rows: NDArray[np.int64]
    columns: tuple[NDArray, ...]
    times: Times
    free: list[int]
    used: int


class Schedule:
    """Tasks, and when each runs. Mutable: `change` changes tasks and brings all times up to date, `restore` takes that back.

    Raises:
        SimulationError: a task is not possible, or waits for one that is not there, or that waits for it.
    """

    def __init__(self, tasks: Mapping[int, Task], devices: int) -> None:
        self.tasks: dict[int, Task] = {}
        self._number: dict[int, int] = {}  # by name
        self._free: list[int] = []  # numbers that no task has
        self._table, self._times, self._devices = _table(0, 0), _times(0), devices
        self._line = _line(0, devices)
        self._used = 0  # places in the table
        self._exact = True  # times are added without rounding
        self.change(tasks)

    @property
    def makespan(self) -> float:
        """Seconds until the last task has ended."""
        return float(self._times.end.max(initial=0.0))

    @property
    def taken(self) -> list[tuple[int, float, float]]:
        """All tasks in the order in which they are taken: each one's name, when it is ready, and when it ends."""
        t, times = self._table, self._times
        order = np.lexsort((t.low, t.high, times.level, times.ready))[: len(self.tasks)]  # what is gone is NEVER ready
        high, low, ready, end = (column[order].tolist() for column in (t.high, t.low, times.ready, times.end))
        return [((a << LOW) + b, r, e) for a, b, r, e in zip(high, low, ready, end, strict=True)]

    def change(self, change: Change) -> tuple[Past, int]:
        """Puts tasks under names, or takes them away, and simulates what follows. Gives what takes it back, and how many tasks were
        simulated. Where a change is not possible, nothing is changed."""
        put = {name: task for name, task in change.items() if task is not None}
        past = self._named(put, change)
        try:
            self._write(put, past)
            return past, self._follow(past.rows)
        except SimulationError:
            self.restore(past)
            raise

    def restore(self, past: Past) -> None:
        """All as it was before the last change. Nothing is simulated."""
        for name, task in past.undo.items():
            if task is None:
                del self.tasks[name], self._number[name]
            else:
                self.tasks[name] = task
        self._number |= past.lost
        unlink(past.rows, self._table)
        for column, before in zip(self._table, past.columns, strict=False):
            column[past.rows] = before
        link(past.rows, self._table)
        self._times, self._free, self._used = past.times, past.free, past.used

    def _named(self, put: Mapping[int, Task], change: Change) -> Past:
        """Gives new tasks numbers, and takes those away of tasks that are gone."""
        tasks, number = self.tasks, self._number
        undo = {name: tasks.get(name) for name in change}
        gone = [name for name, task in change.items() if task is None]
        for name in gone:
            if undo[name] is None:
                raise SimulationError(f"task {name} is to be taken away, but is not there")
        new = [name for name in put if undo[name] is None]
        self._make_room(len(new), sum([len(task.before) for task in put.values()]))
        free, used = self._free, self._used
        number.update(zip(new, free, strict=False))
        rows = np.array([number[name] for name in (*put, *gone)], np.int64)
        lost = {name: number.pop(name) for name in gone}
        self._free = [*free[len(new) :], *lost.values()]
        tasks |= put
        for name in gone:
            del tasks[name]
        columns, times = tuple([column[rows] for column in self._table[:COLUMNS]]), self._times
        self._times = Times(times.ready.copy(), times.level.copy(), times.end.copy())
        return Past(undo, lost, rows, columns, times, free, used)

    def _write(self, put: Mapping[int, Task], past: Past) -> None:
        """Says what tasks are that were put under names; others that changed are gone."""
        number, undo = self._number, past.undo
        device, seconds, before, _ = zip(*put.values(), strict=True) if put else NOTHING
        wired = {name: after for name, after in zip(put, before, strict=True) if (t := undo[name]) is None or t.before != after}
        waits = [number.get(p, GONE) for names in wired.values() for p in names]
        if put and (GONE in waits or not possible(put, device, seconds, self._devices)):
            check_tasks(put, number, self._devices)
        t, rows, gone, wires = self._table, past.rows[: len(put)], past.rows[len(put) :], [number[name] for name in wired]
        unlink(past.rows, t)
        t.device[rows], t.seconds[rows] = device, seconds
        t.device[gone], t.seconds[gone], t.waits[gone] = GONE, 0.0, 0
        short = not put or (max(put) < 1 << LOW and min(put) >= 0)
        t.high[rows], t.low[rows] = (0, list(put)) if short else zip(*[divmod(name, 1 << LOW) for name in put], strict=True)
        counts = np.array([len(names) for names in wired.values()], np.int64)
        t.first[wires], t.waits[wires] = self._used + np.cumsum(counts) - counts, counts
        t.before[self._used : self._used + len(waits)] = waits
        self._used += len(waits)
        link(past.rows, t)
        self._exact = self._exact and without_rounding(t.seconds[rows], float(t.seconds.sum()))
        if (t.head[gone] != NONE).any():
            self._refuse()

    def _follow(self, rows: NDArray[np.int64]) -> int:
        """Simulates what follows a change; gives how many tasks that is."""
        t, times, line = self._table, self._times, self._line
        changed = Changed(rows.copy(), times.ready[rows], times.end[rows])
        times.ready[rows], times.end[rows] = NEVER, np.where(t.device[rows] == GONE, 0.0, NEVER)
        taken, rest = 0, len(rows)
        while rest > 0:
            since = first_difference(changed, t, times)
            begun, left = line_up(since, changed.rows, t, times, line)
            now, rest = follow(since, self._exact, begun, changed, t, times, line)
            if rest == NONE and now < left:
                self._refuse()
            changed, taken = Changed(changed.rows[:rest], changed.ready[:rest], changed.end[:rest]), taken + now
        return taken

    def _refuse(self) -> NoReturn:
        """Says why some tasks are never taken."""
        for name, task in self.tasks.items():
            for p in task.before:
                if p not in self.tasks:
                    raise SimulationError(f"task {name} waits for task {p}, which is taken away")
        raise SimulationError(f"tasks wait for each other in a circle: {circle(self.tasks)}")

    def _make_room(self, tasks: int, waits: int) -> None:
        """Room for so many more tasks, which wait for so many."""
        t, n = self._table, len(self._table.device)
        more = max(tasks - len(self._free), int(n * (ROOM - 1))) if tasks > len(self._free) else 0
        full = self._used + waits > len(t.before)
        if not more and not full:
            return
        rows = np.flatnonzero(t.device != GONE)
        counts = t.waits[rows]
        places = int(ROOM * (counts.sum() + waits)) if full else len(t.before)
        first = np.cumsum(counts) - counts
        old, self._table = t, _table(n + more, places)
        for column, before in zip(self._table, old[:COLUMNS], strict=False):
            column[:n] = before
        self._used = int(counts.sum())
        self._table.before[: self._used] = old.before[np.repeat(old.first[rows] - first, counts) + np.arange(self._used)]
        self._table.first[rows] = first
        link(rows, self._table)
        was, self._times, self._line = self._times, _times(n + more), _line(n + more, self._devices)
        for column, before in zip(self._times, was, strict=True):
            column[:n] = before
        self._free += range(n, n + more)


def _table(tasks: int, places: int) -> Table:
    """A table of tasks that are not there yet."""
    device, high, low, first, waits, head = np.full((6, tasks), GONE)
    waits[:] = 0
    return Table(device, np.zeros(tasks), high, low, first, waits, head, *np.zeros((4, places), np.int64))


def _times(tasks: int) -> Times:
    """Times of tasks that are not there yet."""
    return Times(np.full(tasks, NEVER), np.zeros(tasks, np.int64), np.zeros(tasks))


def _line(tasks: int, devices: int) -> Line:
    """Room for what the loop knows."""
    missing, begun, queue, depth = np.empty((4, tasks), np.int64)
    return Line(missing, begun, queue, np.empty(tasks), depth, *np.empty((5, devices)))
