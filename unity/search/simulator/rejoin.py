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
from collections.abc import Iterable, Iterator

from unity.search.simulator.schedule import Past, Schedule
from unity.search.simulator.states import NEVER, NOWHERE, Node, State, Stretch, by_name, refresh, refresh_all
from unity.search.simulator.ticks import MOST


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
        self.old = [*past.marks[past.mark :], State(NEVER, {}, {}, past.last, NOWHERE)]
        self.later = [*past.later, 0.0]
        self.then = [mark.now + by for mark, by in zip(self.old, self.later, strict=True)]
        self.moved: dict[Stretch, float] = {}  # what was taken over, and by how much later it was said to be before
        self.there = [(n, ready) for n, (ready, end) in past.times.items() if end < NEVER and n in touched and n.task is not None]

    @property
    def taken_over(self) -> int:
        """How many tasks were."""
        return sum(len(stretch.order) for stretch in self.moved)

    def run(self, state: State) -> bool:
        """Takes all that is left. Whether no task waits for another for ever."""
        s, stops = self.schedule, self._stops()
        s.leave(state)
        stopped = s.run(state, stops)
        while stopped is not None:
            k = stops.pop(stopped.pending[stopped.now][0])
            stopped = s.run(self._joined(stopped, k), stops)
        return s.taken() == len(s.nodes)

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
        by = state.now - self.then[k]
        if (by and not self._moves(by)) or not self._alike(state, k, by):
            return state
        until = bisect_right(self.then, self._until(k, by)) - 1
        return self._taken_over(k, until, by) if until > k else state

    def _moves(self, by: float) -> bool:
        """Whether times can be moved so far without rounding."""
        return self.exact and max(self.past.last) + abs(by) < MOST

    def _alike(self, state: State, k: int, by: float) -> bool:
        """Whether a state is a mark's, but for the time and what changed.

        What counts of the tasks that are over is when devices are free, and when those end that others wait for.
        """
        mark, now, shift = self.old[k], state.now, by + self.later[k]
        if any((a > now or b > mark.now) and a != b + shift for a, b in zip(state.last, mark.last, strict=True)):
            return False
        if not (self._same_moments(mark.pending, state.pending, shift) and self._same_waits(mark.waits, state.waits)):
            return False
        if not self._in_step(k):
            return False
        if max(self.old[0].last) + self.later[0] > min(now, self.then[k]):  # what is not run again may be running still
            return False
        before = self._running(self._before(k), self.then[k], self._busy(mark))
        after = self._running(self._now(), now, self._busy(state))
        waits = state.waits.keys() - self.touched
        return all(p.until == self._ended(p) + by or waits.isdisjoint(p.joint) for p in (*before, *after))

    def _in_step(self, k: int) -> bool:
        """Whether the changed tasks that are taken now are those that were at mark k, of such as are there in both runs. Then so
        are all others, as nobody but they can wait for a task that is there in one."""
        then = self.then[k]
        return all((ready < then) == (n.ready < NEVER) for n, ready in self.there)

    def _ended(self, n: Node) -> float:
        """When a task that was taken in both runs ended in the run before."""
        before = self.moved.get(n.stretch)
        return n.ended + n.was.by if before is None else n.end + before

    def _before(self, k: int) -> Iterator[tuple[Node, float]]:
        """What the run before took up to mark k, the last first, and when that ended."""
        for mark in reversed(self.old[:k]):
            for n in reversed(mark.stretch.order):
                yield n, self._ended(n)

    def _now(self) -> Iterator[tuple[Node, float]]:
        """What this run has taken, the last first, and when that ends."""
        for mark in reversed(self.schedule.marks[self.past.mark :]):
            for n in reversed(mark.stretch.order):
                yield n, n.until

    def _busy(self, state: State) -> set[int]:
        """The devices that are not free yet."""
        return {d for d, last in enumerate(state.last) if last > state.now}

    def _running(self, taken: Iterable[tuple[Node, float]], now: float, devices: set[int]) -> Iterator[Node]:
        """Of tasks that were taken, those that have not ended at a moment. A device runs them in order."""
        for n, end in taken:
            if not devices:
                return
            if end > now:
                yield n
            elif n not in self.touched:  # else it may have been another device's
                devices.discard(n.device)

    def _same_waits(self, then: dict[Node, int], now: dict[Node, int]) -> bool:
        """Whether as many predecessors are missing of what did not change. It is found out soon that they are not."""
        touched, same = self.touched, 0
        for n, count in then.items():
            if n not in touched:
                if now.get(n) != count:
                    return False
                same += 1
        return len(now) - sum(n in now for n in touched) == same

    def _same_moments(self, then: dict[float, list[Node]], now: dict[float, list[Node]], shift: float) -> bool:
        """Whether what did not change is ready at the same moments, so much later. It is found out soon that it is not."""
        touched, none = self.touched, list[Node]()
        for moment, batch in then.items():
            other = now.get(moment + shift, none)
            if batch != other and set(batch) - touched != set(other) - touched:
                return False
        return all(moment - shift in then or touched.issuperset(batch) for moment, batch in now.items())

    def _until(self, k: int, by: float) -> float:
        """The moment of the run before up to which nothing that changed matters after mark k, neither as it was nor as it is.

        A task is ready when its predecessors have ended, and if one of them changed or comes later, not before that one.
        """
        times, then = self.past.times, self.then[k]
        was = (times[n][0] for n in self.touched)
        found = min((ready for ready in was if ready >= then), default=NEVER)
        waiting = {n for n in self.touched if n.task is not None and n.ready == NEVER}
        for n in waiting:
            if waiting.isdisjoint(n.before):
                there = [p.until if p.ready < NEVER else times[p][1] + by for p in n.before]
                found = min(found, max(there, default=0.0) - by)
        return found

    def _taken_over(self, k: int, until: int, by: float) -> State:
        """The state after what the run before did from one of its marks to another."""
        first, last = self.then[k], self.then[until]
        for n, (ready, end) in self.past.times.items():
            if n.ready == NEVER and first <= ready < last:
                n.ready, n.end = ready - n.stretch.by, end - n.stretch.by
        for mark in self.old[k:until]:
            self.moved[mark.stretch] = mark.stretch.by
            mark.stretch.by += by
        marks = self.old[k:until]
        state = self.old[until].copy(self.later[until] + by, NOWHERE)
        refresh_all(marks, refresh(state, self.touched))
        self.schedule.marks += marks
        if last < NEVER:
            self.schedule.leave(state)
        return state
