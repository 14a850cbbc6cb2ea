"""The compiled event loop: takes tasks in the order of their keys, from the start or from any moment on (FlexFlow, algorithm 1,
lines 9 to 20).

To resume at a moment the loop needs no state beyond the tasks and their times: what became ready before the moment has ended or is
running, and its times tell until when devices are busy and which tasks still wait for which.

Nor does the loop have to run to the end. Once all that runs and waits does so as before the change, only earlier or later by one
offset, so does everything after it, until the next changed task (`_has_rejoined`); its times are then shifted without simulation.
The result is the same to the last bit only if times are added without rounding. Where they are not, the loop runs on until
everything is as before at the same times.
"""

from __future__ import annotations

from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unity.base.compiled_loops import compiled
from unity.baselines.flexflow.delta.columns import GONE, Moments, Numbers

Counts = NDArray[np.int32]  # slots and numbers of tasks; 32 bits instead of 64 make the scans a tenth faster

NEVER = inf
NONE = -1  # the end of a list
# In place of a number of missing predecessors: not counted yet; the task was taken; it is running or waits for nothing.
UNSEEN, TAKEN, FIRST = -1, -2, -3
STEADY = 8  # tasks in a row that must have the same offset before the loop checks all others


class TaskTable(NamedTuple):
    """The known tasks, by number.

    Args:
        name: the task's name.
        device: where it runs; GONE if the task does not exist (any more).
        seconds: its run time.
        nbytes: the bytes that it sends.
        first: where its predecessors begin: before[first : first + waits].
        waits: how many predecessors it has.
        head: the first slot of the list of its successors.
        before: by slot, the number of a predecessor.
        waiter: by slot, the number of the task that waits for it.
        then: by slot, the next slot of the same predecessor's list.
        prior: by slot, the slot before.
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
    """When tasks run, by number. `ready` and `level` are parts of the key (`search.simulator.tasks`); NEVER is not known yet."""

    ready: Moments
    level: Counts
    end: Moments


class ChangedTasks(NamedTuple):
    """The numbers of the changed tasks, and when they were ready and ended before the change; NEVER if they did not exist."""

    rows: Numbers
    ready: Moments
    end: Moments


class EventLoopState(NamedTuple):
    """The working state of the loop.

    Args:
        missing: for each task the number of predecessors that have not been taken, or one of UNSEEN, TAKEN and FIRST.
        latest: when the last of the other predecessors ends.
        begun: tasks that may be next, before it is known which of them wait for their device alone.
        queue: a heap of the tasks that wait for their device alone.
        at: the heap's keys: when its tasks are ready,
        depth: their levels,
        called: and their names.
        last: until when each device is busy.
        was_last: until when the same tasks kept it busy before the change.
        moves: how much later the device's last task ends than before the change.
        moved: since when that offset holds, in the new times: tasks that ended earlier are shifted differently.
        was_moved: the same moment in the old times.
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


def _first_difference(count: int, changed: ChangedTasks, t: TaskTable, times: Times) -> float:
    """Return a moment before which the changed tasks make no difference. Their `ready` is NEVER; other times are the old ones.

    A task is ready when its predecessors have ended. If a predecessor changes too, or is affected, then the task is not ready
    before that one is, so the old times are good enough.
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


def _line_up(since: float, count: int, rows: Numbers, t: TaskTable, times: Times, state: EventLoopState) -> tuple[int, int]:
    """Set up the state at a moment: until when devices are busy, and which tasks may wait for a running task or for nothing.

    Any of the first `count` changed tasks may. All other tasks wait for one that was not ready yet either.

    Returns how many such tasks there are, and how many tasks are to be taken.
    """
    begun_count, left = 0, 0
    ready, end, device, waits, head, waiter, then = times.ready, times.end, t.device, t.waits, t.head, t.waiter, t.then
    missing, _, begun, _, _, _, _, last, was_last, moves, moved, was_moved = state
    for d in range(len(last)):
        last[d], moves[d], moved[d], was_moved[d] = 0.0, 0.0, 0.0, 0.0
    # Branch-free, so that the compiler vectorizes the scan.
    for n in range(len(device)):
        exists, later = device[n] >= 0, ready[n] >= since
        left += exists & later
        missing[n] = FIRST if exists & ((later & (waits[n] == 0)) | ((not later) & (end[n] >= since))) else UNSEEN
    for n in range(len(device)):
        if missing[n] == FIRST:
            missing[n] = UNSEEN
            if ready[n] >= since:
                begun[begun_count] = n
                begun_count += 1
                continue
            d = device[n]
            last[d] = max(last[d], end[n])
            k = head[n]
            while k != NONE:
                s = waiter[k]
                if missing[s] == UNSEEN and ready[s] >= since:
                    missing[s] = 0
                    begun[begun_count] = s
                    begun_count += 1
                k = then[k]
    for d in range(len(last)):
        was_last[d] = last[d]
    for c in range(count):
        n = rows[c]
        if device[n] >= 0 and waits[n] > 0 and missing[n] == UNSEEN:
            missing[n] = 0
            begun[begun_count] = n
            begun_count += 1
    return begun_count, left


def _count_missing(
    n: int, since: float, first: Counts, count: Counts, before: Counts, ready: Moments, end: Moments, missing: Counts
) -> tuple[int, float]:
    """Count a task's predecessors that were not ready before a moment and have not been taken since.

    Returns also when the last of the other predecessors ends, which need not be the one that was ready last.
    """
    missing_count, latest = 0, 0.0
    for k in range(first[n], first[n] + count[n]):
        p = before[k]
        if ready[p] >= since and missing[p] != TAKEN:
            missing_count += 1
        elif end[p] > latest:
            latest = end[p]
    return missing_count, float(latest)


def _precedes(a: float, deep: int, name: int, b: float, depth: int, other: int) -> bool:
    """Return whether one key (ready time, level, name) precedes another."""
    if a != b:
        return a < b
    return deep < depth if deep != depth else name < other


def _push(
    size: int, moment: float, deep: int, name: int, n: int, queue: Counts, at: Moments, depth: Counts, called: Numbers
) -> None:
    """Add a task to the heap of `size` tasks."""
    k = size
    while k > 0:
        up = (k - 1) >> 1
        if _precedes(at[up], depth[up], called[up], moment, deep, name):
            break
        queue[k], at[k], depth[k], called[k] = queue[up], at[up], depth[up], called[up]
        k = up
    queue[k], at[k], depth[k], called[k] = n, moment, deep, name


def _pop(size: int, queue: Counts, at: Moments, depth: Counts, called: Numbers) -> None:
    """Remove the heap's first task, which leaves `size` tasks."""
    n, moment, deep, name, k, down = queue[size], at[size], depth[size], called[size], 0, 1
    while down < size:
        m = down + 1
        if m < size and _precedes(at[m], depth[m], called[m], at[down], depth[down], called[down]):
            down = m
        if _precedes(moment, deep, name, at[down], depth[down], called[down]):
            break
        queue[k], at[k], depth[k], called[k] = queue[down], at[down], depth[down], called[down]
        k, down = down, 2 * down + 1
    queue[k], at[k], depth[k], called[k] = n, moment, deep, name


def _has_rejoined(
    offset: float, size: int, count: int, changed: ChangedTasks, t: TaskTable, times: Times, state: EventLoopState
) -> bool:
    """Return whether all that comes next, starting with the head of the queue, repeats what came next before the change, shifted by
    `offset`, until the next changed task. Everything taken so far was ready before then.

    By induction over keys it does, if

    - devices stay busy equally long, unless they are idle by then, and their last tasks all end `offset` later; then so does
      everything that tasks still wait for;

    - every task that waits for its device alone has its old key, shifted; all other tasks wait for such;

    - every changed task that had been taken has been taken again, or is gone and had ended; the others have not been taken.
    """
    now = state.at[0]
    then = now - offset
    for d in range(len(state.last)):
        over = state.last[d] <= now and state.was_last[d] <= then
        if not over and (state.moves[d] != offset or state.moved[d] > now or state.was_moved[d] > then):
            return False
    for k in range(size):
        n = state.queue[k]
        if times.ready[n] != NEVER and (state.at[k] - times.ready[n] != offset or state.depth[k] != times.level[n]):
            return False
    for c in range(count):
        n = changed.rows[c]
        if changed.ready[c] < then:
            if changed.end[c] > then or (t.device[n] >= 0 and state.missing[n] != TAKEN):
                return False
        elif changed.ready[c] != NEVER and state.missing[n] == TAKEN:
            return False
    return True


def _shift(then: float, offset: float, count: int, changed: ChangedTasks, t: TaskTable, times: Times, missing: Counts) -> int:
    """Shift the times of all tasks that were ready at or after a moment and have not been taken.

    Changed tasks that matter only later move to the front of their arrays. Returns how many they are.
    """
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


def _fill_queue(since: float, begun: int, t: TaskTable, times: Times, state: EventLoopState) -> int:
    """Put the tasks that wait for their device alone into the queue. Returns how many they are."""
    size = 0
    for k in range(begun):
        n = int(state.begun[k])
        state.missing[n], state.latest[n] = _count_missing(
            n, since, t.first, t.waits, t.before, times.ready, times.end, state.missing
        )
        if state.missing[n] == 0:
            _push(size, state.latest[n], 0, t.name[n], n, state.queue, state.at, state.depth, state.called)
            size += 1
    return size


def _take_tasks(
    since: float, exact: bool, begun: int, count: int, changed: ChangedTasks, t: TaskTable, times: Times, state: EventLoopState
) -> tuple[int, int]:
    """Take the tasks that were not ready before a moment, once they are lined up, and compute when they are ready and end.

    Returns how many were taken, and how many changed tasks matter only later: `changed` begins with those. The latter is NONE if
    all tasks were taken, or the others never can be because they wait for themselves. `exact` says that times are added without
    rounding.
    """
    # Functions called for every task take arrays: unpacking them from a tuple makes Numba count references on every call.
    name, device, seconds, _, first, waits, head, before, waiter, then, _ = t
    ready, level, end = times
    missing, latest, _, queue, at, depth, called, last, was_last, moves, moved, was_moved = state
    size = _fill_queue(since, begun, t, times, state)
    taken, steady, offset, furthest = 0, 0, NEVER, -1.0
    while size > 0:
        now, n, deep = at[0], int(queue[0]), depth[0]
        was, d = float(ready[n]), device[n]
        steady = steady + 1 if now - was == offset and deep == level[n] else min(steady, 0)
        offset = now - was
        if steady >= STEADY and furthest < was and was != NEVER and (exact or offset == 0.0):
            if _has_rejoined(offset, size, count, changed, t, times, state):
                return taken, _shift(was, offset, count, changed, t, times, missing)
            steady = -(len(last) + size + count) // STEADY  # the check takes as long as taking that many tasks
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
                missing[s], latest[s] = _count_missing(s, since, first, waits, before, ready, end, missing)
            else:
                missing[s], latest[s] = missing[s] - 1, max(latest[s], ended)
            if missing[s] == 0:
                _push(size, latest[s], deep + 1 if latest[s] == now else 0, name[s], s, queue, at, depth, called)
                size += 1
            k = then[k]
    return taken, NONE


@partial(
    compiled,
    parts=(_first_difference, _line_up, _count_missing, _precedes, _push, _pop, _has_rejoined, _shift, _fill_queue, _take_tasks),
)
def follow(exact: bool, rows: Numbers, t: TaskTable, times: Times, state: EventLoopState) -> int:
    """Simulate the effects of a change of the tasks `rows`. Returns how many tasks were simulated, or NONE if some can never be
    taken.
    """
    count, taken = len(rows), 0
    changed = ChangedTasks(np.empty(count, np.int64), np.empty(count), np.empty(count))
    for c in range(count):
        n = rows[c]
        changed.rows[c], changed.ready[c], changed.end[c] = n, times.ready[n], times.end[n]
        times.ready[n], times.end[n] = NEVER, 0.0 if t.device[n] == GONE else NEVER
    while count > 0:
        since = _first_difference(count, changed, t, times)
        begun, left = _line_up(since, count, changed.rows, t, times, state)
        now, count = _take_tasks(since, exact, begun, count, changed, t, times, state)
        if count == NONE and now < left:
            return NONE
        taken += now
    return taken
