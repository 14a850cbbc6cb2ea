"""Compiled loops that apply a change to the table of tasks: their numbers by name, their entries, and who waits for whom.

A search applies thousands of changes, and a call from Python takes as long as such a loop, so `apply_change` enters a change and
simulates its effects in one call. Names are looked up in a hash table with linear probing; thus a change takes time proportional to
its own size, however many other tasks exist.
"""

from __future__ import annotations

from functools import partial
from math import floor
from typing import NamedTuple

import numpy as np

from unity.base.compiled_loops import compiled
from unity.baselines.flexflow.delta.columns import GONE, LARGEST, TICKS, Columns, Moments, Numbers, added_exactly
from unity.baselines.flexflow.delta.event_loop import NONE, Counts, EventLoopState, TaskTable, Times, follow

MIX = 0x1E3779B97F4A7C15  # an odd factor, for hashing
FREE, USED = 0, 1  # positions in `Register.sizes`
ENTERED, ABSENT, UNKNOWN, WAITED, FULL = range(5)  # the status of a change


class Register(NamedTuple):
    """A hash table from the names of tasks to their numbers, and the free room.

    Args:
        names: the name in each of the 2 ** n slots.
        numbers: the number in each slot; NONE if the slot is empty.
        free: a stack of numbers that no task has.
        sizes: the height of that stack, and how many slots of `TaskTable.before` are used.
    """

    names: Numbers
    numbers: Counts
    free: Counts
    sizes: Numbers


class OldEntries(NamedTuple):
    """The entries of changed tasks before a change: `rows`, columns, and the `names` of their predecessors, task after task."""

    rows: Numbers
    device: Counts
    seconds: Moments
    nbytes: Moments
    first: Counts
    waits: Counts
    names: Numbers


def _home_slot(name: int, slots: int) -> int:
    """Return the slot at which the search for a name starts."""
    return (((name ^ (name >> 31)) * MIX & LARGEST) >> 31) & (slots - 1)


def _find_slot(name: int, names: Numbers, numbers: Counts) -> int:
    """Return the slot of a name, or the slot where it belongs."""
    k = _home_slot(name, len(names))
    while numbers[k] != NONE and names[k] != name:
        k = (k + 1) & (len(names) - 1)
    return k


def _remove_name(name: int, names: Numbers, numbers: Counts) -> None:
    """Remove a name, and close the gap in the run of slots after it."""
    last = len(names) - 1
    k = _find_slot(name, names, numbers)
    j = (k + 1) & last
    while numbers[j] != NONE:
        if (j - _home_slot(names[j], len(names))) & last >= (j - k) & last:
            names[k], numbers[k] = names[j], numbers[j]
            k = j
        j = (j + 1) & last
    numbers[k] = NONE


def _register(c: Columns, rows: Numbers, r: Register) -> None:
    """Give numbers to new tasks, and release those of removed ones."""
    (names, numbers, free, sizes), name, device = r, c.name, c.device
    for k in range(len(rows)):
        if rows[k] == NONE:
            sizes[FREE] -= 1
            rows[k] = free[sizes[FREE]]
            slot = _find_slot(name[k], names, numbers)
            names[slot], numbers[slot] = name[k], rows[k]
    for k in range(len(rows)):
        if device[k] == GONE:
            _remove_name(name[k], names, numbers)
            free[sizes[FREE]] = rows[k]
            sizes[FREE] += 1


def _unregister(name: Numbers, device: Numbers, was: Counts, rows: Numbers, r: Register) -> None:
    """Undo `_register`. `device` and `was` are each task's devices after and before the change."""
    names, numbers, free, sizes = r
    for k in range(len(rows) - 1, -1, -1):
        if device[k] == GONE:
            sizes[FREE] -= 1
            slot = _find_slot(name[k], names, numbers)
            names[slot], numbers[slot] = name[k], rows[k]
    for k in range(len(rows) - 1, -1, -1):
        if was[k] == GONE:
            _remove_name(name[k], names, numbers)
            free[sizes[FREE]] = rows[k]
            sizes[FREE] += 1


def _link(rows: Numbers, t: TaskTable) -> None:
    """Add tasks to their predecessors' lists of successors."""
    _, _, _, _, first, waits, head, before, waiter, then, prior = t
    for n in rows:
        for k in range(first[n], first[n] + waits[n]):
            p = before[k]
            waiter[k], prior[k], then[k] = n, NONE, head[p]
            if head[p] != NONE:
                prior[head[p]] = k
            head[p] = k


def _unlink(rows: Numbers, t: TaskTable) -> None:
    """Remove tasks from their predecessors' lists of successors."""
    _, _, _, _, first, waits, head, before, _, then, prior = t
    for n in rows:
        for k in range(first[n], first[n] + waits[n]):
            if prior[k] != NONE:
                then[prior[k]] = then[k]
            else:
                head[before[k]] = then[k]
            if then[k] != NONE:
                prior[then[k]] = prior[k]


def entries_of(rows: Numbers, t: TaskTable) -> OldEntries:
    """Return the current entries of tasks."""
    name_of, device_of, seconds_of, nbytes_of, first_of, waits_of, _, before, _, _, _ = t
    n, total, place = len(rows), 0, 0
    device, first, waits = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    seconds, nbytes = np.empty(n), np.empty(n)
    for k in range(n):
        row = rows[k]
        device[k], seconds[k], nbytes[k] = device_of[row], seconds_of[row], nbytes_of[row]
        first[k], waits[k] = first_of[row], waits_of[row]
        total += waits_of[row]
    names = np.empty(total, np.int64)
    for k in range(n):
        for p in range(first[k], first[k] + waits[k]):
            names[place] = name_of[before[p]]
            place += 1
    return OldEntries(rows, device, seconds, nbytes, first, waits, names)


def _seconds(c: Columns, was: OldEntries) -> tuple[float, bool]:
    """Return by how much the total of all run times grows, and whether all new ones are whole numbers of ticks."""
    more, whole, now, before = 0.0, True, c.seconds, was.seconds
    for k in range(len(now)):
        more += now[k] - before[k]
        whole &= now[k] * TICKS == floor(now[k] * TICKS)
    return more, whole


def _write(c: Columns, rows: Numbers, predecessors: Numbers, used: int, t: TaskTable) -> None:
    """Write the new entries of tasks. `predecessors` are the numbers that fill the slots from `used` on."""
    name, device, seconds, nbytes, first, waits, _, before, _, _, _ = t
    named, on, takes, sends, count, _ = c
    for p in range(len(predecessors)):
        before[used + p] = predecessors[p]
    for k in range(len(rows)):
        n = rows[k]
        name[n], device[n], seconds[n], nbytes[n] = named[k], on[k], takes[k], sends[k]
        first[n], waits[n] = used, count[k]
        used += count[k]


@partial(
    compiled, parts=(_home_slot, _find_slot, _remove_name, _register, _unregister, _link, _unlink, entries_of, _seconds, _write)
)
def enter(c: Columns, r: Register, t: TaskTable) -> tuple[int, int, OldEntries, float, bool]:
    """Enter a change in the table.

    Args:
        c: the change.
        r: the register, with at least as many free numbers as there are new tasks.
        t: the table, with room for the new predecessors.

    Returns ENTERED; ABSENT with the index of a task to remove that does not exist; UNKNOWN with the index in `before` of a
    predecessor that does not exist; or WAITED if a removed task is still waited for. After ABSENT and UNKNOWN the table is
    unchanged. Returns also the old entries, and the values of `_seconds`.
    """
    rows, predecessors, nothing = np.empty(len(c.name), np.int64), np.empty(len(c.before), np.int64), np.empty(0, np.int64)
    for k in range(len(rows)):
        rows[k] = r.numbers[_find_slot(c.name[k], r.names, r.numbers)]
        if rows[k] == NONE and c.device[k] == GONE:
            return ABSENT, k, entries_of(nothing, t), 0.0, True
    _register(c, rows, r)
    was = entries_of(rows, t)
    for p in range(len(predecessors)):
        predecessors[p] = r.numbers[_find_slot(c.before[p], r.names, r.numbers)]
        if predecessors[p] == NONE:
            _unregister(c.name, c.device, was.device, rows, r)
            return UNKNOWN, p, was, 0.0, True
    more, whole = _seconds(c, was)
    _unlink(rows, t)
    _write(c, rows, predecessors, r.sizes[USED], t)
    r.sizes[USED] += len(predecessors)
    _link(rows, t)
    for n in rows:
        if t.device[n] == GONE and t.head[n] != NONE:
            return WAITED, NONE, was, more, whole
    return ENTERED, NONE, was, more, whole


def _copy_times(times: Times, to: Times) -> None:
    """Copy times into other arrays."""
    (ready, level, end), (to_ready, to_level, to_end) = times, to
    to_ready[:], to_level[:], to_end[:] = ready, level, end


@partial(compiled, parts=(added_exactly, enter, follow, entries_of, _copy_times))
def apply_change(
    c: Columns, exact: bool, total: float, r: Register, t: TaskTable, times: Times, spare: Times, state: EventLoopState
) -> tuple[int, int, OldEntries, float, bool, int]:
    """Enter a change, and simulate its effects.

    Args:
        c: the change.
        exact: whether times are added without rounding so far.
        total: the seconds of all tasks so far.
        r: the register.
        t: the table.
        times: when tasks run. Not written to.
        spare: receives the times after the change.
        state: the loop's state.

    Returns the status and index of `enter`, or FULL if room was missing and nothing was entered; the old entries; `total` and
    `exact` after the change; and how many tasks were simulated, NONE if some can never be taken.
    """
    if len(c.name) > r.sizes[FREE] or r.sizes[USED] + len(c.before) > len(t.before):
        return FULL, NONE, entries_of(np.empty(0, np.int64), t), total, exact, NONE
    status, place, was, more, whole = enter(c, r, t)
    if status != ENTERED:
        return status, place, was, total + more, exact, NONE
    _copy_times(times, spare)
    exact = exact and whole and added_exactly(total + more)
    return status, place, was, total + more, exact, follow(exact, was.rows, t, spare, state)


@partial(compiled, parts=(_home_slot, _find_slot, _remove_name, _unregister, _link, _unlink))
def revert_change(name: Numbers, was: OldEntries, used: int, r: Register, t: TaskTable) -> None:
    """Undo the last change. `name` are its tasks, and `used` is how many slots of the table were used before it."""
    rows, device = was.rows, np.empty(len(name), np.int64)
    for k in range(len(rows)):
        device[k] = t.device[rows[k]]
    _unlink(rows, t)
    _unregister(name, device, was.device, rows, r)
    for k in range(len(rows)):
        n = rows[k]
        t.name[n], t.device[n], t.seconds[n], t.nbytes[n] = name[k], was.device[k], was.seconds[k], was.nbytes[k]
        t.first[n], t.waits[n] = was.first[k], was.waits[k]
    _link(rows, t)
    r.sizes[USED] = used


@partial(compiled, parts=(_home_slot, _find_slot))
def fill_register(rows: Numbers, t: TaskTable, names: Numbers, numbers: Counts) -> None:
    """Enter the names of tasks in an empty hash table."""
    for n in rows:
        name = int(t.name[n])
        slot = _find_slot(name, names, numbers)
        names[slot], numbers[slot] = name, n


link = compiled(_link)
