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

from unity.base.compiled_loops import compiled
from unity.baselines.flexflow.delta.columns import GONE, Moments, Numbers

Counts = NDArray[np.int32]  # places and numbers of tasks, of which many are looked at: half as long is a tenth faster

NEVER = inf
NONE = -1  # no place in a list
# Instead of how many predecessors a task still waits for: nobody has asked, it was taken, it is running or waits for nothing.
UNSEEN, TAKEN, FIRST = -1, -2, -3
STEADY = 8  # so many tasks in a row are moved alike before all others are looked at


class Table(NamedTuple):
    """What is known of tasks, by number.

    Args:
        name: what it is called.
        device: where it runs; GONE: there is no such task (any more).
        seconds, nbytes: how long, and what it sends.
        first, waits: what it waits for: before[first : first + waits].
        head: the first place of those who wait for a task.
        before: by place, the numbers of tasks that others wait for.
        waiter: by place, who waits.
        then, prior: by place, the next of these places, and the one before.
    """

    name: Numbers
    device: Counts
    seconds: Moments
    nbytes: Moments
    first: Counts
    waits: Counts
    head: Counts
    before: Counts
    waiter: Counts
    then: Counts
    prior: Counts


class Times(NamedTuple):
    """When tasks run, by number: ready and level are of its key (`tasks`). NEVER ready: not known yet."""

    ready: Moments
    level: Counts
    end: Moments


class Changed(NamedTuple):
    """The numbers of tasks that changed, and when they were ready and ended; NEVER ready, if they were not there."""

    rows: Numbers
    ready: Moments
    end: Moments


class Line(NamedTuple):
    """What the loop knows while it goes on.

    Args:
        missing: for how many predecessors a task still waits.
        latest: when the last of the others ends.
        begun: tasks that may be next, and who they are is not known yet.
        queue, at, depth, called: a heap of those that wait for their device alone, and their keys: when they are ready, their
            levels, and their names.
        last: until when each device is kept.
        was_last: until when it was by the same tasks.
        moves: how much later its last tasks end than they did.
        moved, was_moved: from when on that is so: what ends until then is moved differently.
    """

    missing: Counts
    latest: Moments
    begun: Counts
    queue: Counts
    at: Moments
    depth: Counts
    called: Numbers
    last: Moments
    was_last: Moments
    moves: Moments
    moved: Moments
    was_moved: Moments


def _first_difference(count: int, changed: Changed, t: Table, times: Times) -> float:
    """A moment before which changed tasks make no difference, where those are NEVER ready, and all others when they were.

    A task is ready when its predecessors have ended. If one of them changes as well, or as a consequence, then it is not ready
    before that one; so the times before the change are good enough.
    """
    _, device, _, _, first, waits, _, before, _, _, _ = t
    (rows, ready, _), end, moment = changed, times.end, NEVER
    for c in range(count):
        moment = min(moment, ready[c])
        n = rows[c]
        if device[n] >= 0:
            here = 0.0
            for k in range(first[n], first[n] + waits[n]):
                here = max(here, end[before[k]])
            moment = min(moment, here)
    return float(moment)


def _line_up(since: float, count: int, rows: Numbers, t: Table, times: Times, line: Line) -> tuple[int, int]:
    """What there is at a moment: until when devices are kept, and who has begun to wait: for what is running, or for nothing. So
    may tasks that changed, so many `rows`. All others wait for one that was not ready either.

    Gives how many have begun, and how many are to be taken.
    """
    found, left = 0, 0
    ready, end, device, waits, head, waiter, then = times.ready, times.end, t.device, t.waits, t.head, t.waiter, t.then
    missing, _, begun, _, _, _, _, last, was_last, moves, moved, was_moved = line
    for d in range(len(last)):
        last[d], moves[d], moved[d], was_moved[d] = 0.0, 0.0, 0.0, 0.0
    # what looks at all tasks again and again has no branches, so that it is done for several at once
    for n in range(len(device)):
        there, later = device[n] >= 0, ready[n] >= since
        left += there & later
        missing[n] = FIRST if there & ((later & (waits[n] == 0)) | ((not later) & (end[n] >= since))) else UNSEEN
    for n in range(len(device)):
        if missing[n] == FIRST:
            missing[n] = UNSEEN
            if ready[n] >= since:
                begun[found] = n
                found += 1
                continue
            d = device[n]
            last[d] = max(last[d], end[n])
            k = head[n]
            while k != NONE:
                s = waiter[k]
                if missing[s] == UNSEEN and ready[s] >= since:
                    missing[s] = 0
                    begun[found] = s
                    found += 1
                k = then[k]
    for d in range(len(last)):
        was_last[d] = last[d]
    for c in range(count):
        n = rows[c]
        if device[n] >= 0 and waits[n] > 0 and missing[n] == UNSEEN:
            missing[n] = 0
            begun[found] = n
            found += 1
    return found, left


def _open(
    n: int, since: float, first: Counts, count: Counts, before: Counts, ready: Moments, end: Moments, missing: Counts
) -> tuple[int, float]:
    """How many of a task's predecessors were not ready before a moment, and have not been taken since; and when the last of the
    others ends, which is not always the last one that was ready."""
    found, latest = 0, 0.0
    for k in range(first[n], first[n] + count[n]):
        p = before[k]
        if ready[p] >= since and missing[p] != TAKEN:
            found += 1
        elif end[p] > latest:
            latest = end[p]
    return found, float(latest)


def _sooner(a: float, deep: int, name: int, b: float, depth: int, other: int) -> bool:
    """Whether one key is before another: when tasks are ready, their levels, their names."""
    if a != b:
        return a < b
    return deep < depth if deep != depth else name < other


def _push(
    size: int, moment: float, deep: int, name: int, n: int, queue: Counts, at: Moments, depth: Counts, called: Numbers
) -> None:
    """Adds a task to a queue of so many."""
    k = size
    while k > 0:
        up = (k - 1) >> 1
        if _sooner(at[up], depth[up], called[up], moment, deep, name):
            break
        queue[k], at[k], depth[k], called[k] = queue[up], at[up], depth[up], called[up]
        k = up
    queue[k], at[k], depth[k], called[k] = n, moment, deep, name


def _pop(size: int, queue: Counts, at: Moments, depth: Counts, called: Numbers) -> None:
    """Takes the first task away, so that there are as many as said."""
    n, moment, deep, name, k, down = queue[size], at[size], depth[size], called[size], 0, 1
    while down < size:
        m = down + 1
        if m < size and _sooner(at[m], depth[m], called[m], at[down], depth[down], called[down]):
            down = m
        if _sooner(moment, deep, name, at[down], depth[down], called[down]):
            break
        queue[k], at[k], depth[k], called[k] = queue[down], at[down], depth[down], called[down]
        k, down = down, 2 * down + 1
    queue[k], at[k], depth[k], called[k] = n, moment, deep, name


def _joined(offset: float, size: int, count: int, changed: Changed, t: Table, times: Times, line: Line) -> bool:
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
        if times.ready[n] != NEVER and (line.at[k] - times.ready[n] != offset or line.depth[k] != times.level[n]):
            return False
    for c in range(count):
        n = changed.rows[c]
        if changed.ready[c] < then:
            if changed.end[c] > then or (t.device[n] >= 0 and line.missing[n] != TAKEN):
                return False
        elif changed.ready[c] != NEVER and line.missing[n] == TAKEN:
            return False
    return True


def _move(then: float, offset: float, count: int, changed: Changed, t: Table, times: Times, missing: Counts) -> int:
    """Moves all that was to be taken from a moment on. Changed tasks that make a difference only then come first in their arrays:
    gives how many."""
    if offset != 0.0:
        ready, end = times.ready, times.end
        for n in range(len(missing)):
            by = offset if (missing[n] != TAKEN) & (ready[n] >= then) & (ready[n] < NEVER) else 0.0
            ready[n] += by
            end[n] += by
    rest = 0
    for c in range(count):
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
        line.missing[n], line.latest[n] = _open(n, since, t.first, t.waits, t.before, times.ready, times.end, line.missing)
        if line.missing[n] == 0:
            _push(size, line.latest[n], 0, t.name[n], n, line.queue, line.at, line.depth, line.called)
            size += 1
    return size


def _take(
    since: float, exact: bool, begun: int, count: int, changed: Changed, t: Table, times: Times, line: Line
) -> tuple[int, int]:
    """Takes tasks that were not ready before a moment, once they are lined up, and says when they are ready and end.

    Gives how many were taken, and how many tasks that changed make a difference only later: `changed` begins with those. It is
    NONE where all were taken, or the others never can be, as they wait for themselves. `exact`: times are added without rounding.
    """
    # parts that are called for every task take arrays: to take them out of a tuple, Numba counts references again and again
    name, device, seconds, _, first, waits, head, before, waiter, then, _ = t
    ready, level, end = times
    missing, latest, _, queue, at, depth, called, last, was_last, moves, moved, was_moved = line
    size = _begin(since, begun, t, times, line)
    taken, steady, offset, furthest = 0, 0, NEVER, -1.0
    while size > 0:
        now, n, deep = at[0], int(queue[0]), depth[0]
        was, d = float(ready[n]), device[n]
        steady = steady + 1 if now - was == offset and deep == level[n] else min(steady, 0)
        offset = now - was
        if steady >= STEADY and furthest < was and was != NEVER and (exact or offset == 0.0):
            if _joined(offset, size, count, changed, t, times, line):
                return taken, _move(was, offset, count, changed, t, times, missing)
            steady = -(len(last) + size + count) // STEADY  # looking takes as long as taking that many
        size -= 1
        _pop(size, queue, at, depth, called)
        ended = max(last[d], now) + seconds[n]
        if ended - end[n] != moves[d]:
            moves[d], moved[d], was_moved[d] = ended - end[n], last[d], was_last[d]
        if was != NEVER:
            furthest, was_last[d] = max(furthest, was), max(was_last[d], end[n])
        ready[n], level[n], end[n], last[d], missing[n] = now, deep, ended, ended, TAKEN
        taken += 1
        k = head[n]
        while k != NONE:
            s = int(waiter[k])
            if missing[s] == UNSEEN:
                missing[s], latest[s] = _open(s, since, first, waits, before, ready, end, missing)
            else:
                missing[s], latest[s] = missing[s] - 1, max(latest[s], ended)
            if missing[s] == 0:
                _push(size, latest[s], deep + 1 if latest[s] == now else 0, name[s], s, queue, at, depth, called)
                size += 1
            k = then[k]
    return taken, NONE


@partial(compiled, parts=(_first_difference, _line_up, _open, _sooner, _push, _pop, _joined, _move, _begin, _take))
def follow(exact: bool, rows: Numbers, t: Table, times: Times, line: Line) -> int:
    """Simulates what follows a change of some tasks, `rows`; gives how many tasks that is, or NONE, if some can never be taken."""
    count, taken = len(rows), 0
    changed = Changed(np.empty(count, np.int64), np.empty(count), np.empty(count))
    for c in range(count):
        n = rows[c]
        changed.rows[c], changed.ready[c], changed.end[c] = n, times.ready[n], times.end[n]
        times.ready[n], times.end[n] = NEVER, 0.0 if t.device[n] == GONE else NEVER
    while count > 0:
        since = _first_difference(count, changed, t, times)
        begun, left = _line_up(since, count, changed.rows, t, times, line)
        now, count = _take(since, exact, begun, count, changed, t, times, line)
        if count == NONE and now < left:
            return NONE
        taken += now
    return taken
