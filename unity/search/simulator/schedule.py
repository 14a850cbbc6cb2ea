"""The state of a simulation: when every task runs, and the loop that finds it (FlexFlow, algorithm 1, lines 9 to 20).

The queue is one of moments, each with the *batch* of tasks that are ready then. What waits for one task alone joins the batch of
the moment at which that one ends; for what waits for several it is counted how many are missing. Where tasks of a batch take no
time, what they make ready at that very moment is another batch, of the next level (`tasks`).

The loop can go on from any moment: marks keep what it knows there. That is little, for of what is over only the devices' ends are
needed, and of most that is to come nothing is known yet. A change brings one mark up to date, the one that is gone back to; what
it means for those before is noted (`stale`) until they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from operator import attrgetter
from types import MappingProxyType

from unity.search.simulator.tasks import Task

MARKS = 32  # in a whole run: more of them take time to make, fewer leave more to run again
LEAST = 64  # tasks between two marks, at least

NONE: list[Node] = []  # of nodes without successors, most of which need no list of their own; nothing is added to it
by_name, now_of = attrgetter("name"), attrgetter("now")


class Node:
    """A task that is simulated: who waits for it, and when it is ready and ends. `task` is None if it was taken away."""

    __slots__ = ("alone", "before", "device", "end", "joint", "name", "ready", "seconds", "task")

    def __init__(self, name: int, task: Task) -> None:
        self.name = name
        self.ready = self.end = float("inf")
        self.alone: list[Node] = NONE  # wait for this one alone
        self.joint: list[Node] = NONE  # wait for others as well
        self.before: tuple[Node, ...] = ()
        self.task: Task | None = task
        self.device, self.seconds = task.device, task.seconds


@dataclass(eq=False)
class State:
    """What the loop knows at a moment when it has taken all tasks that are ready before, and none that is ready then."""

    now: float
    taken: int  # how many tasks
    pending: dict[float, list[Node]]  # by moment: the tasks that are ready then
    waits: dict[Node, int]  # how many predecessors are missing, where some are taken and some are not
    last: list[float]  # by device: when the last task so far ends
    stale: set[Node] = field(default_factory=set)  # tasks changed since of which this mark, or an earlier one, knows something

    def copy(self) -> State:
        """What is known, to be kept while the loop goes on."""
        pending = {moment: batch[:] for moment, batch in self.pending.items()}
        return State(self.now, self.taken, pending, self.waits.copy(), self.last[:])


@dataclass(frozen=True, eq=False)
class Past:
    """What running on from a mark overwrites: when tasks ran that are run again, the marks from there on, the devices' ends."""

    mark: int  # its number
    marks: list[State]  # it, and those after it
    stale: set[Node]  # of the mark before it
    order: list[Node]  # what was taken after it
    ready: list[float]  # when each of these was ready
    end: list[float]  # and ended
    last: list[float]


class Schedule:
    """Tasks, and when each runs. Mutable: `replace` changes tasks, `run` brings the rest up to date, `restore` takes both back."""

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
        nodes = self.nodes
        before = node.before = tuple([nodes[name] for name in node.task.before])
        if len(before) == 1:
            (p,) = before
            if p.alone:
                p.alone.append(node)
            else:
                p.alone = [node]
        else:
            for p in before:
                if p.joint:
                    p.joint.append(node)
                else:
                    p.joint = [node]

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
                    left = waits.pop(n, 0) or len(n.before)
                    if left > 1:
                        waits[n] = left - 1
                    else:
                        ready = end  # not always the last end: tasks are taken in the order in which they are ready
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

    def replace(self, changes: Mapping[int, Task | None], known: Mapping[int, Node] = MappingProxyType({})) -> set[Node]:
        """Puts tasks under names, or takes them away (None); gives the nodes of all of them. Nothing is run.

        `known`: nodes that were taken away, of which some come back.
        """
        nodes = self.nodes
        touched = {nodes[name] for name in changes if name in nodes}
        for p in {p for node in touched for p in node.before}:
            if p.alone:
                p.alone = [n for n in p.alone if n not in touched]
            if p.joint:
                p.joint = [n for n in p.joint if n not in touched]
        put = []
        for name, task in changes.items():
            node = nodes.get(name)
            if task is None:
                if node is not None:
                    node.task = None
                    del nodes[name]
            else:
                if node is None:
                    node = nodes[name] = known.get(name) or Node(name, task)
                    touched.add(node)
                node.task, node.device, node.seconds = task, task.device, task.seconds
                put.append(node)
        for node in put:
            self._join(node)
        return touched

    def back_to(self, moment: float, touched: set[Node]) -> tuple[State, Past]:
        """What is known at the last mark up to a moment, and what was after it. No task that was changed is ready before."""
        k = bisect_right(self.marks, moment, key=now_of) - 1
        mark = self.marks[k]
        state, order = mark.copy(), self.order[mark.taken :]
        stale = touched.union(*(mark.stale for mark in self.marks[k:]))
        before = self.marks[k - 1].stale if k else set[Node]()
        ready, end = [node.ready for node in order], [node.end for node in order]
        past = Past(k, self.marks[k:], before, order, ready, end, self.last)
        del self.marks[k:]
        del self.order[mark.taken :]
        known = refresh(state, stale)
        if self.marks:
            self.marks[-1].stale = before | known
        return state, past

    def restore(self, past: Past) -> None:
        """All as it was before the schedule went on from a mark. Its tasks must be those of then again (`replace`)."""
        self.marks[past.mark :] = past.marks
        if past.mark:
            self.marks[past.mark - 1].stale = past.stale
        self.order[past.marks[0].taken :] = past.order
        for node, ready, end in zip(past.order, past.ready, past.end, strict=True):
            node.ready, node.end = ready, end
        self.last = past.last

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

    Gives those of which something was known, or is now. Of the others nothing was known at earlier moments, either, nor would be.
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
