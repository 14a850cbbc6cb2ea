"""The compiled loop that builds a strategy's tasks: transfers between pieces, all-reduces in rings, and the pieces' computations.

All that a change rebuilds is built in one call, because most changes rebuild only some dozens of tasks and a call takes as long as
the loop itself. `encoding` describes the arrays: a header, and blocks of facts one after the other. An `at` is the offset of a
block in its array.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from unity.base.compiled_loops import compiled
from unity.baselines.flexflow.delta.columns import Numbers
from unity.baselines.flexflow.strategy.encoding import (
    BACKWARD,
    BARRIER,
    ENDS,
    OPERAND,
    OPERATOR,
    PURPOSE,
    RECORD,
    REDUCTION,
    RING,
    ROW,
    TASK,
    WAITING,
    WAITS,
    WAYS,
    WEIGHT,
    TaskBuffers,
)
from unity.baselines.flexflow.strategy.wiring import OWN, Wires

NONE = -1
FEW = 2048  # initial size of the buffers: most changes need no more


def _grown(array: Numbers, used: int, more: int) -> Numbers:
    """Return an array with room for `more` numbers after the first `used`."""
    if used + more <= len(array):
        return array
    longer = np.empty(2 * (used + more), np.int64)
    for k in range(used):
        longer[k] = array[k]
    return longer


def _with_room(buffers: TaskBuffers, tasks: int, waits: int, rings: int) -> TaskBuffers:
    """Return the buffers with room for more tasks, predecessors and rings."""
    records, tasks_array, rings_array, used = buffers
    return TaskBuffers(
        _grown(records, used[0], RECORD * tasks + waits),
        _grown(tasks_array, used[1], TASK * tasks),
        _grown(rings_array, used[2], RING * rings),
        used,
    )


def _append_task(
    name: int, device: int, waits: int, index: int, amount: int, records: Numbers, tasks: Numbers, used: Numbers
) -> None:
    """Append a task without the names of its predecessors."""
    offset, task = used[0], used[1]
    records[offset], records[offset + 1], records[offset + WAITS] = name, device, waits
    tasks[task], tasks[task + 1], tasks[task + 2] = offset, index, amount
    used[0], used[1] = offset + RECORD, task + TASK


def _append_predecessors(names: Numbers, first: int, count: int, records: Numbers, used: Numbers) -> int:
    """Append predecessors to the last task. Returns the index of the next name."""
    for k in range(first, first + count):
        records[used[0]] = names[k]
        used[0] += 1
    return first + count


def _group_predecessors(piece: Numbers, name: Numbers, count: int, pieces: int) -> tuple[Numbers, Numbers]:
    """Sort the predecessors of each piece and drop duplicates.

    Returns how many each of the `pieces` has, and their names, piece after piece. The input is `count` pairs of a piece and a name.
    """
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


def _add_rings(
    waits: Numbers,
    before: Numbers,
    devices: Numbers,
    counts: Numbers,
    bits: Numbers,
    barrier: int,
    w: Wires,
    buffers: TaskBuffers,
) -> TaskBuffers:
    """Build rings: a barrier for each, and for each member of a ring of several a task that waits for the barrier.

    Args:
        waits: how many tasks each ring waits for.
        before: their names, ring after ring.
        devices: the members' devices, ring after ring.
        counts: how many members each ring has.
        bits: the bits of each ring's bytes.
        barrier: the name of the first ring's barrier.
        w: the connections.
        buffers: the buffers to append to.
    """
    rings = len(counts)
    buffers = _with_room(buffers, rings + len(devices), len(before) + len(devices), rings)
    records, tasks, rings_array, used = buffers
    place, first = 0, 0
    for g in range(rings):
        _append_task(barrier + g * ROW, w.barrier, waits[g], BARRIER, 0, records, tasks, used)
        place = _append_predecessors(before, place, waits[g], records, used)
    for g in range(rings):
        size, at, name = counts[g], used[2], barrier + PURPOSE + g * ROW
        slow = late = w.between[devices[first]][devices[first + 1]] if size > 1 else 0
        for k in range(size if size > 1 else 0):
            link = int(w.between[devices[first + k]][devices[first + (k + 1) % size]])
            resource = devices[first + k] if w.first == OWN else w.first + link
            slow = link if w.bandwidth[link] < w.bandwidth[slow] else slow
            late = link if w.latency[link] > w.latency[late] else late
            _append_task(name + k, resource, 1, at // RING, 0, records, tasks, used)
            records[used[0]] = barrier + g * ROW
            used[0] += 1
        if size > 1:
            rings_array[at], rings_array[at + 1], rings_array[at + 2], rings_array[at + 3] = size, bits[g], slow, late
            used[2] = at + RING
        first += size
    return buffers


def _ends(at: int, facts: Numbers) -> tuple[int, int, int, int]:
    """Return an operator's number of pieces, and offsets: of the tasks that end them, that end them backward, and of devices."""
    pieces, last = facts[at + 1], at + facts[at]
    return pieces, last - 3 * pieces, last - 2 * pieces, last - pieces


def _add_reduction(at: int, ends: int, devices: int, barrier: int, facts: Numbers, w: Wires, buffers: TaskBuffers) -> TaskBuffers:
    """Build the all-reduces of one reduction: rings of its pieces' devices, each device once in a ring. Their tasks end the pieces.

    Args:
        at: the offset of the reduction.
        ends: the offset of the tasks that end the pieces.
        devices: the offset of the pieces' devices.
        barrier: the name of the first ring's barrier.
        facts: the blocks.
        w: the connections.
        buffers: the buffers to append to.
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
    waits, before = _group_predecessors(group, name, n, groups)
    return _add_rings(waits, before, ring[:total], counts, bits, barrier, w, buffers)


def _add_operator(at: int, first: int, barrier: int, facts: Numbers, w: Wires, buffers: TaskBuffers) -> TaskBuffers:
    """Set the tasks that end an operator's pieces, and build its reductions.

    Args:
        at: the offset of the operator's block.
        first: the name of its first piece's task.
        barrier: the name of its first reduction's first barrier.
        facts: the blocks.
        w: the connections.
        buffers: the buffers to append to.
    """
    pieces, done, undone, devices = _ends(at, facts)
    for i in range(pieces):
        facts[done + i], facts[undone + i] = first + i, first + BACKWARD * PURPOSE + i
    r = at + OPERATOR
    for _ in range(facts[at + 3]):
        buffers = _add_reduction(r, done, devices, barrier, facts, w, buffers)
        if facts[r + 2] and facts[at + 2]:
            buffers = _add_reduction(r, undone, devices, barrier + ENDS * PURPOSE, facts, w, buffers)
        barrier += WAYS * ENDS * PURPOSE
        r += REDUCTION + facts[r] * facts[r + 1]
    return buffers


def _tasks_by_device(readers: Numbers, devices: int, facts: Numbers) -> tuple[Numbers, Numbers, Numbers, Numbers, Numbers]:
    """List the devices on which some operators have pieces, and the tasks that end these pieces backward.

    Returns the devices in order of appearance; for each device the number of its ending tasks and the index of the last one; and
    for each ending task its name and the index of the one before it on its device.
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


def _add_weight(at: int, barrier: int, readers: Numbers, facts: Numbers, w: Wires, buffers: TaskBuffers) -> TaskBuffers:
    """Build the all-reduces of a weight's gradient: one for each part of it that the same devices read.

    Args:
        at: the offset of the weight's block.
        barrier: the name of the first ring's barrier.
        readers: the offsets of the blocks of the operators that read it.
        facts: the blocks.
        w: the connections.
        buffers: the buffers to append to.
    """
    parts, start, total = int(facts[at + 1]), 0, 0
    if parts == 0:
        return buffers
    numbered, counts_on, last, name, prior = _tasks_by_device(readers, len(w.between), facts)
    first = at + WEIGHT + 2 * parts
    counts, bits, members = np.empty(parts, np.int64), np.empty(parts, np.int64), np.empty(at + facts[at] - first, np.int64)
    for g in range(parts):
        counts[g], bits[g] = facts[at + WEIGHT + g], facts[at + WEIGHT + parts + g]
        for k in range(start, start + counts[g]):
            d, p = numbered[facts[first + k]], k
            while p > start and members[p - 1] > d:
                members[p], p = members[p - 1], p - 1
            members[p], total = d, total + counts_on[d]
        start += counts[g]
    group, names, size, start = np.empty(total, np.int64), np.empty(total, np.int64), 0, 0
    for g in range(parts):
        begin = size
        for m in range(start, start + counts[g]):
            k = last[members[m]]
            while k != NONE:
                group[size], names[size], k, size = g, name[k], prior[k], size + 1
        names[begin:size] = np.sort(names[begin:size])  # the ring of a weight that all time steps read waits for thousands
        start += counts[g]
    waits, before = _group_predecessors(group, names, size, parts)
    return _add_rings(waits, before, members, counts, bits, barrier, w, buffers)


def _choose_sources(at: int, producer_devices: int, user_devices: int, pieces: int, facts: Numbers) -> Numbers:
    """Choose the piece from which a user's piece takes each part, where several pieces of the producer hold the same one.

    A piece on the user's own device is preferred. Returns 1 for each pair of pieces that is chosen, 0 for the others.
    """
    n, parts, first = facts[at + 1], facts[at + 2], at + OPERAND
    if parts == 0:
        return np.ones(n, np.int64)
    best, chosen = np.full(pieces * parts, NONE), np.zeros(n, np.int64)
    for k in range(first, first + n):
        j = facts[k + n]
        place, to, on = j * parts + facts[k + 3 * n], facts[user_devices + j], facts[producer_devices + facts[k]]
        other = best[place]
        if other == NONE or (on == to and facts[producer_devices + facts[other]] != to):
            if other != NONE:
                chosen[other - first] = 0
            best[place], chosen[k - first] = k, 1
    return chosen


def _add_operand(
    at: int, h: int, user: int, producer: int, head: Numbers, facts: Numbers, w: Wires, buffers: TaskBuffers
) -> tuple[TaskBuffers, Numbers]:
    """Build the transfers of an operand. Returns the buffers, and a block of the tasks that pieces wait for.

    Args:
        at: the offset of the operand's block.
        h: the offset of its entry in the header.
        user: the offset of its user's block.
        producer: the offset of its producer's block.
        head: the header.
        facts: the blocks.
        w: the connections.
        buffers: the buffers to append to.
    """
    pieces, _, undone, user_devices = _ends(user, facts)
    _, done, _, producer_devices = _ends(producer, facts)
    n, first, itemsize = facts[at + 1], at + OPERAND, head[h + 5]
    source = _choose_sources(at, producer_devices, user_devices, pieces, facts)
    backward = n if head[h + 4] and facts[user + 2] else 0
    buffers = _with_room(buffers, n + backward, n + backward, 0)
    records, tasks, _, used = buffers
    waits, size = np.zeros(WAITING + 2 * (n + backward), np.int64), WAITING
    for way in range(WAYS):
        for k in range(backward if way else n):
            if not way and not source[k]:
                continue
            i, j = int(facts[first + k]), int(facts[first + n + k])
            on, to, end = int(facts[producer_devices + i]), int(facts[user_devices + j]), facts[done + i]
            if way:
                on, to, end = to, on, facts[undone + j]
            if on != to:
                link, name = int(w.between[on][to]), head[h + 2 + way] + i * ROW + j
                wire = on if w.first == OWN else w.first + link
                _append_task(name, wire, 1, link, itemsize * facts[first + 2 * n + k], records, tasks, used)
                records[used[0]] = end
                used[0], end = used[0] + 1, name
            waits[size], waits[size + 1] = i if way else j, end
            waits[1 + way], size = waits[1 + way] + 1, size + 2
    waits[0] = size
    return buffers, waits[:size]


def _collect_pairs(blocks: Numbers, way: int, waits: Numbers, piece: Numbers, name: Numbers, count: int) -> int:
    """Append the pairs of one direction from some blocks to `count` others. Returns how many there are then."""
    for at in blocks:
        first = at + WAITING + 2 * way * waits[at + 1]
        for p in range(first, first + 2 * waits[at + 1 + way], 2):
            piece[count], name[count], count = waits[p], waits[p + 1], count + 1
    return count


def _add_computation(
    at: int, h: int, part: int, blocks: Numbers, head: Numbers, facts: Numbers, waits: Numbers, buffers: TaskBuffers
) -> TaskBuffers:
    """Build the tasks of an operator's pieces in one direction.

    Args:
        at: the offset of the operator's block.
        h: the offset of the computation's entry in the header.
        part: the number of the computation.
        blocks: the offsets in `waits` of the blocks that the pieces wait for.
        head: the header.
        facts: the blocks.
        waits: the waiting blocks.
        buffers: the buffers to append to.
    """
    way, begins = head[h + 1], head[h + 3]
    pieces, done, _, devices = _ends(at, facts)
    total, count, place = pieces, 0, 0
    for b in blocks:
        total += waits[b + 1 + way]
    piece, name = np.empty(total, np.int64), np.empty(total, np.int64)
    for i in range(pieces if begins else 0):
        piece[i], name[i], count = i, facts[done + i], count + 1
    count = _collect_pairs(blocks, way, waits, piece, name, count)
    counts, before = _group_predecessors(piece, name, count, pieces)
    buffers = _with_room(buffers, pieces, len(before), 0)
    records, tasks, _, used = buffers
    for i in range(pieces):
        _append_task(head[h + 2] + i, facts[devices + i], counts[i], part, facts[devices + i], records, tasks, used)
        place = _append_predecessors(before, place, counts[i], records, used)
    return buffers


def _offsets(count: int, facts: Numbers) -> Numbers:
    """Return the offset of each block, and the end of the last one."""
    offsets = np.zeros(count + 1, np.int64)
    for b in range(count):
        offsets[b + 1] = offsets[b] + facts[offsets[b]]
    return offsets


@partial(
    compiled,
    parts=(
        _grown,
        _with_room,
        _append_task,
        _append_predecessors,
        _group_predecessors,
        _add_rings,
        _ends,
        _add_reduction,
        _add_operator,
        _tasks_by_device,
        _add_weight,
        _choose_sources,
        _add_operand,
        _collect_pairs,
        _add_computation,
        _offsets,
    ),
)
def build_tasks(head: Numbers, facts: Numbers, waits: Numbers, w: Wires) -> tuple[TaskBuffers, Numbers, Numbers, int, int]:
    """Build the tasks of some operators, weights and operands.

    Args:
        head: the header (see `encoding`).
        facts: the blocks of operators, weights and operands. The tasks that end the pieces of changed operators are written there.
        waits: the waiting blocks of the operands to reuse.
        w: the connections.

    Returns the tasks; the waiting blocks of rebuilt operands; where the records of each operator, weight, operand and computation
    end; how many tasks belong to rings; and how many belong to rings or are transfers.
    """
    operators, changed, weights = int(head[0]), int(head[1]), int(head[2])
    operands, reused, computing = int(head[3]), int(head[4]), int(head[5])
    at, begins = _offsets(operators + weights + operands, facts), np.empty(reused + operands, np.int64)
    used = np.zeros(3, np.int64)
    buffers = TaskBuffers(np.empty(FEW, np.int64), np.empty(FEW, np.int64), np.empty(FEW, np.int64), used)
    ends, part, h, size = np.empty(changed + weights + operands + computing, np.int64), 0, 6, len(waits)
    for k in range(changed):
        buffers = _add_operator(at[k], head[h], head[h + 1], facts, w, buffers)
        ends[part], part, h = used[0], part + 1, h + 2
    for k in range(weights):
        readers = np.empty(head[h + 1], np.int64)
        for r in range(len(readers)):
            readers[r] = at[int(head[h + 2 + r])]
        buffers = _add_weight(at[operators + k], head[h], readers, facts, w, buffers)
        ends[part], part, h = used[0], part + 1, h + 2 + len(readers)
    ringed, first = used[1] // TASK, _offsets(reused, waits)
    for e in range(reused):
        begins[operands + e] = first[e]
    for e in range(operands):
        buffers, waiting_block = _add_operand(
            at[operators + weights + e], h, at[int(head[h])], at[int(head[h + 1])], head, facts, w, buffers
        )
        waits, begins[e] = _grown(waits, size, len(waiting_block)), size
        for p in range(len(waiting_block)):
            waits[size + p] = waiting_block[p]
        ends[part], part, h, size = used[0], part + 1, h + 6, size + len(waiting_block)
    sent = used[1] // TASK
    for p in range(computing):
        blocks = np.empty(head[h + 4], np.int64)
        for b in range(len(blocks)):
            blocks[b] = begins[head[h + 5 + b]]
        if not head[h + 1] or facts[at[int(head[h])] + 2]:
            buffers = _add_computation(at[int(head[h])], h, p, blocks, head, facts, waits, buffers)
        ends[part], part, h = used[0], part + 1, h + 5 + len(blocks)
    return buffers, waits[first[reused] : size], ends, ringed, sent
