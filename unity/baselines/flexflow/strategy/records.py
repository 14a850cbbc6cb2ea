"""Tasks as records, one after the other in one array: as the loop that makes them writes them (`exchange`), and as they are kept.

A record is a task's name, its device, the bits of its seconds and of its bytes, for how many tasks it waits, and their names.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from unity.base.compiled_loops import compiled
from unity.baselines.flexflow.delta.columns import GONE, Columns, Numbers, packed

SECONDS, NBYTES, WAITS, RECORD = 2, 3, 4, 5  # places in a record; where the names begin
TASK, RING = 3, 4  # how many numbers `Made` has of each
BARRIER = -1  # instead of a ring

NOTHING = np.empty(0, np.int64)


class Made(NamedTuple):
    """Tasks whose seconds and bytes are not known yet.

    Args:
        records: of all.
        tasks: of each where its record is, and what it is of: a ring (or BARRIER), and 0; a link, and the bytes that it sends; or
            what computes, by number, and its device.
        rings: of each how many devices it has, the bits of its bytes, its links of the least bandwidth and of the most latency.
        used: how much of these three there is; what follows is room.
    """

    records: Numbers
    tasks: Numbers
    rings: Numbers
    used: Numbers


def bits(numbers: float | np.ndarray) -> Numbers:
    """Floating-point numbers by their bits."""
    return np.ascontiguousarray(numbers, np.float64).view(np.int64)


def change(old: Numbers, new: Numbers) -> Columns:
    """The change from some tasks to others; records are in the order of names."""
    numbers, moments, before = difference(old, new)
    return packed(numbers, moments.view(np.float64), before)


def _same(old: Numbers, i: int, new: Numbers, j: int) -> bool:
    """Whether two tasks are the same, whose records begin there."""
    for k in range(RECORD + old[i + WAITS]):  # noqa: SIM110 (which compiles to something slower)
        if old[i + k] != new[j + k]:
            return False
    return True


@partial(compiled, parts=(_same,))
def difference(old: Numbers, new: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """The same for `columns.packed`, seconds and bytes by their bits."""
    i, j, count, places = 0, 0, 0, 0
    rows = np.empty((len(old) + len(new)) // RECORD, np.int64)  # below zero: what is gone
    while i < len(old) or j < len(new):
        gone = j == len(new) or (i < len(old) and old[i] < new[j])
        fresh = not gone and (i == len(old) or new[j] < old[i])
        if gone:
            rows[count] = -1 - i
            count += 1
        elif fresh or not _same(old, i, new, j):
            rows[count] = j
            count, places = count + 1, places + new[j + WAITS]
        if not fresh:
            i += RECORD + old[i + WAITS]
        if not gone:
            j += RECORD + new[j + WAITS]
    found, moments, before, place = np.zeros((3, count), np.int64), np.zeros((2, count), np.int64), np.empty(places, np.int64), 0
    for k in range(count):
        j = rows[k]
        if j < 0:
            found[0, k], found[1, k] = old[-1 - j], GONE
            continue
        found[0, k], found[1, k], found[2, k] = new[j], new[j + 1], new[j + WAITS]
        moments[0, k], moments[1, k] = new[j + SECONDS], new[j + NBYTES]
        for b in range(new[j + WAITS]):
            before[place + b] = new[j + RECORD + b]
        place += new[j + WAITS]
    return found, moments, before
