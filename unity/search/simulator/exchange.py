"""Loops that make tasks of what pieces send each other and wait for, and of rings; and that find what a change makes different.

Who waits for what is made as pairs, of a piece (or a group of pieces, by number) and the name of a task: two rows, or two arrays.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from unity.search.compiled import compiled
from unity.search.simulator.columns import GONE, Columns, Moments, Numbers

ROW = 1 << 16  # between the names of what one piece (or group) sends and what the next one does
NONE = -1


def _sources(first: Numbers, second: Numbers, part: Numbers, parts: int, makers: Numbers, readers: Numbers) -> Numbers:
    """Where several pieces of a maker hold the same of so many parts: 1 for that from which a reader takes it, on its own device if
    one is; else 0."""
    best = np.full(len(readers) * parts, NONE)
    found = np.zeros(len(first), np.int64)
    for k in range(len(first)):
        at = second[k] * parts + part[first[k]]
        reader, other = readers[second[k]], best[at]
        if other == NONE or (makers[first[k]] == reader and makers[first[other]] != reader):
            if other != NONE:
                found[other] = 0
            best[at], found[k] = k, 1
    return found


@partial(compiled, parts=(_sources,))
def exchanged(
    first: Numbers,
    second: Numbers,
    elements: Numbers,
    part: Numbers,
    parts: int,
    makers: Numbers,
    readers: Numbers,
    done: Numbers,
    undone: Numbers,
    there: int,
    back: int,
    between: Numbers,
) -> tuple[Numbers, Numbers, Numbers]:
    """The transfers of an operand, in rows: names, senders, links, elements, for how many tasks each waits (one), and for which.
    And pairs: what each piece of its reader waits for, and what each piece of its maker waits for backward.

    Args:
        first, second, elements: which pieces of the maker and of the reader share elements, and how many (`pieces.Overlap`).
        part, parts: which of so many parts each piece of the maker holds; 0: no two hold the same.
        makers, readers: the pieces' devices.
        done, undone: what ends each piece of the maker, and backward each of the reader; empty, if no gradient flows.
        there, back: the names of the first transfers, forward and backward.
        between: the link from each device to each.
    """
    n = len(first)
    flows = n if len(undone) else 0
    source = _sources(first, second, part, parts, makers, readers) if parts else np.ones(n, np.int64)
    found, forward, backward = np.ones((6, n + flows), np.int64), np.empty((2, n), np.int64), np.empty((2, flows), np.int64)
    sent, taken = 0, 0
    for k in range(n):
        i, j = first[k], second[k]
        if source[k]:
            forward[0, taken], forward[1, taken] = j, done[i]
            if makers[i] != readers[j]:
                name = there + i * ROW + j
                found[0, sent], found[1, sent], found[2, sent] = name, makers[i], between[makers[i]][readers[j]]
                found[3, sent], found[5, sent] = elements[k], done[i]
                forward[1, taken] = name
                sent += 1
            taken += 1
    for k in range(flows):
        i, j = first[k], second[k]
        backward[0, k], backward[1, k] = i, undone[j]
        if makers[i] != readers[j]:
            name = back + i * ROW + j
            found[0, sent], found[1, sent], found[2, sent] = name, readers[j], between[readers[j]][makers[i]]
            found[3, sent], found[5, sent] = elements[k], undone[j]
            backward[1, k] = name
            sent += 1
    return found[:, :sent], forward[:, :taken], backward


def _waiting(piece: Numbers, name: Numbers, pieces: int) -> tuple[Numbers, Numbers]:
    """For each of so many pieces how many names it has, and these, in order and each once, piece after piece."""
    first, waits = np.zeros(pieces + 1, np.int64), np.zeros(pieces, np.int64)
    for p in piece:
        first[p + 1] += 1
    for p in range(pieces):
        first[p + 1] += first[p]
    before = np.empty(len(piece), np.int64)
    for k in range(len(piece)):
        low, high = first[piece[k]], first[piece[k]] + waits[piece[k]]
        at = high
        while at > low and before[at - 1] > name[k]:
            at -= 1
        if at == low or before[at - 1] != name[k]:
            for p in range(high, at, -1):
                before[p] = before[p - 1]
            before[at] = name[k]
            waits[piece[k]] += 1
    count = 0
    for p in range(pieces):
        for k in range(first[p], first[p] + waits[p]):
            before[count] = before[k]
            count += 1
    return waits, before[:count]


waiting = compiled(_waiting)


@partial(compiled, parts=(_waiting,))
def held(device: Numbers, name: Numbers, devices: int, members: Numbers, counts: Numbers) -> tuple[Numbers, Numbers]:
    """For each group of devices how many names its members have, and these (`waiting`).

    Args:
        device, name: pairs of a device and a name that it has.
        devices: how many there are.
        members, counts: the devices of each group, group after group, and how many these are.
    """
    waits, before = _waiting(device, name, devices)
    first = np.zeros(devices + 1, np.int64)
    for d in range(devices):
        first[d + 1] = first[d] + waits[d]
    total = 0
    for d in members:
        total += waits[d]
    group, found = np.empty(total, np.int64), np.empty(total, np.int64)
    at, m = 0, 0
    for g in range(len(counts)):
        for _ in range(counts[g]):
            for k in range(first[members[m]], first[members[m] + 1]):
                group[at], found[at] = g, before[k]
                at += 1
            m += 1
    return _waiting(group, found, len(counts))


@partial(compiled, parts=(_waiting,))
def summed(
    members: Numbers, devices: Numbers, ends: Numbers, barrier: int, first: int
) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
    """Rings of the devices of pieces, each once in its ring.

    Args:
        members: the pieces of each group, [groups, pieces].
        devices, ends: of each piece its device, and what ends it.
        barrier, first: the names of the first ring's first task, and of its first member's.

    Gives for how many tasks each ring waits and their names, the devices of each ring and how many these are, and what ends each
    piece then.
    """
    groups, size = len(members), len(members[0])
    n = groups * size
    ring, counts, after = np.empty(n, np.int64), np.zeros(groups, np.int64), ends.copy()
    group, name = np.empty(n, np.int64), np.empty(n, np.int64)
    total = 0
    for g in range(groups):
        for m in range(size):
            i, at = members[g][m], 0
            while at < counts[g] and ring[total + at] != devices[i]:
                at += 1
            if at == counts[g]:
                ring[total + at] = devices[i]
                counts[g] += 1
            group[g * size + m], name[g * size + m], after[i] = g, ends[i], first + g * ROW + at
        for m in range(size if counts[g] == 1 else 0):
            after[members[g][m]] = barrier + g * ROW
        total += counts[g]
    waits, before = _waiting(group, name, groups)
    return waits, before, ring[:total], counts, after


@compiled
def ring_links(
    devices: Numbers, counts: Numbers, between: Numbers, bandwidth: Moments, latency: Moments
) -> tuple[Numbers, Moments, Moments]:
    """The link by which each member of each ring sends to the next, and the figures of each ring's slowest."""
    link, least, most = np.empty(len(devices), np.int64), np.full(len(counts), np.inf), np.zeros(len(counts))
    first = 0
    for g in range(len(counts)):
        for m in range(counts[g]):
            sender, receiver = devices[first + m], devices[first + (m + 1) % counts[g]]
            k = between[sender][receiver]
            link[first + m] = k
            least[g], most[g] = min(least[g], bandwidth[k]), max(most[g], latency[k])
        first += counts[g]
    return link, least, most


@compiled
def ring_tasks(
    waits: Numbers,
    before: Numbers,
    on: Numbers,
    counts: Numbers,
    seconds: Moments,
    nbytes: Moments,
    barrier: int,
    first: int,
    at: int,
) -> tuple[Numbers, Moments, Numbers]:
    """The tasks of rings (for `columns.packed`): a barrier for each, and a task for each member of those with more than one.

    Args:
        waits, before: for how many tasks each ring waits, and their names.
        on, counts: the devices of the task graph by which members send, and how many each ring has.
        seconds, nbytes: of each ring's tasks.
        barrier, first: the names of the first barrier, and of the first member's task.
        at: the barriers' device.
    """
    rings, m = len(counts), 0
    total = rings
    for g in range(rings):
        total += counts[g] if counts[g] > 1 else 0
    found, moments, after = np.ones((3, total), np.int64), np.zeros((2, total)), np.empty(len(before) + total - rings, np.int64)
    for p in range(len(before)):
        after[p] = before[p]
    row, place = rings, len(before)
    for g in range(rings):
        name = barrier + g * ROW
        found[0, g], found[1, g], found[2, g] = name, at, waits[g]
        for k in range(counts[g] if counts[g] > 1 else 0):
            found[0, row], found[1, row] = first + g * ROW + k, on[m + k]
            moments[0, row], moments[1, row] = seconds[g], nbytes[g]
            after[place] = name
            row, place = row + 1, place + 1
        m += counts[g]
    return found, moments, after


def _same(old: Columns, i: int, p: int, new: Columns, j: int, q: int) -> bool:
    """Whether two tasks are the same, whose lists of what they wait for begin at these places."""
    if old.device[i] != new.device[j] or old.seconds[i] != new.seconds[j] or old.nbytes[i] != new.nbytes[j]:
        return False
    if old.waits[i] != new.waits[j]:
        return False
    for k in range(old.waits[i]):  # noqa: SIM110 (which compiles to something slower)
        if old.before[p + k] != new.before[q + k]:
            return False
    return True


@partial(compiled, parts=(_same,))
def difference(old: Columns, new: Columns) -> tuple[Numbers, Moments, Numbers]:
    """The change from some tasks to others, for `columns.packed`."""
    n, m, i, j, p, q, count, places = len(old.name), len(new.name), 0, 0, 0, 0, 0, 0
    row, first = np.empty(n + m, np.int64), np.empty(n + m, np.int64)  # rows of tasks that are gone are below zero
    while i < n or j < m:
        gone = j == m or (i < n and old.name[i] < new.name[j])
        fresh = not gone and (i == n or new.name[j] < old.name[i])
        if gone:
            row[count] = -1 - i
            count += 1
        elif fresh or not _same(old, i, p, new, j, q):
            row[count], first[count] = j, q
            count, places = count + 1, places + new.waits[j]
        if not fresh:
            i, p = i + 1, p + old.waits[i]
        if not gone:
            j, q = j + 1, q + new.waits[j]
    found, moments, before = np.zeros((3, count), np.int64), np.zeros((2, count)), np.empty(places, np.int64)
    place = 0
    for k in range(count):
        j = row[k]
        if j < 0:
            found[0, k], found[1, k] = old.name[-1 - j], GONE
            continue
        found[0, k], found[1, k], found[2, k] = new.name[j], new.device[j], new.waits[j]
        moments[0, k], moments[1, k] = new.seconds[j], new.nbytes[j]
        for b in range(new.waits[j]):
            before[place + b] = new.before[first[k] + b]
        place += new.waits[j]
    return found, moments, before
