"""The state of a simulation: when every task runs, and the loop that finds it (FlexFlow, algorithm 1, lines 9 to 20).

The queue is one of moments, each with the *batch* of tasks that are ready then. What waits for one task alone joins the batch of
the moment at which that one ends; for what waits for several it is counted how many are missing. Where tasks of a batch take no
time, what they make ready at that very moment is another batch, of the next level (`tasks`).

The loop can go on from any moment: marks keep what it knows there (`states`). That is little, for of what is over only the devices'
ends are needed, and of most that is to come nothing is known yet. So little is to be brought up to date in them after a change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from types import MappingProxyType

from unity.search.simulator.states import NEVER, NONE, NOWHERE, Node, State, Stretch, at, by_name, refresh, refresh_all
from unity.search.simulator.tasks import Task

MARKS = 32  # in a whole run: more of them take time to make, fewer leave more to run again
LEAST = 64  # tasks between two marks, at least


@dataclass(frozen=True, eq=False)
class Past:
    """A run, as far as another overwrites it that goes on from one of its marks."""

    marks: list[State]  # all of them
    mark: int  # the number of the one that is gone back to
    later: list[float]  # from this one on: by how much what was taken after each is later than is said
    last: list[float]  # by device: when the last task ended
    times: dict[Node, tuple[float, float]]  # of tasks that change, and of those they wait for: when they were ready, and ended


class Schedule:
    """Tasks, and when each runs. Mutable: `replace` changes tasks, `run` brings the rest up to date, `restore` takes both back."""

    def __init__(self, tasks: Mapping[int, Task], devices: int) -> None:
        self.devices = devices
        self.nodes = {name: Node(name, task) for name, task in tasks.items()}
        for node in self.nodes.values():
            self._join(node)
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

    @property
    def order(self) -> list[Node]:
        """All tasks that were taken, in order."""
        return [node for mark in self.marks for node in mark.stretch.order]

    def taken(self, start: int = 0) -> int:
        """How many tasks were taken from one of the marks on."""
        return sum(len(mark.stretch.order) for mark in self.marks[start:])

    def beginning(self) -> State:
        """What is known before any task."""
        first = [node for node in self.nodes.values() if not node.before]
        return State(0.0, {0.0: first} if first else {}, {}, [0.0] * self.devices, NOWHERE)

    def leave(self, state: State) -> None:
        """Leaves a mark: a state, with its times as they are meant, after which a new stretch begins."""
        self.marks.append(state.copy(stretch=Stretch()))

    def run(self, state: State, stops: Container[Node] = (), marked: bool = True) -> State | None:
        """Takes all that is left, in order, from the last mark on, and leaves marks on the way or not.

        Stops where the first task of those that are ready at a moment after the first is one of `stops`: gives the state then.
        """
        enough = self._step if marked else len(self.nodes) + 1
        pending, waits, last = state.pending, state.waits, state.last
        stretch = self.marks[-1].stretch
        order = stretch.order
        moments = list(pending)
        heapify(moments)
        now = state.now
        while moments:
            moment = moments[0]
            batch = pending[moment]
            if len(batch) > 1:
                batch.sort(key=by_name)
            if moment > now and (batch[0] in stops or len(order) >= enough):
                here = State(moment, pending, waits, last, NOWHERE)
                if batch[0] in stops:
                    return here
                self.leave(here)
                stretch = self.marks[-1].stretch
                order = stretch.order
            now = moment
            del pending[moment]
            order += batch
            left_in = True  # the moment is still in the heap: it is replaced by the first that is put there
            for node in batch:
                d = node.device
                begin = last[d]
                if begin < now:
                    begin = now
                node.readied, node.ended, node.was = node.ready, node.end, node.stretch
                node.ready, node.stretch = now, stretch
                node.end = last[d] = end = begin + node.seconds
                if node.alone:
                    then = pending.get(end)
                    if then is None:
                        pending[end] = node.alone[:]
                        if left_in:
                            left_in = False
                            heapreplace(moments, end)
                        else:
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
                            over = p.end + p.stretch.by
                            if over > ready:
                                ready = over
                        then = pending.get(ready)
                        if then is None:
                            pending[ready] = [n]
                            if left_in:
                                left_in = False
                                heapreplace(moments, ready)
                            else:
                                heappush(moments, ready)
                        else:
                            then.append(n)
            if left_in:
                heappop(moments)
        self.last = last
        return None

    @property
    def _step(self) -> int:
        """Tasks between two marks."""
        return max(len(self.nodes) // MARKS, LEAST)

    @property
    def makespan(self) -> float:
        """Seconds until the last task has ended."""
        return max(self.last, default=0.0)

    def replace(self, changes: Mapping[int, Task | None], known: Mapping[int, Node] = MappingProxyType({})) -> set[Node]:
        """Puts tasks under names, or takes them away (None); gives the nodes of all of them. Nothing is run.

        `known`: nodes that were taken away, of which some come back.
        """
        nodes, touched = self.nodes, set[Node]()
        left, joined = list[Node](), list[Node]()  # what waits for others than before, or is gone, or new
        for name, task in changes.items():
            node = nodes.get(name)
            if task is None:
                if node is None:
                    continue
                node.task = None
                del nodes[name]
                left.append(node)
                node.alone = node.joint = NONE  # who waited for it waits for others, or is gone
            else:
                if node is None:
                    node = nodes[name] = known.get(name) or Node(name, task)
                    joined.append(node)
                elif node.task is None or node.task.before != task.before:
                    left.append(node)
                    joined.append(node)
                node.task, node.device, node.seconds = task, task.device, task.seconds
            touched.add(node)
        apart = set(left)
        for p in {p for node in left for p in node.before if p.task is not None}:
            if p.alone:
                p.alone = [n for n in p.alone if n not in apart]
            if p.joint:
                p.joint = [n for n in p.joint if n not in apart]
        for node in joined:
            self._join(node)
        return touched

    def back_to(self, moment: float, touched: set[Node]) -> tuple[State, Past]:
        """What is known at the last mark up to a moment, and what was after it. No task that was changed is ready before.

        The tasks that changed, and those that they wait for, are NEVER ready from there on, until they are taken again.
        """
        k = bisect_right(self.marks, moment, key=at) - 1
        mark = self.marks[k]
        asked = touched.union(*(n.before for n in touched if n.task is not None))
        begun, times = mark.at, dict[Node, tuple[float, float]]()
        for n in asked:
            by = n.stretch.by
            if n.ready + by >= begun:
                times[n] = n.ready + by, n.end + by
        past = Past(self.marks[:], k, [m.stretch.by for m in self.marks[k:]], self.last, times)
        for n in times:
            n.ready = NEVER
        del self.marks[k:]
        state = mark.copy(mark.stretch.by, NOWHERE)
        refresh_all(self.marks, refresh(state, touched))
        return state, past

    def settle(self) -> None:
        """Says all times as they are meant. As long as times are added without rounding, nothing else depends on it."""
        for k, mark in enumerate(self.marks):
            by = mark.stretch.by
            if by:
                for n in mark.stretch.order:
                    n.ready += by
                    n.end += by
                self.marks[k] = mark.copy(by)
                mark.stretch.by = 0.0

    def restore(self, past: Past) -> None:
        """All as it was before the schedule went on from a mark. Its tasks must be those of then again (`replace`)."""
        kept = {mark.stretch for mark in past.marks}
        for mark in self.marks[past.mark :]:
            if mark.stretch not in kept:
                for n in mark.stretch.order:
                    n.ready, n.end, n.stretch = n.readied, n.ended, n.was
        for mark, by in zip(past.marks[past.mark :], past.later, strict=True):
            mark.stretch.by = by
        for n, (ready, end) in past.times.items():
            n.ready, n.end = ready - n.stretch.by, end - n.stretch.by
        self.marks, self.last = past.marks, past.last

    def first(self, touched: set[Node]) -> float:
        """A moment before which nothing changes: when the first task that was replaced was ready, or one that is new.

        A new task is ready when its predecessors have ended. If one of them changes as well, or as a consequence, then it is not
        ready before that one; so the times before the change are good enough.
        """
        first = min([node.ready + node.stretch.by for node in touched])
        for node in touched:
            if node.task is not None and touched.isdisjoint(node.before):
                first = min(first, max([p.end + p.stretch.by for p in node.before], default=0.0))
        return first
