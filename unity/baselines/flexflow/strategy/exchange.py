"""The loop that makes a strategy's tasks: what pieces send each other and wait for, and rings.

All that a change makes anew is made in one call, as a call takes as long as the loop itself: most changes are of some dozens of
tasks. What is to be made is said by numbers in two arrays: a head (`around`), and blocks (`blocks`), one after the other.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from unity.base.compiled_loops import compiled
from unity.baselines.flexflow.delta.columns import Numbers
from unity.baselines.flexflow.strategy.blocks import OPERAND, OPERATOR, REDUCTION, WAITING, WEIGHT
from unity.baselines.flexflow.strategy.names import BACKWARD, ENDS, PURPOSE, ROW, WAYS
from unity.baselines.flexflow.strategy.records import BARRIER, RECORD, RING, TASK, WAITS, Made
from unity.baselines.flexflow.strategy.wiring import OWN, Wires

NONE = -1
FEW = 2048  # numbers that there is room for to begin with: most changes need no more


def _longer(array: Numbers, used: int, more: int) -> Numbers:
    """An array with room for so many more."""
    if used + more <= len(array):
        return array
    found = np.empty(2 * (used + more), np.int64)
    for k in range(used):
        found[k] = array[k]
    return found


def _with_room(made: Made, tasks: int, waits: int, rings: int) -> Made:
    """What was made, with room for so many more tasks, that wait for so many, and rings."""
    records, found, ringed, used = made
    return Made(
        _longer(records, used[0], RECORD * tasks + waits),
        _longer(found, used[1], TASK * tasks),
        _longer(ringed, used[2], RING * rings),
        used,
    )


def _put(name: int, device: int, waits: int, what: int, amount: int, records: Numbers, tasks: Numbers, used: Numbers) -> None:
    """Adds a task, but for the names of those that it waits for."""
    at, task = used[0], used[1]
    records[at], records[at + 1], records[at + WAITS] = name, device, waits
    tasks[task], tasks[task + 1], tasks[task + 2] = at, what, amount
    used[0], used[1] = at + RECORD, task + TASK


def _wait(names: Numbers, first: int, count: int, records: Numbers, used: Numbers) -> int:
    """Adds names that the task waits for that was put last. Gives the place of the next one."""
    for k in range(first, first + count):
        records[used[0]] = names[k]
        used[0] += 1
    return first + count


def _waiting(piece: Numbers, name: Numbers, count: int, pieces: int) -> tuple[Numbers, Numbers]:
    """For each of so many pieces how many names it has, and these, in order and each once, piece after piece; of so many pairs."""
    first, waits = np.zeros(pieces + 1, np.int64), np.zeros(pieces, np.int64)
    for k in range(count):
        first[piece[k] + 1] += 1
    for p in range(pieces):
        first[p + 1] += first[p]
    before = np.empty(count, np.int64)
    for k in range(count):
        low, high = first[piece[k]], first[piece[k]] + waits[piece[k]]
        at = high
        while at > low and before[at - 1] > name[k]:
            at -= 1
        if at == low or before[at - 1] != name[k]:
            for p in range(high, at, -1):
                before[p] = before[p - 1]
            before[at] = name[k]
            waits[piece[k]] += 1
    total = 0
    for p in range(pieces):
        for k in range(first[p], first[p] + waits[p]):
            before[total] = before[k]
            total += 1
    return waits, before[:total]


def _rings(
    waits: Numbers,
    before: Numbers,
    devices: Numbers,
    counts: Numbers,
    bits: Numbers,
    barrier: int,
    w: Wires,
    made: Made,
) -> Made:
    """Rings: for each a barrier, and for each member of those with more than one a task that waits for it.

    Args:
        waits, before: for how many tasks each ring waits, and their names, ring after ring.
        devices, counts: of each ring, ring after ring, and how many these are.
        bits: of their bytes.
        barrier: the name of the first ring's barrier.
    """
    rings = len(counts)
    made = _with_room(made, rings + len(devices), len(before) + len(devices), rings)
    records, tasks, found, used = made
    place, first = 0, 0
    for g in range(rings):
        _put(barrier + g * ROW, w.barrier, waits[g], BARRIER, 0, records, tasks, used)
        place = _wait(before, place, waits[g], records, used)
    for g in range(rings):
        size, at, name = counts[g], used[2], barrier + PURPOSE + g * ROW
        slow = late = w.between[devices[first]][devices[first + 1]] if size > 1 else 0
        for k in range(size if size > 1 else 0):
            link = int(w.between[devices[first + k]][devices[first + (k + 1) % size]])
            on = devices[first + k] if w.first == OWN else w.first + link
            slow = link if w.bandwidth[link] < w.bandwidth[slow] else slow
            late = link if w.latency[link] > w.latency[late] else late
            _put(name + k, on, 1, at // RING, 0, records, tasks, used)
            records[used[0]] = barrier + g * ROW
            used[0] += 1
        if size > 1:
            found[at], found[at + 1], found[at + 2], found[at + 3] = size, bits[g], slow, late
            used[2] = at + RING
        first += size
    return made


def _ends(at: int, facts: Numbers) -> tuple[int, int, int, int]:
    """Of an operator's block: its pieces, and where are what ends each, what ends each backward, and their devices."""
    pieces, last = facts[at + 1], at + facts[at]
    return pieces, last - 3 * pieces, last - 2 * pieces, last - pieces


def _summed(at: int, ends: int, devices: int, barrier: int, facts: Numbers, w: Wires, made: Made) -> Made:
    """What some pieces sum up among each other: rings of their devices, each once in its ring. Other tasks end the pieces then.

    Args:
        at: where the reduction is.
        ends, devices: where are what ends each piece, and its device.
        barrier: the name of the first ring's barrier.
    """
    groups, size, first = facts[at], facts[at + 1], at + REDUCTION
    n, total = groups * size, 0
    ring, counts, bits = np.empty(n, np.int64), np.zeros(groups, np.int64), np.full(groups, facts[at + 3])
    group, name = np.empty(n, np.int64), np.empty(n, np.int64)
    for g in range(groups):
        for m in range(g * size, (g + 1) * size):
            i, k = facts[first + m], 0
            while k < counts[g] and ring[total + k] != facts[devices + i]:
                k += 1
            if k == counts[g]:
                ring[total + k] = facts[devices + i]
                counts[g] += 1
            group[m], name[m] = g, facts[ends + i]
            facts[ends + i] = barrier + PURPOSE + g * ROW + k
        for m in range(g * size, (g + 1) * size if counts[g] == 1 else 0):
            facts[ends + facts[first + m]] = barrier + g * ROW
        total += counts[g]
    waits, before = _waiting(group, name, n, groups)
    return _rings(waits, before, ring[:total], counts, bits, barrier, w, made)


def _operator(at: int, first: int, barrier: int, facts: Numbers, w: Wires, made: Made) -> Made:
    """What ends an operator's pieces, and all that they sum up.

    Args:
        at: where its block is.
        first, barrier: the names of the first piece's task, and of the first reduction's first barrier.
    """
    pieces, done, undone, devices = _ends(at, facts)
    for i in range(pieces):
        facts[done + i], facts[undone + i] = first + i, first + BACKWARD * PURPOSE + i
    r = at + OPERATOR
    for _ in range(facts[at + 3]):
        made = _summed(r, done, devices, barrier, facts, w, made)
        if facts[r + 2] and facts[at + 2]:
            made = _summed(r, undone, devices, barrier + ENDS * PURPOSE, facts, w, made)
        barrier += WAYS * ENDS * PURPOSE
        r += REDUCTION + facts[r] * facts[r + 1]
    return made


def _reading(readers: Numbers, devices: int, facts: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
    """The devices on which some operators have pieces, in the order in which these are listed; and what ends pieces backward: how
    many there are on each device, where the last one is, and of each its name, and where the one before it on its device is.

    Args:
        readers: where the operators' blocks are.
        devices: how many there are.
    """
    total, size, named = 0, 0, 0
    for at in readers:
        total += facts[at + 1]
    name, prior, numbered = np.empty(total, np.int64), np.empty(total, np.int64), np.empty(devices, np.int64)
    seen, counts, last = np.zeros(devices, np.int64), np.zeros(devices, np.int64), np.full(devices, NONE)
    for at in readers:
        pieces, _, undone, on = _ends(at, facts)
        for i in range(pieces):
            d = facts[on + i]
            if not seen[d]:
                numbered[named], seen[d], named = d, 1, named + 1
            if facts[at + 2]:
                name[size], prior[size], last[d], counts[d], size = facts[undone + i], last[d], size, counts[d] + 1, size + 1
    return numbered, counts, last, name, prior


def _weight(at: int, barrier: int, readers: Numbers, facts: Numbers, w: Wires, made: Made) -> Made:
    """The all-reduces of a weight's gradient: one for each part of it that is read on the same devices.

    Args:
        at: where its block is.
        barrier: the name of the first ring's barrier.
        readers: where the blocks of those are that read it.
    """
    parts, start, total = int(facts[at + 1]), 0, 0
    if parts == 0:
        return made
    numbered, held, last, name, prior = _reading(readers, len(w.between), facts)
    first = at + WEIGHT + 2 * parts
    counts, bits, members = np.empty(parts, np.int64), np.empty(parts, np.int64), np.empty(at + facts[at] - first, np.int64)
    for g in range(parts):
        counts[g], bits[g] = facts[at + WEIGHT + g], facts[at + WEIGHT + parts + g]
        for k in range(start, start + counts[g]):
            d, p = numbered[facts[first + k]], k
            while p > start and members[p - 1] > d:
                members[p], p = members[p - 1], p - 1
            members[p], total = d, total + held[d]
        start += counts[g]
    group, found, size, start = np.empty(total, np.int64), np.empty(total, np.int64), 0, 0
    for g in range(parts):
        begin = size
        for m in range(start, start + counts[g]):
            k = last[members[m]]
            while k != NONE:
                group[size], found[size], k, size = g, name[k], prior[k], size + 1
        found[begin:size] = np.sort(found[begin:size])  # a weight that all steps read is waited for by thousands of tasks
        start += counts[g]
    waits, before = _waiting(group, found, size, parts)
    return _rings(waits, before, members, counts, bits, barrier, w, made)


def _sources(at: int, makers: int, readers: int, pieces: int, facts: Numbers) -> Numbers:
    """Where several pieces of a maker hold the same: 1 for that from which a reader takes it, on its own device if one is; else 0.

    Args:
        at: where the operand is.
        makers, readers, pieces: where their devices are, and how many pieces the reader has.
    """
    n, parts, first = facts[at + 1], facts[at + 2], at + OPERAND
    if parts == 0:
        return np.ones(n, np.int64)
    best, found = np.full(pieces * parts, NONE), np.zeros(n, np.int64)
    for k in range(first, first + n):
        j = facts[k + n]
        place, reader, maker = j * parts + facts[k + 3 * n], facts[readers + j], facts[makers + facts[k]]
        other = best[place]
        if other == NONE or (maker == reader and facts[makers + facts[other]] != reader):
            if other != NONE:
                found[other - first] = 0
            best[place], found[k - first] = k, 1
    return found


def _operand(at: int, h: int, reader: int, maker: int, head: Numbers, facts: Numbers, w: Wires, made: Made) -> tuple[Made, Numbers]:
    """The transfers of an operand, and a block of what pieces wait for.

    Args:
        at, reader, maker: where its block is, and those of who reads and who makes it.
        h: where the head says more of it.
    """
    pieces, _, undone, readers = _ends(reader, facts)
    _, done, _, makers = _ends(maker, facts)
    n, first, itemsize = facts[at + 1], at + OPERAND, head[h + 5]
    source, backward = _sources(at, makers, readers, pieces, facts), n if head[h + 4] and facts[reader + 2] else 0
    made = _with_room(made, n + backward, n + backward, 0)
    records, tasks, _, used = made
    waits, size = np.zeros(WAITING + 2 * (n + backward), np.int64), WAITING
    for way in range(WAYS):
        for k in range(backward if way else n):
            if not way and not source[k]:
                continue
            i, j = int(facts[first + k]), int(facts[first + n + k])
            on, to, end = int(facts[makers + i]), int(facts[readers + j]), facts[done + i]
            if way:
                on, to, end = to, on, facts[undone + j]
            if on != to:
                link, name = int(w.between[on][to]), head[h + 2 + way] + i * ROW + j
                wire = on if w.first == OWN else w.first + link
                _put(name, wire, 1, link, itemsize * facts[first + 2 * n + k], records, tasks, used)
                records[used[0]] = end
                used[0], end = used[0] + 1, name
            waits[size], waits[size + 1] = i if way else j, end
            waits[1 + way], size = waits[1 + way] + 1, size + 2
    waits[0] = size
    return made, waits[:size]


def _waited(blocks: Numbers, way: int, waits: Numbers, piece: Numbers, name: Numbers, count: int) -> int:
    """Adds the pairs of one way that blocks have to so many; gives how many there are then."""
    for at in blocks:
        first = at + WAITING + 2 * way * waits[at + 1]
        for p in range(first, first + 2 * waits[at + 1 + way], 2):
            piece[count], name[count], count = waits[p], waits[p + 1], count + 1
    return count


def _computing(at: int, h: int, part: int, blocks: Numbers, head: Numbers, facts: Numbers, waits: Numbers, made: Made) -> Made:
    """The tasks of an operator's pieces, of one way.

    Args:
        at: where its block is.
        h: where the head says more of it.
        part: the number of this.
        blocks: where `waits` says what pieces wait for.
    """
    way, begins = head[h + 1], head[h + 3]
    pieces, done, _, devices = _ends(at, facts)
    total, count, place = pieces, 0, 0
    for b in blocks:
        total += waits[b + 1 + way]
    piece, name = np.empty(total, np.int64), np.empty(total, np.int64)
    for i in range(pieces if begins else 0):
        piece[i], name[i], count = i, facts[done + i], count + 1
    count = _waited(blocks, way, waits, piece, name, count)
    found, before = _waiting(piece, name, count, pieces)
    made = _with_room(made, pieces, len(before), 0)
    records, tasks, _, used = made
    for i in range(pieces):
        _put(head[h + 2] + i, facts[devices + i], found[i], part, facts[devices + i], records, tasks, used)
        place = _wait(before, place, found[i], records, used)
    return made


def _begins(count: int, facts: Numbers) -> Numbers:
    """Where so many blocks begin, and where the last one ends."""
    found = np.zeros(count + 1, np.int64)
    for b in range(count):
        found[b + 1] = found[b] + facts[found[b]]
    return found


@partial(
    compiled,
    parts=(
        *(_longer, _with_room, _put, _wait, _waiting, _rings, _ends, _summed, _operator, _reading, _weight),
        *(_sources, _operand, _waited, _computing, _begins),
    ),
)
def made_of(head: Numbers, facts: Numbers, waits: Numbers, w: Wires) -> tuple[Made, Numbers, Numbers, int, int]:
    """The tasks of some operators, weights and operands.

    Args:
        head: see `around`.
        facts: blocks of operators, weights and operands. What ends the pieces of operators that are anew is written there.
        waits: blocks of what is waited for, of operands that are not anew.
        w: what joins devices.

    Gives the tasks; blocks of what is waited for of operands that are anew; where the records end of each operator, weight, operand
    and of what computes; and how many of the tasks are of rings, and of rings or transfers.
    """
    operators, anew, weights = int(head[0]), int(head[1]), int(head[2])
    operands, kept, computing = int(head[3]), int(head[4]), int(head[5])
    at, begins = _begins(operators + weights + operands, facts), np.empty(kept + operands, np.int64)
    used = np.zeros(3, np.int64)
    made = Made(np.empty(FEW, np.int64), np.empty(FEW, np.int64), np.empty(FEW, np.int64), used)
    ends, part, h, size = np.empty(anew + weights + operands + computing, np.int64), 0, 6, len(waits)
    for k in range(anew):
        made = _operator(at[k], head[h], head[h + 1], facts, w, made)
        ends[part], part, h = used[0], part + 1, h + 2
    for k in range(weights):
        readers = np.empty(head[h + 1], np.int64)
        for r in range(len(readers)):
            readers[r] = at[int(head[h + 2 + r])]
        made = _weight(at[operators + k], head[h], readers, facts, w, made)
        ends[part], part, h = used[0], part + 1, h + 2 + len(readers)
    ringed, first = used[1] // TASK, _begins(kept, waits)
    for e in range(kept):
        begins[operands + e] = first[e]
    for e in range(operands):
        made, found = _operand(at[operators + weights + e], h, at[int(head[h])], at[int(head[h + 1])], head, facts, w, made)
        waits, begins[e] = _longer(waits, size, len(found)), size
        for p in range(len(found)):
            waits[size + p] = found[p]
        ends[part], part, h, size = used[0], part + 1, h + 6, size + len(found)
    sent = used[1] // TASK
    for p in range(computing):
        blocks = np.empty(head[h + 4], np.int64)
        for b in range(len(blocks)):
            blocks[b] = begins[head[h + 5 + b]]
        if not head[h + 1] or facts[at[int(head[h])] + 2]:
            made = _computing(at[int(head[h])], h, p, blocks, head, facts, waits, made)
        ends[part], part, h = used[0], part + 1, h + 5 + len(blocks)
    return made, waits[first[kept] : size], ends, ringed, sent
