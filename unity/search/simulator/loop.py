"""The loop of a simulation: takes tasks in the order of their keys, from the beginning or from any moment on (FlexFlow, algorithm
1, lines 9 to 20).

Tasks are numbered, and what is known of them is in arrays, by number:

    device                      where it runs; below zero: there is no such task (any more)
    seconds                     how long
    first, count, before        what it waits for: before[first : first + count]
    ready, level, high, low     its key (`tasks`), the name in two parts; NEVER ready: not known yet
    end                         when it ends

To go on from a moment nothing needs to be kept but these: what was ready before the moment is over, or is running, and its times
say when devices are free, and who still waits for whom.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from heapq import heappop, heappush
from math import inf

from unity.search.simulator.compiled import compiled

Numbers = MutableSequence[int]
Times = MutableSequence[float]

NEVER = inf


@compiled
def first_difference(
    changed: Numbers, device: Numbers, first: Numbers, count: Numbers, before: Numbers, ready: Times, end: Times
) -> float:
    """A moment before which changed tasks make no difference, where those are NEVER ready, and all others when they were.

    A task is ready when its predecessors have ended. If one of them changes as well, or as a consequence, then it is not ready
    before that one; so the times before the change are good enough. When tasks that changed were ready is left to the caller.
    """
    moment = NEVER
    for n in changed:
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


@compiled
def line_up(
    since: float,
    device: Numbers,
    first: Numbers,
    count: Numbers,
    before: Numbers,
    ready: Times,
    end: Times,
    last: Times,
    missing: Numbers,
    waiting: Numbers,
    after: Numbers,
) -> None:
    """Of tasks that were not ready before a moment: how many predecessors of each are `missing`, as they are not over either, and
    who waits for task n: after[waiting[n] : waiting[n + 1]]. And until when the others keep each device: `last`.

    `waiting` has room for two more than there are tasks, `after` for as many as `before`.
    """
    tasks = len(device)
    for n in range(tasks):
        missing[n] = 0
    for n in range(tasks + 2):
        waiting[n] = 0
    for d in range(len(last)):
        last[d] = 0.0
    for n in range(tasks):
        if device[n] < 0:
            continue
        if ready[n] < since:
            if end[n] > last[device[n]]:
                last[device[n]] = end[n]
            continue
        for k in range(first[n], first[n] + count[n]):
            p = before[k]
            if ready[p] >= since:
                missing[n] += 1
                waiting[p + 2] += 1
    for n in range(tasks):
        waiting[n + 2] += waiting[n + 1]
    for n in range(tasks):
        if device[n] >= 0 and ready[n] >= since:
            for k in range(first[n], first[n] + count[n]):
                p = before[k]
                if ready[p] >= since:
                    after[waiting[p + 1]] = n
                    waiting[p + 1] += 1


@compiled
def follow(
    since: float,
    device: Numbers,
    seconds: Times,
    first: Numbers,
    count: Numbers,
    before: Numbers,
    high: Numbers,
    low: Numbers,
    ready: Times,
    level: Numbers,
    end: Times,
    last: Times,
    missing: Numbers,
    waiting: Numbers,
    after: Numbers,
) -> tuple[int, int]:
    """Takes all tasks that were not ready before a moment, once they are lined up, and says when they are ready and end.

    Gives how many were taken, and how many never, as they wait for one that is not there, or for themselves.
    """
    tasks = len(device)
    queue = [(0.0, 0, 0, 0, 0) for _ in range(0)]  # empty, but of what: ready, level, high, low, number
    for n in range(tasks):
        if device[n] >= 0 and ready[n] >= since and missing[n] == 0:
            latest = 0.0
            for k in range(first[n], first[n] + count[n]):
                if end[before[k]] > latest:
                    latest = end[before[k]]
            heappush(queue, (latest, 0, high[n], low[n], n))
    taken = 0
    while len(queue) > 0:
        now, depth, _, _, n = heappop(queue)
        taken += 1
        d = device[n]
        ended = max(last[d], now) + seconds[n]
        ready[n] = now
        level[n] = depth
        end[n] = ended
        last[d] = ended
        for k in range(waiting[n], waiting[n + 1]):
            s = after[k]
            missing[s] -= 1
            if missing[s] == 0:
                latest = ended  # not always the last end: tasks are taken in the order in which they are ready
                for j in range(first[s], first[s] + count[s]):
                    if end[before[j]] > latest:
                        latest = end[before[j]]
                heappush(queue, (latest, depth + 1 if latest == now else 0, high[s], low[s], s))
    left = 0
    for n in range(tasks):
        if missing[n] > 0:
            left += 1
    return taken, left
