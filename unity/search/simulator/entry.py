"""Loops that enter a change in the table of tasks: what numbers its tasks have there, what they are, and who waits for whom."""

from __future__ import annotations

from functools import partial

import numpy as np

from unity.search.compiled import compiled
from unity.search.simulator.columns import GONE, Columns, Numbers
from unity.search.simulator.loop import NONE, Table

WAITED = -2  # instead of a place in a list: a task that is taken away is waited for


@compiled
def numbered(c: Columns, names: Numbers, numbers: Numbers, free: Numbers) -> tuple[int, Numbers, Numbers, Numbers, Numbers]:
    """The numbers of tasks that change.

    Args:
        c: the change.
        names, numbers: of all tasks, in the order of names.
        free: numbers that no task has, as many at least as tasks are new.

    Gives the place in the change of a task that is to be taken away but is not there, or NONE; the numbers; and names, numbers and
    free numbers after the change.
    """
    n, m = len(names), len(c.name)
    rows, lost = np.empty(m, np.int64), np.empty(m, np.int64)
    after, of = np.empty(n + m, np.int64), np.empty(n + m, np.int64)
    i, size, taken, gone = 0, 0, 0, 0
    for k in range(m):
        name = c.name[k]
        while i < n and names[i] < name:
            after[size], of[size] = names[i], numbers[i]
            size, i = size + 1, i + 1
        if i < n and names[i] == name:
            rows[k] = numbers[i]
            i += 1
        elif c.device[k] == GONE:
            return k, rows, after, of, lost
        else:
            rows[k] = free[taken]
            taken += 1
        if c.device[k] == GONE:
            lost[gone] = rows[k]
            gone += 1
        else:
            after[size], of[size] = name, rows[k]
            size += 1
    while i < n:
        after[size], of[size] = names[i], numbers[i]
        size, i = size + 1, i + 1
    left = np.empty(len(free) - taken + gone, np.int64)
    for k in range(taken, len(free)):
        left[k - taken] = free[k]
    for k in range(gone):
        left[len(free) - taken + k] = lost[k]
    return NONE, rows, after[:size], of[:size], left


def _place(name: int, names: Numbers) -> int:
    """Where a name is in a list that is in order, or NONE."""
    low, high = 0, len(names)
    while low < high:
        middle = (low + high) >> 1
        if names[middle] < name:
            low = middle + 1
        else:
            high = middle
    return low if low < len(names) and names[low] == name else NONE


def _link(rows: Numbers, t: Table) -> None:
    """Puts tasks on the lists of those that they wait for."""
    for n in rows:
        for k in range(t.first[n], t.first[n] + t.waits[n]):
            p = t.before[k]
            t.waiter[k], t.prior[k], t.then[k] = n, NONE, t.head[p]
            if t.head[p] != NONE:
                t.prior[t.head[p]] = k
            t.head[p] = k


def _unlink(rows: Numbers, t: Table) -> None:
    """Takes tasks off these lists."""
    for n in rows:
        for k in range(t.first[n], t.first[n] + t.waits[n]):
            if t.prior[k] != NONE:
                t.then[t.prior[k]] = t.then[k]
            else:
                t.head[t.before[k]] = t.then[k]
            if t.then[k] != NONE:
                t.prior[t.then[k]] = t.prior[k]


link, unlink = compiled(_link), compiled(_unlink)


@partial(compiled, parts=(_place, _link, _unlink))
def written(c: Columns, rows: Numbers, names: Numbers, numbers: Numbers, used: int, t: Table) -> int:
    """Says in the table what tasks are that change, and who waits for whom.

    Args:
        c: the change.
        rows: the numbers of its tasks.
        names, numbers: of all tasks after it, in the order of names.
        used: how many places of the table are taken.
        t: the table, with room for what tasks wait for.

    Gives NONE; or the place in `before` of a task that is not there, and nothing is written; or WAITED.
    """
    found = np.empty(len(c.before), np.int64)
    for p in range(len(c.before)):
        at = _place(c.before[p], names)
        if at == NONE:
            return p
        found[p] = numbers[at]
    _unlink(rows, t)
    for p in range(len(found)):
        t.before[used + p] = found[p]
    for k in range(len(rows)):
        n = rows[k]
        t.name[n], t.device[n], t.seconds[n], t.nbytes[n] = c.name[k], c.device[k], c.seconds[k], c.nbytes[k]
        t.first[n], t.waits[n] = used, c.waits[k]
        used += c.waits[k]
    _link(rows, t)
    for n in rows:
        if t.device[n] == GONE and t.head[n] != NONE:
            return WAITED
    return NONE
