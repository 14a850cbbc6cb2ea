"""The state of a simulation: tasks by number, when each runs, and what a change makes of that (FlexFlow, algorithms 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from unity.search.simulator.loop import NEVER, NONE, first_difference, follow, line_up, link, unlink
from unity.search.simulator.tasks import LOW, SimulationError, Task, check_tasks, circle, possible
from unity.search.simulator.ticks import without_rounding

Change = Mapping[int, Task | None]  # tasks to put under names, new or not; None takes one away

GONE = -1  # the device of a task that is not there
ROOM = 1.5  # how much longer arrays become that are full


@dataclass(frozen=True, eq=False)
class Past:
    """What takes a change back.

    Args:
        undo: the tasks that were there, under the names that changed.
        lost: the numbers of the names that were taken away.
        rows: the numbers of what changed; what they say of `columns` was there.
        times, free, used: what was in the schedule.
    """

    undo: Change
    lost: Mapping[int, int]
    rows: NDArray[np.int64]
    columns: tuple[NDArray, ...]
    times: tuple[NDArray, ...]
    free: list[int]
    used: int


class Schedule:
    """Tasks, and when each runs. Mutable: `change` changes tasks and brings all times up to date, `restore` takes that back.

    Raises:
        SimulationError: a task is not possible, or waits for one that is not there, or that waits for it.
    """

    def __init__(self, tasks: Mapping[int, Task], devices: int) -> None:
        n, waits = len(tasks), sum([len(task.before) for task in tasks.values()])
        self.tasks: dict[int, Task] = {}
        self._number: dict[int, int] = {}  # by name
        self._free = list(range(n))  # numbers that no task has
        self._device, self._first, self._count, self._high, self._low, self._level = (np.full(n, GONE, np.int64) for _ in range(6))
        self._seconds, self._ready, self._end = np.zeros(n), np.full(n, NEVER), np.zeros(n)
        self._head = np.full(n, NONE)
        self._before, self._then, self._prior, self._waiter = (np.zeros(waits, np.int64) for _ in range(4))
        self._used = 0
        self._devices, self._exact = devices, True
        self.change(tasks)

    @property
    def makespan(self) -> float:
        """Seconds until the last task has ended."""
        return float(self._end.max(initial=0.0))

    @property
    def taken(self) -> list[tuple[int, float, float]]:
        """All tasks in the order in which they are taken: each one's name, when it is ready, and when it ends."""
        order = np.lexsort((self._low, self._high, self._level, self._ready))[: len(self.tasks)]  # what is gone is NEVER ready
        high, low, ready, end = (column[order].tolist() for column in (self._high, self._low, self._ready, self._end))
        return [((a << LOW) + b, r, e) for a, b, r, e in zip(high, low, ready, end, strict=True)]

    @property
    def _columns(self) -> tuple[NDArray, ...]:
        """What tasks are."""
        return self._device, self._seconds, self._first, self._count, self._high, self._low

    @property
    def _times(self) -> tuple[NDArray, ...]:
        """When they run."""
        return self._ready, self._level, self._end

    @property
    def _waits(self) -> tuple[NDArray, ...]:
        """Who waits for whom."""
        return self._first, self._count, self._before, self._head, self._then, self._prior, self._waiter

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
        unlink(past.rows, *self._waits)
        for column, before in zip(self._columns, past.columns, strict=True):
            column[past.rows] = before
        link(past.rows, *self._waits)
        self._ready, self._level, self._end = past.times
        self._free, self._used = past.free, past.used

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
        columns, times = tuple([column[rows] for column in self._columns]), self._times
        self._ready, self._level, self._end = self._ready.copy(), self._level.copy(), self._end.copy()
        return Past(undo, lost, rows, columns, times, free, used)

    def _write(self, put: Mapping[int, Task], past: Past) -> None:
        """Says what tasks are that were put under names; others that changed are gone."""
        number, undo = self._number, past.undo
        device, seconds, before, _ = zip(*put.values(), strict=True) if put else ((), (), (), ())
        wired = {name: after for name, after in zip(put, before, strict=True) if (t := undo[name]) is None or t.before != after}
        waits = [number.get(p, GONE) for names in wired.values() for p in names]
        if put and (GONE in waits or not possible(put, device, seconds, self._devices)):
            check_tasks(put, number, self._devices)
        rows, gone, wires = past.rows[: len(put)], past.rows[len(put) :], [number[name] for name in wired]
        unlink(past.rows, *self._waits)
        self._device[rows], self._seconds[rows] = device, seconds
        self._device[gone], self._seconds[gone], self._count[gone] = GONE, 0.0, 0
        self._exact = self._exact and without_rounding(self._seconds)
        short = not put or (max(put) < 1 << LOW and min(put) >= 0)
        self._high[rows], self._low[rows] = (0, list(put)) if short else zip(*[divmod(name, 1 << LOW) for name in put], strict=True)
        counts = np.array([len(names) for names in wired.values()], np.int64)
        self._first[wires], self._count[wires] = self._used + np.cumsum(counts) - counts, counts
        self._before[self._used : self._used + len(waits)] = waits
        self._used += len(waits)
        link(past.rows, *self._waits)

    def _follow(self, rows: NDArray[np.int64]) -> int:
        """Simulates what follows a change; gives how many tasks that is."""
        n, waits = len(self._device), self._waits
        changed, was_ready, was_end = rows.copy(), self._ready[rows], self._end[rows]
        self._ready[rows] = NEVER
        gone = self._device[rows] == GONE
        self._end[rows] = np.where(gone, 0.0, NEVER)
        missing, last, begun = np.empty(n, np.int64), np.empty(self._devices), np.empty(n, np.int64)
        taken, rest = 0, len(rows)
        if (self._head[rows[gone]] != NONE).any():
            self._refuse()
        while rest > 0:
            what = changed[:rest], was_ready[:rest], was_end[:rest]
            since = first_difference(*what[:2], self._device, *waits[:3], self._ready, self._end)
            links = self._head, self._then, self._waiter
            found, waiting = line_up(
                since, what[0], self._device, self._first, self._count, *links, self._ready, self._end, last, missing, begun
            )
            now, rest = follow(
                since, self._exact, *what, self._device, self._seconds, *waits[:3], *links, self._high, self._low, *self._times, last, missing, begun[:found]
            )
            taken += now
            if rest == NONE and now < waiting:
                self._refuse()
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
        n, short = len(self._device), tasks - len(self._free)
        if short > 0:
            more = max(short, int(n * (ROOM - 1)))
            self._free += range(n, n + more)
            columns = [np.concatenate((c, np.full(more, c.dtype.type(GONE)))) for c in (*self._columns, *self._times, self._head)]
            self._device, self._seconds, self._first, self._count, self._high, self._low = columns[:6]
            self._ready, self._level, self._end, self._head = columns[6:]
            self._seconds[n:], self._ready[n:], self._end[n:] = 0.0, NEVER, 0.0
        if self._used + waits > len(self._before):
            rows = np.flatnonzero(self._device != GONE)
            counts = self._count[rows]
            first = np.cumsum(counts) - counts
            kept = self._before[np.repeat(self._first[rows] - first, counts) + np.arange(counts.sum())]
            self._first[rows], self._used = first, len(kept)
            self._before = np.concatenate((kept, np.zeros(int(ROOM * waits + (ROOM - 1) * len(kept)), np.int64)))
            self._then, self._prior, self._waiter = (np.zeros_like(self._before) for _ in range(3))
            self._head[:] = NONE
            link(rows, *self._waits)
