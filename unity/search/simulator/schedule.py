"""The state of a simulation: when every task runs, and the loop that finds it (FlexFlow, algorithm 1, lines 9 to 20).

Tasks that are ready at the same moment are taken together, as a *batch*: the queue is one of moments, and what ends at a moment
hands all that waited for it alone to one batch. Those who wait for several are counted until the last of them has been taken.
Where a batch has tasks that take no time, what they make ready at that very moment is the next batch of it: the next level.

The loop can go on from anywhere between two moments. At marks copies are kept of all that it knows there. That is little, for
what is over is not needed any more, and of what is still to come nothing is known.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter

from unity.search.simulator.tasks import Task

MARKS = 32  # in a whole run: more of them take time to make, fewer leave more to run again
LEAST = 64  # tasks between two marks, at least

by_name, now_of = attrgetter("name"), attrgetter("now")


class Node:
    """A task that is simulated: who waits for it, and when it is ready and ends. `task` is None if it was taken away."""

    __slots__ = ("alone", "before", "device", "end", "joint", "name", "ready", "seconds", "task")

    def __init__(self, name: int, task: Task) -> None:
        self.name = name
        self.ready = self.end = float("inf")
        self.alone: list[Node] = []  # wait for this one alone
        self.joint: list[Node] = []  # wait for others as well
        self.before: list[Node] = []
        self.task: Task | None = task
        self.device, self.seconds = task.device, task.seconds


@dataclass(eq=False)
class State:
    """What the loop knows at a moment, before it takes any task that is ready then: all that are ready earlier are taken."""

    now: float
    taken: int  # how many
    pending: dict[float, list[Node]]  # by moment: the tasks that are ready then, of those of which that is known
    waits: dict[Node, int]  # how many are missing, where some are taken and some are not
    last: list[float]  # by device: when the last task so far ends
    stale: set[Node] = field(default_factory=set)  # what changed since, as far as anything is known of it; earlier marks, too

    def copy(self) -> State:
        pending = {moment: batch[:] for moment, batch in self.pending.items()}
        return State(self.now, self.taken, pending, self.waits.copy(), self.last[:])


class Schedule:
    """Tasks, and when each runs. Mutable: `replace` changes tasks, `run` brings the rest up to date."""

    def __init__(self, tasks: Mapping[int, Task], devices: int) -> None:
        self.devices = devices
        self.nodes = {name: Node(name, task) for name, task in tasks.items()}
        for node in self.nodes.values():
            self._join(node)
        self.order: list[Node] = []
        self.marks: list[State] = []
        self.last = [0.0] * devices

    def _join(self, node: Node) -> None:
        """Makes a node wait for what its task waits for."""
        assert node.task is not None
        nodes, names = self.nodes, node.task.before
        if len(names) == 1:
            node.before = [p] = [nodes[names[0]]]
            p.alone.append(node)
        else:
            node.before = [nodes[p] for p in names]
            for p in node.before:
                p.joint.append(node)

    def beginning(self) -> State:
        """What is known before any task."""
        first = [node for node in self.nodes.values() if not node.before]
        return State(0.0, 0, {0.0: first} if first else {}, {}, [0.0] * self.devices)

    def run(self, state: State, marked: bool = True) -> bool:
        """Takes all that is left, in order, and leaves marks on the way or not. Whether no task waits for another for ever."""
        step = max(len(self.nodes) // MARKS, LEAST) if marked else len(self.nodes) + 1
        order, pending, waits, last = self.order, state.pending, state.waits, state.last
        moments = list(pending)
        heapify(moments)
        now = state.now
        if marked:
            self.marks.append(state.copy())
        enough = len(order) + step
        while moments:
            if len(order) >= enough and moments[0] > now:
                self.marks.append(State(moments[0], len(order), pending, waits, last).copy())
                enough = len(order) + step
            now = heappop(moments)
            batch = pending.pop(now)
            if len(batch) > 1:
                batch.sort(key=by_name)
            order += batch
            for node in batch:
                d = node.device
                begin = last[d]
                if begin < now:
                    begin = now
                node.ready = now
                node.end = last[d] = end = begin + node.seconds
                if node.alone:
                    then = pending.get(end)
                    if then is None:
                        pending[end] = node.alone[:]
                        heappush(moments, end)
                    else:
                        then += node.alone
                for n in node.joint:
                    left = waits.get(n)
                    if left is None:
                        waits[n] = len(n.before) - 1
                    elif left > 1:
                        waits[n] = left - 1
                    else:
                        del waits[n]
                        ready = end
                        for p in n.before:
                            if p.end > ready:
                                ready = p.end
                        then = pending.get(ready)
                        if then is None:
                            pending[ready] = [n]
                            heappush(moments, ready)
                        else:
                            then.append(n)
        self.last = last
        return len(order) == len(self.nodes)

    @property
    def makespan(self) -> float:
        """Seconds until the last task has ended."""
        return max(self.last, default=0.0)

    def task(self, name: int) -> Task | None:
        """The task of this name, if there is one."""
        node = self.nodes.get(name)
        return None if node is None else node.task

    def replace(self, changes: Mapping[int, Task | None]) -> set[Node]:
        """Puts tasks under names, or takes them away (None); gives the nodes of all of them. Nothing is run."""
        nodes = self.nodes
        touched = {nodes[name] for name in changes if name in nodes}
        for p in {p for node in touched for p in node.before}:
            p.alone = [n for n in p.alone if n not in touched]
            p.joint = [n for n in p.joint if n not in touched]
        put = []
        for name, task in changes.items():
            node = nodes.get(name)
            if task is None:
                if node is not None:
                    node.task = None
                    del nodes[name]
                continue
            if node is None:
                node = nodes[name] = Node(name, task)
                touched.add(node)
            node.task, node.device, node.seconds = task, task.device, task.seconds
            put.append(node)
        for node in put:
            self._join(node)
        return touched

    def back_to(self, moment: float, touched: set[Node]) -> State:
        """Forgets what was known after a moment, or somewhat earlier, after the change of tasks that are not ready before it."""
        k = bisect_right(self.marks, moment, key=now_of) - 1
        state = self.marks[k]
        stale = touched.union(*(mark.stale for mark in self.marks[k:]))
        del self.marks[k:]
        del self.order[state.taken :]
        known = refresh(state, stale)
        if self.marks:
            self.marks[-1].stale |= known
        return state

    def first(self, touched: set[Node]) -> float:
        """A moment before which nothing changes: when the first task that was replaced was ready, or one that is new.

        A new task is ready when its predecessors have ended. If one of them changes as well, or as a consequence, then it is not
        ready before that one; so the times before the change are good enough.
        """
        first = min([node.ready for node in touched])
        for node in touched:
            if node.task is not None and touched.isdisjoint(node.before):
                first = min(first, max([p.end for p in node.before], default=0.0))
        return first


def refresh(state: State, stale: set[Node]) -> set[Node]:
    """Brings what is known at a moment up to date after a change of tasks that are not ready before it.

    Gives those of which something was known or is known now. Of the others nothing was or is known at any earlier moment, either.
    """
    known: set[Node] = set()
    for moment, batch in list(state.pending.items()):
        if not stale.isdisjoint(batch):
            known.update(stale.intersection(batch))
            left = [n for n in batch if n not in stale]
            if left:
                state.pending[moment] = left
            else:
                del state.pending[moment]
    for n in stale:
        if n in state.waits:
            del state.waits[n]
            known.add(n)
        if n.task is None:
            continue
        ends = [p.end for p in n.before if p.ready < state.now]
        if len(ends) == len(n.before):
            state.pending.setdefault(max(ends, default=0.0), []).append(n)
        elif ends:
            state.waits[n] = len(n.before) - len(ends)
        else:
            continue
        known.add(n)
    return known
