"""The loop of a simulation: takes tasks in the order of their keys, from the beginning or from any moment on (FlexFlow, algorithm
1, lines 9 to 20).

Tasks are numbered, and what is known of them is in arrays, by number:

    device                      where it runs; below zero: there is no such task (any more)
    seconds                     how long
    first, count, before        what it waits for: before[first : first + count]
    head, then, prior, waiter   who waits for it, as a list of places in `before`, from head on: `waiter` is whose place it is
    ready, level, high, low     its key (`tasks`), the name in two parts; NEVER ready: not known yet
    end                         when it ends

To go on from a moment nothing needs to be kept but these: what was ready before the moment is over, or is running, and its times
say when devices are free, and who still waits for whom.

Nor need the loop go on to the end. When all that runs and waits does so as it did before the change, only so much later or earlier,
then so does all that follows, until the next task that changed (`_joined` says why). Its times are moved by as much. That is the
same to the last bit only if times are added without rounding: if not, the loop goes on until all is as before at the same time.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from functools import partial
from heapq import heappop, heappush
from math import inf

from unity.search.simulator.compiled import compiled

Numbers = MutableSequence[int]
Times = MutableSequence[float]

NEVER = inf
NONE = -1  # no place in a list
UNSEEN, TAKEN = -1, -2  # instead of how many predecessors a task still waits for
STEADY = 8  # how many tasks in a row are moved alike before all others are looked at


@compiled
def link(
    rows: Numbers, first: Numbers, count: Numbers, before: Numbers, head: Numbers, then: Numbers, prior: Numbers, waiter: Numbers
) -> None:
    """Puts tasks on the lists of those that they wait for."""
    for n in rows:
        for k in range(first[n], first[n] + count[n]):
            p = before[k]
            waiter[k], prior[k], then[k] = n, NONE, head[p]
            if head[p] != NONE:
                prior[head[p]] = k
            head[p] = k


@compiled
def unlink(
    rows: Numbers, first: Numbers, count: Numbers, before: Numbers, head: Numbers, then: Numbers, prior: Numbers, waiter: Numbers
) -> None:
    """Takes tasks off these lists."""
    for n in rows:
        for k in range(first[n], first[n] + count[n]):
            if prior[k] != NONE:
                then[prior[k]] = then[k]
            else:
                head[before[k]] = then[k]
            if then[k] != NONE:
                prior[then[k]] = prior[k]


@compiled
def first_difference(
    changed: Numbers, was_ready: Times, device: Numbers, first: Numbers, count: Numbers, before: Numbers, ready: Times, end: Times
) -> float:
    """A moment before which changed tasks make no difference, where those are NEVER ready, and all others when they were.

    A task is ready when its predecessors have ended. If one of them changes as well, or as a consequence, then it is not ready
    before that one; so the times before the change are good enough. `was_ready`: when tasks that changed were.
    """
    moment = NEVER
    for c in range(len(changed)):
        n = changed[c]
        moment = min(moment, was_ready[c])
        if device[n] >= 0:
            here = 0.0
            for k in range(first[n], first[n] + count[n]):
                p = before[k]
                if ready[p] == NEVER:
                    here = NEVER
                elif end[p] > here:
                    here = end[p]
            if here < moment:
                moment = here
    return moment


def _latest(n: int, first: Numbers, count: Numbers, before: Numbers, end: Times) -> float:
    """When the last of a task's predecessors ends."""
    latest = 0.0
    for k in range(first[n], first[n] + count[n]):
        if end[before[k]] > latest:
            latest = end[before[k]]
    return latest


def _open(n: int, since: float, first: Numbers, count: Numbers, before: Numbers, ready: Times, missing: Numbers) -> int:
    """How many of a task's predecessors were not ready before a moment, and have not been taken since."""
    found = 0
    for k in range(first[n], first[n] + count[n]):
        if ready[before[k]] >= since and missing[before[k]] != TAKEN:
            found += 1
    return found


@compiled
def line_up(
    since: float,
    changed: Numbers,
    device: Numbers,
    first: Numbers,
    count: Numbers,
    head: Numbers,
    then: Numbers,
    waiter: Numbers,
    ready: Times,
    end: Times,
    last: Times,
    missing: Numbers,
    begun: Numbers,
) -> tuple[int, int]:
    """What there is at a moment: until when each device is kept by what was ready before, `last`; and as `begun` who may be next,
    those that wait for what is not over, and those that changed. Gives how many that are, and how many are to be taken.

    All others wait for one that has not been ready either. `begun` has room for one more than there are tasks.
    """
    waiting, found = 0, 0
    for d in range(len(last)):
        last[d] = 0.0
    for n in range(len(device)):
        missing[n] = UNSEEN
    for n in range(len(device)):
        if device[n] < 0:
            continue
        if ready[n] >= since:
            waiting += 1
            if count[n] == 0 and missing[n] == UNSEEN:
                missing[n] = 0
                begun[found] = n
                found += 1
        elif end[n] >= since:
            last[device[n]] = max(last[device[n]], end[n])
            k = head[n]
            while k != NONE:
                if missing[waiter[k]] == UNSEEN and ready[waiter[k]] >= since:
                    missing[waiter[k]] = 0
                    begun[found] = waiter[k]
                    found += 1
                k = then[k]
    for n in changed:
        if device[n] >= 0 and missing[n] == UNSEEN:
            missing[n] = 0
            begun[found] = n
            found += 1
    return found, waiting


def _joined(
    now: float,
    offset: float,
    queue: list[tuple[float, int, int, int, int]],
    changed: Numbers,
    was_ready: Times,
    was_end: Times,
    device: Numbers,
    ready: Times,
    level: Numbers,
    missing: Numbers,
    last: Times,
    moves: Times,
    moved_from: Times,
    was_last: Times,
    was_moved_from: Times,
) -> bool:
    """Whether all that comes next is what came next before the change, `offset` later, until the first task that changed.

    So it is if (of what was taken, all was before then; `follow` looks at that)
    - devices are kept as long, as far as that is not over, and by tasks of which each ends `offset` later. Then so does whatever
      else waits for these.
    - whatever waits for nothing but its device has its key, moved. All else waits for one that does.
    - of tasks that changed, those that were taken before the change are taken, or gone, and over, and the others are not taken.
    """
    then = now - offset
    for d in range(len(last)):
        over = last[d] <= now and was_last[d] <= then
        if not over and (moves[d] != offset or moved_from[d] > now or was_moved_from[d] > then):
            return False
    for at, depth, _, _, n in queue:
        if ready[n] != NEVER and (at - ready[n] != offset or depth != level[n]):
            return False
    for c in range(len(changed)):
        if was_ready[c] != NEVER:
            taken = device[changed[c]] < 0 or missing[changed[c]] == TAKEN
            if was_ready[c] < then and (not taken or was_end[c] > then):
                return False
            if was_ready[c] >= then and missing[changed[c]] == TAKEN:
                return False
    return True


def _move(
    then: float,
    offset: float,
    changed: Numbers,
    was_ready: Times,
    was_end: Times,
    device: Numbers,
    ready: Times,
    end: Times,
    missing: Numbers,
) -> int:
    """Moves all that was to be taken from then on. Tasks that changed and make a difference only now come first in their arrays:
    gives how many."""
    if offset != 0.0:
        for n in range(len(device)):
            if missing[n] != TAKEN and ready[n] >= then:
                ready[n] += offset
                end[n] += offset
    rest = 0
    for c in range(len(changed)):
        n = changed[c]
        if missing[n] != TAKEN and (device[n] >= 0 or was_ready[c] >= then):
            changed[rest], was_ready[rest], was_end[rest] = n, was_ready[c] + offset, was_end[c] + offset
            rest += 1
    return rest


@partial(compiled, parts=(_latest, _open, _joined, _move))
def follow(
    since: float,
    exact: bool,
    changed: Numbers,
    was_ready: Times,
    was_end: Times,
    device: Numbers,
    seconds: Times,
    first: Numbers,
    count: Numbers,
    before: Numbers,
    head: Numbers,
    then: Numbers,
    waiter: Numbers,
    high: Numbers,
    low: Numbers,
    ready: Times,
    level: Numbers,
    end: Times,
    last: Times,
    missing: Numbers,
    begun: Numbers,
) -> tuple[int, int]:
    """Takes tasks that were not ready before a moment, once they are lined up, and says when they are ready and end.

    Gives how many were taken, and of how many that changed the difference is still to come: `changed` begins with those. If all
    were taken, or others never can be, as they wait for themselves, that is NONE. `exact`: whether times are added without
    rounding.
    """
    queue = [(0.0, 0, 0, 0, 0) for _ in range(0)]  # empty, but of what: ready, level, high, low, number
    for n in begun:
        missing[n] = _open(n, since, first, count, before, ready, missing)
        if missing[n] == 0:
            heappush(queue, (_latest(n, first, count, before, end), 0, high[n], low[n], n))
    was_last = [ended for ended in last]
    moves, moved_from, was_moved_from = [0.0 for _ in last], [0.0 for _ in last], [0.0 for _ in last]
    taken, steady, enough, offset, furthest = 0, 0, STEADY, NEVER, -1.0
    while len(queue) > 0:
        now, depth, _, _, n = heappop(queue)
        d = device[n]
        steady = steady + 1 if now - ready[n] == offset and depth == level[n] else 0
        offset = now - ready[n]
        if steady >= enough and furthest < ready[n] and (offset == 0.0 or (exact and offset > -NEVER)):
            if _joined(
                now, offset, queue, changed, was_ready, was_end, device, ready, level, missing, last, moves, moved_from, was_last, was_moved_from
            ):
                return taken, _move(ready[n], offset, changed, was_ready, was_end, device, ready, end, missing)
            enough = steady + STEADY + (len(last) + len(queue) + len(changed)) // STEADY
        ended = max(last[d], now) + seconds[n]
        if ended - end[n] != moves[d]:
            moves[d], moved_from[d], was_moved_from[d] = ended - end[n], last[d], was_last[d]
        if ready[n] != NEVER:
            furthest = max(furthest, ready[n])
            was_last[d] = max(was_last[d], end[n])
        ready[n], level[n], end[n], last[d], missing[n] = now, depth, ended, ended, TAKEN
        taken += 1
        k = head[n]
        while k != NONE:
            s = waiter[k]
            missing[s] = missing[s] - 1 if missing[s] != UNSEEN else _open(s, since, first, count, before, ready, missing)
            if missing[s] == 0:
                latest = _latest(s, first, count, before, end)  # not always this end: the first that is ready need not end first
                heappush(queue, (latest, depth + 1 if latest == now else 0, high[s], low[s], s))
            k = then[k]
    return taken, NONE
