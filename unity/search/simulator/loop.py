"""The loop of a simulation: takes tasks in the order of their keys, from the beginning or from any moment on (FlexFlow, algorithm
1, lines 9 to 20).

To go on from a moment nothing needs to be kept but what tasks are and when they run: what was ready before the moment is over, or
is running, and its times say when devices are free, and who still waits for whom.

Nor need the loop go on to the end. When all that runs and waits does so as it did before the change, only so much later or earlier,
then so does all that follows, until the next task that changed (`_joined`). Its times are moved by as much. That is the same to the
last bit only where times are added without rounding; elsewhere the loop goes on until all is as before at the same times.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unity.search.simulator.compiled import compiled

Numbers = NDArray[np.int64]  # lists, where loops are interpreted
Moments = NDArray[np.float64]

NEVER = inf
NONE = -1  # no place in a list
UNSEEN, TAKEN = -1, -2  # instead of how many predecessors a task still waits for
STEADY = 8  # so many tasks in a row are moved alike before all others are looked at


class Table(NamedTuple):
    """What is known of tasks, by number.

    Args:
        device: where it runs; below zero: there is no such task (any more).
        seconds: how long.
        high, low: its name in two parts.
        first, waits: what it waits for: before[first : first + waits].
        before: by place, the numbers of tasks that others wait for.
        waiter: by place, who waits.
        head: the first place of those who wait for a task.
        then, prior: by place, the next of these places, and the one before.
    """

    device: Numbers
    seconds: Moments
    high: Numbers
    low: Numbers
    first: Numbers
    waits: Numbers
    head: Numbers
    before: Numbers
    waiter: Numbers
    then: Numbers
    prior: Numbers


class Times(NamedTuple):
    """When tasks run, by number: ready and level are of its key (`tasks`). NEVER ready: not known yet."""

    ready: Moments
    level: Numbers
    end: Moments


class Changed(NamedTuple):
    """The numbers of tasks that changed, and when they were ready and ended; NEVER, if they were not there."""

    rows: Numbers
    ready: Moments
    end: Moments


class Line(NamedTuple):
    """What the loop knows while it goes on.

    Args:
        missing: for how many predecessors a task still waits.
        begun: tasks that may be next, and who they are is not known yet.
        queue, at, depth: a heap of those that wait for their device alone; when each is ready, by place, and its level, by number.
        last: until when each device is kept.
        was_last: until when it was by the same tasks.
        moves: how much later its last tasks end than they did.
        moved, was_moved: from when on that is so: what ends until then is moved differently.
    """

    missing: Numbers
    begun: Numbers
    queue: Numbers
    at: Moments
    depth: Numbers
    last: Moments
    was_last: Moments
    moves: Moments
    moved: Moments
    was_moved: Moments


@compiled
def link(rows: Numbers, t: Table) -> None:
    """Puts tasks on the lists of those that they wait for."""
    for n in rows:
        for k in range(t.first[n], t.first[n] + t.waits[n]):
            p = t.before[k]
            t.waiter[k], t.prior[k], t.then[k] = n, NONE, t.head[p]
            if t.head[p] != NONE:
                t.prior[t.head[p]] = k
            t.head[p] = k


@compiled
def unlink(rows: Numbers, t: Table) -> None:
    """Takes tasks off these lists."""
    for n in rows:
        for k in range(t.first[n], t.first[n] + t.waits[n]):
            if t.prior[k] != NONE:
                t.then[t.prior[k]] = t.then[k]
            else:
                t.head[t.before[k]] = t.then[k]
            if t.then[k] != NONE:
                t.prior[t.then[k]] = t.prior[k]


@compiled
def first_difference(changed: Changed, t: Table, times: Times) -> float:
    """A moment before which changed tasks make no difference, where those are NEVER ready, and all others when they were.

    A task is ready when its predecessors have ended. If one of them changes as well, or as a consequence, then it is not ready
    before that one; so the times before the change are good enough.
    """
    moment = NEVER
    for c in range(len(changed.rows)):
        moment = min(moment, changed.ready[c])
        n = changed.rows[c]
        if t.device[n] >= 0:
            here = 0.0
            for k in range(t.first[n], t.first[n] + t.waits[n]):
                here = max(here, times.end[t.before[k]])
            moment = min(moment, here)
    return float(moment)


@compiled
def line_up(since: float, rows: Numbers, t: Table, times: Times, line: Line) -> tuple[int, int]:
    """What there is at a moment: until when devices are kept, and who has begun to wait: for what is running, or for nothing. So
    may tasks that changed, `rows`. All others wait for one that was not ready either.

    Gives how many have begun, and how many are to be taken.
    """
    found, left = 0, 0
    for d in range(len(line.last)):
        line.last[d] = 0.0
        line.moves[d] = 0.0
        line.moved[d] = 0.0
        line.was_moved[d] = 0.0
    for n in range(len(t.device)):
        line.missing[n] = UNSEEN
    for n in range(len(t.device)):
        if t.device[n] < 0:
            continue
        if times.ready[n] >= since:
            left += 1
            if t.waits[n] == 0:
                line.begun[found] = n
                found += 1
        elif times.end[n] >= since:
            d = t.device[n]
            line.last[d] = max(line.last[d], times.end[n])
            k = t.head[n]
            while k != NONE:
                s = t.waiter[k]
                if line.missing[s] == UNSEEN and times.ready[s] >= since:
                    line.missing[s] = 0
                    line.begun[found] = s
                    found += 1
                k = t.then[k]
    for d in range(len(line.last)):
        line.was_last[d] = line.last[d]
    for n in rows:
        if t.device[n] >= 0 and t.waits[n] > 0 and line.missing[n] == UNSEEN:
            line.missing[n] = 0
            line.begun[found] = n
            found += 1
    return found, left


def _open(n: int, since: float, first: Numbers, count: Numbers, before: Numbers, ready: Moments, missing: Numbers) -> int:
    """How many of a task's predecessors were not ready before a moment, and have not been taken since."""
    found = 0
    for k in range(first[n], first[n] + count[n]):
        if ready[before[k]] >= since and missing[before[k]] != TAKEN:
            found += 1
    return found


def _latest(n: int, first: Numbers, count: Numbers, before: Numbers, end: Moments) -> float:
    """When the last of a task's predecessors ends: not always the last one that was ready."""
    latest = 0.0
    for k in range(first[n], first[n] + count[n]):
        latest = max(latest, end[before[k]])
    return float(latest)


def _sooner(n: int, m: int, depth: Numbers, high: Numbers, low: Numbers) -> bool:
    """Whether task n is taken before task m, where both are ready at once."""
    if depth[n] != depth[m]:
        return depth[n] < depth[m]
    if high[n] != high[m]:
        return high[n] < high[m]
    return low[n] < low[m]


def _push(size: int, moment: float, n: int, queue: Numbers, at: Moments, depth: Numbers, high: Numbers, low: Numbers) -> None:
    """Adds a task to a queue of so many."""
    k = size
    while k > 0:
        up = (k - 1) >> 1
        if at[up] < moment or (at[up] == moment and _sooner(queue[up], n, depth, high, low)):
            break
        queue[k], at[k] = queue[up], at[up]
        k = up
    queue[k], at[k] = n, moment


def _pop(size: int, queue: Numbers, at: Moments, depth: Numbers, high: Numbers, low: Numbers) -> None:
    """Takes the first task away, so that there are as many as said."""
    n, moment, k, down = queue[size], at[size], 0, 1
    while down < size:
        m = down + 1
        if m < size and (at[m] < at[down] or (at[m] == at[down] and _sooner(queue[m], queue[down], depth, high, low))):
            down = m
        if moment < at[down] or (moment == at[down] and _sooner(n, queue[down], depth, high, low)):
            break
        queue[k], at[k] = queue[down], at[down]
        k, down = down, 2 * down + 1
    queue[k], at[k] = n, moment


def _joined(offset: float, size: int, changed: Changed, t: Table, times: Times, line: Line) -> bool:
    """Whether all that comes next, the first in the queue to begin with, is what came next before the change, `offset` later, until
    the next task that changed. What was taken was all ready before then.

    So it is, by induction over keys, if
    - devices are kept as long, as far as that is not over, and by tasks of which each ends `offset` later. Then so does what others
      still wait for.
    - all that waits for its device alone has its key, moved. What else there is waits for such.
    - of the tasks that changed those that had been taken are so again, or are gone, and have been over; the others are not taken.
    """
    now = line.at[0]
    then = now - offset
    for d in range(len(line.last)):
        over = line.last[d] <= now and line.was_last[d] <= then
        if not over and (line.moves[d] != offset or line.moved[d] > now or line.was_moved[d] > then):
            return False
    for k in range(size):
        n = line.queue[k]
        if times.ready[n] != NEVER and (line.at[k] - times.ready[n] != offset or line.depth[n] != times.level[n]):
            return False
    for c in range(len(changed.rows)):
        n = changed.rows[c]
        if changed.ready[c] < then:
            if changed.end[c] > then or (t.device[n] >= 0 and line.missing[n] != TAKEN):
                return False
        elif changed.ready[c] != NEVER and line.missing[n] == TAKEN:
            return False
    return True


def _move(then: float, offset: float, changed: Changed, t: Table, times: Times, missing: Numbers) -> int:
    """Moves all that was to be taken from a moment on. Changed tasks that make a difference only then come first in their arrays:
    gives how many."""
    if offset != 0.0:
        for n in range(len(missing)):
            by = offset if missing[n] != TAKEN and times.ready[n] >= then else 0.0
            times.ready[n] += by
            times.end[n] += by
    rest = 0
    for c in range(len(changed.rows)):
        n = changed.rows[c]
        if missing[n] != TAKEN and (t.device[n] >= 0 or changed.ready[c] >= then):
            changed.rows[rest], changed.ready[rest], changed.end[rest] = n, changed.ready[c] + offset, changed.end[c] + offset
            rest += 1
    return rest


def _begin(since: float, begun: int, t: Table, times: Times, line: Line) -> int:
    """Puts those that wait for their device alone into the queue; gives how many."""
    size = 0
    for k in range(begun):
        n = int(line.begun[k])
        line.missing[n] = _open(n, since, t.first, t.waits, t.before, times.ready, line.missing)
        if line.missing[n] == 0:
            line.depth[n] = 0
            latest = _latest(n, t.first, t.waits, t.before, times.end)
            _push(size, latest, n, line.queue, line.at, line.depth, t.high, t.low)
            size += 1
    return size


@partial(compiled, parts=(_open, _latest, _sooner, _push, _pop, _joined, _move, _begin))
def follow(since: float, exact: bool, begun: int, changed: Changed, t: Table, times: Times, line: Line) -> tuple[int, int]:
    """Takes tasks that were not ready before a moment, once they are lined up, and says when they are ready and end.

    Gives how many were taken, and how many tasks that changed make a difference only later: `changed` begins with those. It is
    NONE where all were taken, or the others never can be, as they wait for themselves. `exact`: times are added without rounding.
    """
    # parts that are called for every task take arrays: to take them out of a tuple, Numba counts references again and again
    device, seconds, high, low, first, count, head, before, waiter, then, _ = t
    ready, level, end = times
    missing, _, queue, at, depth, last, was_last, moves, moved, was_moved = line
    size = _begin(since, begun, t, times, line)
    taken, steady, offset, furthest = 0, 0, NEVER, -1.0
    while size > 0:
        now, n = at[0], int(queue[0])
        was, d = float(ready[n]), device[n]
        steady = steady + 1 if now - was == offset and depth[n] == level[n] else min(steady, 0)
        offset = now - was
        if steady >= STEADY and furthest < was and was != NEVER and (exact or offset == 0.0):
            if _joined(offset, size, changed, t, times, line):
                return taken, _move(was, offset, changed, t, times, missing)
            steady = -(len(last) + size + len(changed.rows)) // STEADY  # looking takes as long as taking that many
        size -= 1
        _pop(size, queue, at, depth, high, low)
        ended = max(last[d], now) + seconds[n]
        if ended - end[n] != moves[d]:
            moves[d], moved[d], was_moved[d] = ended - end[n], last[d], was_last[d]
        if was != NEVER:
            furthest, was_last[d] = max(furthest, was), max(was_last[d], end[n])
        ready[n], level[n], end[n], last[d], missing[n] = now, depth[n], ended, ended, TAKEN
        taken += 1
        k = head[n]
        while k != NONE:
            s = int(waiter[k])
            missing[s] = missing[s] - 1 if missing[s] != UNSEEN else _open(s, since, first, count, before, ready, missing)
            if missing[s] == 0:
                latest = _latest(s, first, count, before, end)
                depth[s] = depth[n] + 1 if latest == now else 0
                _push(size, latest, s, queue, at, depth, high, low)
                size += 1
            k = then[k]
    return taken, NONE
