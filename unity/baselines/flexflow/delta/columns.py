"""Tasks by the column, in the order of their names: as strategies make them, and as compiled loops read them.

A task is an object where someone looks at it, and a row of arrays where thousands are made, compared and simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from unity.search.simulator.tasks import SimulationError, Task, check_tasks

Numbers = NDArray[np.int64]  # lists, where loops are interpreted
Moments = NDArray[np.float64]

LARGEST = 2**63 - 1  # a name, and the smallest below zero
GONE = -1  # the device of a task that is not there

T = TypeVar("T", bound=Task | None, covariant=True)
F = TypeVar("F", float, NDArray[np.float64])

TICKS = 2.0**42  # in a second: one is a fifth of a picosecond


def in_ticks(seconds: F) -> F:
    """Round times to whole ticks, which are added without rounding."""
    return np.rint(seconds * TICKS) / TICKS  # pyright: ignore[reportReturnType]


def added_exactly(total: float) -> bool:
    """Whether times that are whole numbers of ticks, `total` in all, are added without rounding, in whatever order."""
    return total < 2.0**53 / TICKS


class Columns(NamedTuple):
    """Tasks in the order of their names.

    Args:
        name: what they are called.
        device: where each runs; GONE: it is taken away.
        seconds, nbytes: how long it takes, and what it sends.
        waits: for how many tasks it waits.
        before: the names of these, task after task.
    """

    name: Numbers
    device: Numbers
    seconds: Moments
    nbytes: Moments
    waits: Numbers
    before: Numbers


def packed(numbers: Numbers, moments: Moments, before: Numbers) -> Columns:
    """Tasks by the column where names, devices and waits are rows of one array, and seconds and bytes of another."""
    name, device, waits = numbers
    seconds, nbytes = moments
    return Columns(name, device, seconds, nbytes, waits, before)


class ByColumn(Mapping[int, T], Generic[T]):
    """The same as tasks by name, which are made when one is looked at. What is taken away is None. `made`: gives the columns, when
    they are asked for."""

    def __init__(self, made: Columns | Callable[[], Columns]) -> None:
        self._made = made

    @cached_property
    def columns(self) -> Columns:
        """Tasks by the column."""
        return self._made if isinstance(self._made, Columns) else self._made()

    @cached_property
    def _tasks(self) -> dict[int, T]:
        name, device, seconds, nbytes, waits, before = (column.tolist() for column in self.columns)
        ends = np.cumsum(self.columns.waits).tolist()
        rows = zip(name, device, seconds, nbytes, waits, ends, strict=True)
        return {n: None if d == GONE else Task(d, s, tuple(before[end - w : end]), b) for n, d, s, b, w, end in rows}  # pyright: ignore[reportReturnType]

    def __getitem__(self, name: int) -> T:
        return self._tasks[name]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self.columns.name)


def columns_of(tasks: Mapping[int, Task | None], devices: int) -> Columns:
    """Tasks by the column; None is one that is taken away.

    Raises:
        SimulationError: a task is not possible on so many devices.
    """
    if isinstance(tasks, ByColumn):
        return tasks.columns
    put = {name: task for name, task in tasks.items() if task is not None}
    check_tasks(put, devices)
    for name in (*put, *(p for task in put.values() for p in task.before)):
        if abs(name) > LARGEST:
            raise SimulationError(f"task {name} has a name of more than 64 bits")
    names = sorted(tasks)
    rows = [tasks[name] or _NONE for name in names]
    device, seconds, before, nbytes = zip(*rows, strict=True) if rows else ((),) * 4
    return Columns(
        np.array(names, np.int64),
        np.array(device, np.int64),
        np.array(seconds, np.float64),
        np.array(nbytes, np.float64),
        np.array([len(found) for found in before], np.int64),
        np.array([p for found in before for p in found], np.int64),
    )


_NONE = Task(GONE, 0.0)


def joined(parts: Sequence[Columns]) -> Columns:
    """Tasks of several parts, each after those of the part before."""
    some = [part for part in parts if len(part.name)]
    if len(some) == 1:
        return some[0]
    return Columns(*map(np.concatenate, zip(*some, strict=True))) if some else NO_TASKS


NO_TASKS = columns_of({}, 0)
