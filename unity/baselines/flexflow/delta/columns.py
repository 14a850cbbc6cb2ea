"""Tasks as NumPy columns, in the order of their names, and times that are added without rounding.

Strategies build, compare and simulate thousands of tasks as arrays; a task becomes an object only where one is looked up.

Times are whole numbers of ticks. Sums of ticks are exact, so equally long sequences of tasks end at the same moment in whatever
order their times are added, and tasks that are ready at the same moment are taken in the order of their names, not of rounding
errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from unity.search.simulator.tasks import SimulationError, TimedTask, check_tasks

Numbers = NDArray[np.int64]  # Python lists inside interpreted loops
Moments = NDArray[np.float64]

LARGEST = 2**63 - 1  # the largest name, and minus the smallest one
GONE = -1  # the device of a task that does not exist

T = TypeVar("T", bound=TimedTask | None, covariant=True)
F = TypeVar("F", float, NDArray[np.float64])

TICKS = 2.0**42  # per second: a tick is a fifth of a picosecond


def in_ticks(seconds: F) -> F:
    """Round times to whole ticks, which are added without rounding."""
    return np.rint(seconds * TICKS) / TICKS  # pyright: ignore[reportReturnType]


def added_exactly(total: float) -> bool:
    """Return whether times that are whole numbers of ticks, `total` seconds in all, are added without rounding in any order."""
    return total < 2.0**53 / TICKS


class Columns(NamedTuple):
    """Tasks in the order of their names.

    Args:
        name: the tasks' names.
        device: the device that runs each; GONE if the task is removed.
        seconds: the run time of each.
        nbytes: the bytes that each sends.
        waits: how many predecessors each has.
        before: the predecessors' names, task after task.
    """

    name: Numbers
    device: Numbers
    seconds: Moments
    nbytes: Moments
    waits: Numbers
    before: Numbers


class ByColumn(Mapping[int, T], Generic[T]):
    """A mapping from names to tasks, backed by columns. Tasks are built on the first lookup; a removed task is None.

    Args:
        columns: the columns, or a function that computes them when they are needed.
    """

    def __init__(self, columns: Columns | Callable[[], Columns]) -> None:
        self._source = columns

    @cached_property
    def columns(self) -> Columns:
        """The tasks as columns."""
        return self._source if isinstance(self._source, Columns) else self._source()

    @cached_property
    def _tasks(self) -> dict[int, T]:
        name, device, seconds, nbytes, waits, before = (column.tolist() for column in self.columns)
        ends = np.cumsum(self.columns.waits).tolist()
        rows = zip(name, device, seconds, nbytes, waits, ends, strict=True)
        return {n: None if d == GONE else TimedTask(d, s, tuple(before[end - w : end]), b) for n, d, s, b, w, end in rows}  # pyright: ignore[reportReturnType]

    def __getitem__(self, name: int) -> T:
        return self._tasks[name]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self.columns.name)


def columns_of(tasks: Mapping[int, TimedTask | None], devices: int) -> Columns:
    """Return tasks as columns; None stands for a task that is removed.

    Raises:
        SimulationError: a task has a name of more than 64 bits, a device that does not exist, or an impossible time.
    """
    if isinstance(tasks, ByColumn):
        return tasks.columns
    present = {name: task for name, task in tasks.items() if task is not None}
    check_tasks(present, devices)
    for name in (*present, *(p for task in present.values() for p in task.before)):
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
        np.array([len(names_before) for names_before in before], np.int64),
        np.array([p for names_before in before for p in names_before], np.int64),
    )


_NONE = TimedTask(GONE, 0.0)
