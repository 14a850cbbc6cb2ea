"""Loops that enter a change in the table of tasks: what numbers its tasks have there, what they are, and who waits for whom.

Tasks are found by their names in a hash table with linear probing: a change takes as long as it has tasks, however many others
there are.
"""

from __future__ import annotations

from functools import partial
from math import floor
from typing import NamedTuple

import numpy as np

from unity.base.compiled_loops import compiled
from unity.baselines.flexflow.delta.columns import GONE, LARGEST, TICKS, Columns, Moments, Numbers, added_exactly
from unity.baselines.flexflow.delta.event_loop import NONE, Counts, Line, Table, Times, follow

MIX = 0x1E3779B97F4A7C15  # an odd number, for hashes
FREE, USED = 0, 1  # what `Register.sizes` are of
ENTERED, ABSENT, UNKNOWN, WAITED, FULL = range(5)  # what `entered` says; FULL: there is no room (`advance`)


class Register(NamedTuple):
    """Numbers of tasks by name, and what is left.

    Args:
        names, numbers: by slot, of which there are 2 ** n; a number is NONE where the slot is empty.
        free: a stack of numbers that no task has.
        sizes: how many are on it, and how many places of the table are taken.
    """

    names: Numbers
    numbers: Counts
    free: Counts
    sizes: Numbers


class Was(NamedTuple):
    """What the table said of tasks that change, by their `rows` there. `names`: of what they waited for, task after task."""

    rows: Numbers
    device: Counts
    seconds: Moments
    nbytes: Moments
    first: Counts
    waits: Counts
    names: Numbers


def _home(name: int, slots: int) -> int:
    """The slot that a name is in, or after."""
    return (((name ^ (name >> 31)) * MIX & LARGEST) >> 31) & (slots - 1)


def _slot(name: int, names: Numbers, numbers: Counts) -> int:
    """The slot that a name is in, or would be in."""
    k = _home(name, len(names))
    while numbers[k] != NONE and names[k] != name:
        k = (k + 1) & (len(names) - 1)
    return k


def _leave(name: int, names: Numbers, numbers: Counts) -> None:
    """Takes a name out, and moves others up that are in the way of nothing then."""
    last = len(names) - 1
    k = _slot(name, names, numbers)
    j = (k + 1) & last
    while numbers[j] != NONE:
        if (j - _home(names[j], len(names))) & last >= (j - k) & last:
            names[k], numbers[k] = names[j], numbers[j]
            k = j
        j = (j + 1) & last
    numbers[k] = NONE


def _register(c: Columns, rows: Numbers, r: Register) -> None:
    """Gives new tasks numbers, and takes those of tasks away that are to be taken away."""
    (names, numbers, free, sizes), name, device = r, c.name, c.device
    for k in range(len(rows)):
        if rows[k] == NONE:
            sizes[FREE] -= 1
            rows[k] = free[sizes[FREE]]
            slot = _slot(name[k], names, numbers)
            names[slot], numbers[slot] = name[k], rows[k]
    for k in range(len(rows)):
        if device[k] == GONE:
            _leave(name[k], names, numbers)
            free[sizes[FREE]] = rows[k]
            sizes[FREE] += 1


def _register_back(name: Numbers, device: Numbers, was: Counts, rows: Numbers, r: Register) -> None:
    """The opposite. `device`, `was`: of each task, after the change and before."""
    names, numbers, free, sizes = r
    for k in range(len(rows) - 1, -1, -1):
        if device[k] == GONE:
            sizes[FREE] -= 1
            slot = _slot(name[k], names, numbers)
            names[slot], numbers[slot] = name[k], rows[k]
    for k in range(len(rows) - 1, -1, -1):
        if was[k] == GONE:
            _leave(name[k], names, numbers)
            free[sizes[FREE]] = rows[k]
            sizes[FREE] += 1


def _link(rows: Numbers, t: Table) -> None:
    """Puts tasks on the lists of those that they wait for."""
    _, _, _, _, first, waits, head, before, waiter, then, prior = t
    for n in rows:
        for k in range(first[n], first[n] + waits[n]):
            p = before[k]
            waiter[k], prior[k], then[k] = n, NONE, head[p]
            if head[p] != NONE:
                prior[head[p]] = k
            head[p] = k


def _unlink(rows: Numbers, t: Table) -> None:
    """Takes tasks off these lists."""
    _, _, _, _, first, waits, head, before, _, then, prior = t
    for n in rows:
        for k in range(first[n], first[n] + waits[n]):
            if prior[k] != NONE:
                then[prior[k]] = then[k]
            else:
                head[before[k]] = then[k]
            if then[k] != NONE:
                prior[then[k]] = prior[k]


def was_of(rows: Numbers, t: Table) -> Was:
    """What the table says of tasks."""
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
    return Was(rows, device, seconds, nbytes, first, waits, names)


def _seconds(c: Columns, was: Was) -> tuple[float, bool]:
    """How many seconds more all tasks take after a change, and whether it has none that is not a whole number of ticks."""
    more, whole, now, before = 0.0, True, c.seconds, was.seconds
    for k in range(len(now)):
        more += now[k] - before[k]
        whole &= now[k] * TICKS == floor(now[k] * TICKS)
    return more, whole


def _write(c: Columns, rows: Numbers, found: Numbers, used: int, t: Table) -> None:
    """Says what tasks are. `found`: the numbers of what they wait for, which from the place `used` on are in the table then."""
    name, device, seconds, nbytes, first, waits, _, before, _, _, _ = t
    named, on, takes, sends, count, _ = c
    for p in range(len(found)):
        before[used + p] = found[p]
    for k in range(len(rows)):
        n = rows[k]
        name[n], device[n], seconds[n], nbytes[n] = named[k], on[k], takes[k], sends[k]
        first[n], waits[n] = used, count[k]
        used += count[k]


@partial(compiled, parts=(_home, _slot, _leave, _register, _register_back, _link, _unlink, was_of, _seconds, _write))
def entered(c: Columns, r: Register, t: Table) -> tuple[int, int, Was, float, bool]:
    """Enters a change.

    Args:
        c: the change.
        r: the register, with as many free numbers at least as tasks are new.
        t: the table, with room for what tasks wait for.

    Gives ENTERED; ABSENT and the place in the change of a task that is to be taken away but is not there; UNKNOWN and the place in
    `before` of one that is not there; or WAITED, if one that is taken away is waited for. In the second and third case nothing is
    entered. And what the table said before, and `_seconds`.
    """
    rows, found, nothing = np.empty(len(c.name), np.int64), np.empty(len(c.before), np.int64), np.empty(0, np.int64)
    for k in range(len(rows)):
        rows[k] = r.numbers[_slot(c.name[k], r.names, r.numbers)]
        if rows[k] == NONE and c.device[k] == GONE:
            return ABSENT, k, was_of(nothing, t), 0.0, True
    _register(c, rows, r)
    was = was_of(rows, t)
    for p in range(len(found)):
        found[p] = r.numbers[_slot(c.before[p], r.names, r.numbers)]
        if found[p] == NONE:
            _register_back(c.name, c.device, was.device, rows, r)
            return UNKNOWN, p, was, 0.0, True
    more, whole = _seconds(c, was)
    _unlink(rows, t)
    _write(c, rows, found, r.sizes[USED], t)
    r.sizes[USED] += len(found)
    _link(rows, t)
    for n in rows:
        if t.device[n] == GONE and t.head[n] != NONE:
            return WAITED, NONE, was, more, whole
    return ENTERED, NONE, was, more, whole


def _copied(times: Times, to: Times) -> None:
    """Writes times over others."""
    (ready, level, end), (to_ready, to_level, to_end) = times, to
    to_ready[:], to_level[:], to_end[:] = ready, level, end


@partial(compiled, parts=(added_exactly, entered, follow, was_of, _copied))
def advanced(
    c: Columns, exact: bool, total: float, r: Register, t: Table, times: Times, spare: Times, line: Line
) -> tuple[int, int, Was, float, bool, int]:
    """Enters a change, and simulates what follows.

    Args:
        c: the change.
        exact, total: whether times are added without rounding, and the seconds of all tasks.
        r, t, line: what there is (`entry`, `loop`).
        times: when tasks run. Not written to.
        spare: takes when tasks run after the change.

    Gives what `entered` says, and where; FULL where there is no room: then nothing is entered. What the table said before; `total`
    and `exact` after the change; and how many tasks were simulated, NONE if some can never be taken.
    """
    if len(c.name) > r.sizes[FREE] or r.sizes[USED] + len(c.before) > len(t.before):
        return FULL, NONE, was_of(np.empty(0, np.int64), t), total, exact, NONE
    said, place, was, more, whole = entered(c, r, t)
    if said != ENTERED:
        return said, place, was, total + more, exact, NONE
    _copied(times, spare)
    exact = exact and whole and added_exactly(total + more)
    return said, place, was, total + more, exact, follow(exact, was.rows, t, spare, line)


@partial(compiled, parts=(_home, _slot, _leave, _register_back, _link, _unlink))
def taken_back(name: Numbers, was: Was, used: int, r: Register, t: Table) -> None:
    """Takes the last change back that was entered. `name`: of its tasks; `used`: how many places of the table were taken."""
    rows, device = was.rows, np.empty(len(name), np.int64)
    for k in range(len(rows)):
        device[k] = t.device[rows[k]]
    _unlink(rows, t)
    _register_back(name, device, was.device, rows, r)
    for k in range(len(rows)):
        n = rows[k]
        t.name[n], t.device[n], t.seconds[n], t.nbytes[n] = name[k], was.device[k], was.seconds[k], was.nbytes[k]
        t.first[n], t.waits[n] = was.first[k], was.waits[k]
    _link(rows, t)
    r.sizes[USED] = used


@partial(compiled, parts=(_home, _slot))
def registered(rows: Numbers, t: Table, names: Numbers, numbers: Counts) -> None:
    """Enters the names of tasks in slots that are all empty."""
    for n in rows:
        name = int(t.name[n])
        slot = _slot(name, names, numbers)
        names[slot], numbers[slot] = name, n


link = compiled(_link)
