"""Where a run after a change does again what the run before it did, only later or earlier.

Networks join their devices again and again: at a batch norm's statistics, at the loss. What the change of one operator sets
moving has settled after such a place, and all goes on as before, all by the same time later, up to the next place where something
changed: the same operator's backward pass, say. So at the marks of the run before, each told by the first task that is ready there,
it is asked whether the state is that of the mark but for the time. Then what the run before did is taken over, as far as nothing
that changed matters, and the loop goes on from there.

Times can be moved only where sums are not rounded (`ticks`); by no time at all they always can.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from unity.search.simulator.schedule import Past, Schedule
from unity.search.simulator.states import NEVER, Node, State, by_name, now_of, refresh, refresh_all
from unity.search.simulator.ticks import MOST

ends, ended = attrgetter("end"), attrgetter("ended")


class Rejoin:
    """A schedule that was taken back to a mark because tasks changed, on its way through what is left.

    Args:
        schedule: after `back_to`.
        past: what that gave.
        touched: the tasks that changed.
        exact: whether times are added without rounding.
    """

    def __init__(self, schedule: Schedule, past: Past, touched: set[Node], exact: bool) -> None:
        self.schedule, self.past, self.touched, self.exact = schedule, past, touched, exact
        self.begun = past.marks[past.mark].taken
        end = State(NEVER, self.begun + len(past.order), {}, {}, past.last)
        self.old = [*past.marks[past.mark :], end]
        self.moved = 0  # tasks that were taken over

    def run(self, state: State) -> bool:
        """Takes all that is left. Whether no task waits for another for ever."""
        s, stops = self.schedule, self._stops()
        s.marks.append(state.copy())
        stopped = s.run(state, stops)
        while stopped is not None:
            k = stops.pop(stopped.pending[stopped.now][0])
            stopped = s.run(self._joined(stopped, k), stops)
        return len(s.order) == len(s.nodes)

    def _stops(self) -> dict[Node, int]:
        """The first task that is ready at each mark of the run before, and the mark's number."""
        found: dict[Node, int] = {}
        for k, mark in enumerate(self.old[1:-1], 1):
            batch = [n for n in mark.first if n not in self.touched]
            if batch:
                found[min(batch, key=by_name)] = k
        return found

    def _joined(self, state: State, k: int) -> State:
        """A state after what the run before did from mark k on, if that is now done again; else the same state."""
        mark = self.old[k]
        by = state.now - mark.now
        if (by and not self._moves(by)) or not self._alike(state, mark, by):
            return state
        until = bisect_right(self.old, self._until(mark, by), key=now_of) - 1
        return self._taken_over(k, until, by) if until > k else state

    def _moves(self, by: float) -> bool:
        """Whether times can be moved so far without rounding."""
        return self.exact and max(self.past.last) + abs(by) < MOST

    def _alike(self, state: State, mark: State, by: float) -> bool:
        """Whether a state is a mark's, but for the time and what changed.

        What counts of the tasks that are over is when devices are free, and when those end that others wait for.
        """
        now, shift = state.now, by + mark.by
        then = now - shift
        if any((a > now or b > then) and a != b + shift for a, b in zip(state.last, mark.last, strict=True)):
            return False
        waits = self._waits(state)
        if waits != self._waits(mark) or self._moments(state, 0.0) != self._moments(mark, shift) or not self._in_step(mark):
            return False
        if max(self.old[0].last) + self.old[0].by > min(now, mark.now):  # then what is not run again may be running still
            return False
        before, after = self.past.order[: mark.taken - self.begun], self.schedule.order[self.begun :]
        running = *self._running(before, ended, mark), *self._running(after, ends, state)
        return all(p.end == p.ended + by or waits.keys().isdisjoint(p.joint) for p in running)

    def _in_step(self, mark: State) -> bool:
        """Whether the changed tasks that are taken now are those that were at the mark, of such as are there in both runs. Then so
        are all others, as nobody but they can wait for a task that is there in one."""
        there = ((n, ready) for n, (ready, end) in self.past.times.items() if end < NEVER and n in self.touched)
        return all((ready < mark.now) == (n.ready < NEVER) for n, ready in there if n.task is not None)

    def _running(self, order: Sequence[Node], end: Callable[[Node], float], state: State) -> Iterator[Node]:
        """Of the tasks that were taken, those that have not ended at a moment, the last first. A device runs them in order."""
        raw = state.now - state.by
        devices = {d for d, last in enumerate(state.last) if last > raw}
        for n in reversed(order):
            if not devices:
                return
            if end(n) > state.now:
                yield n
            elif n not in self.touched:  # else it may have been another device's
                devices.discard(n.device)

    def _waits(self, state: State) -> dict[Node, int]:
        return {n: count for n, count in state.waits.items() if n not in self.touched}

    def _moments(self, state: State, by: float) -> dict[float, set[Node]]:
        found = ((moment + by, set(batch) - self.touched) for moment, batch in state.pending.items())
        return {moment: batch for moment, batch in found if batch}

    def _until(self, mark: State, by: float) -> float:
        """The moment of the run before up to which nothing that changed matters, neither as it was nor as it is.

        A task is ready when its predecessors have ended, and if one of them changed or comes later, not before that one.
        """
        times = self.past.times
        was = (times[n][0] for n in self.touched)
        found = min((ready for ready in was if ready >= mark.now), default=NEVER)
        waiting = {n for n in self.touched if n.task is not None and n.ready == NEVER}
        for n in waiting:
            if waiting.isdisjoint(n.before):
                there = [p.end if p.ready < NEVER else times[p][1] + by for p in n.before]
                found = min(found, max(there, default=0.0) - by)
        return found

    def _taken_over(self, k: int, until: int, by: float) -> State:
        """The state after what the run before did from one of its marks to another."""
        s, first, last = self.schedule, self.old[k], self.old[until]
        for n, (ready, end) in self.past.times.items():
            if n.ready == NEVER and first.now <= ready < last.now:
                n.ready, n.end = ready, end
        more = len(s.order) - first.taken
        self.moved += last.taken - first.taken
        s.move(self.past, first.taken - self.begun, last.taken - self.begun, by)
        marks = [mark.later(by, more) for mark in self.old[k:until]]
        state = last.later(by, more).copy()
        refresh_all(marks, refresh(state, self.touched))
        s.leave(marks if last.now == NEVER else (*marks, state.copy()))
        return state
