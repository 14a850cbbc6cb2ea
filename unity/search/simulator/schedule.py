"""The state of a simulation: when every task runs, and the loop that finds it (FlexFlow, algorithm 1, lines 9 to 20).

The queue is one of moments, each with the *batch* of tasks that are ready then. What waits for one task alone joins the batch of
the moment at which that one ends; for what waits for several it is counted how many are missing. Where tasks of a batch take no
time, what they make ready at that very moment is another batch, of the next level (`tasks`).

The loop can go on from any moment: marks keep what it knows there (`states`). That is little, for of what is over only the devices'
ends are needed, and of most that is to come nothing is known yet. So little is to be brought up to date in them after a change.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from types import MappingProxyType

from unity.search.simulator.states import NEVER, Node, State, by_name, now_of, refresh, refresh_all
from unity.search.simulator.tasks import Task

MARKS = 32  # in a whole run: more of them take time to make, fewer leave more to run again
LEAST = 64  # tasks between two marks, at least


@dataclass(frozen=True, eq=False)
class Past:
    """A run, as far as another overwrites it that goes on from one of its marks."""

    marks: list[State]  # all of them
    mark: int  # the number of the one that is gone back to
    order: list[Node]  # what was taken after it
    last: list[float]  # by device: when the last task ended
    times: dict[Node, tuple[float, float]]  # of tasks that change, and of those they wait for: when they were ready, and ended


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

    def run(self, state: State, stops: Container[Node] = (), marked: bool = True) -> State | None:
        """Takes all that is left, in order, and leaves marks on the way or not.

        Stops where the first task of those that are ready at a moment after the first is one of `stops`: gives the state then.
        """
        step = self._step if marked else len(self.nodes) + 1
        order, pending, waits, last = self.order, state.pending, state.waits, state.last
        moments = list(pending)
        heapify(moments)
        now = state.now
        enough = (self.marks[-1].taken if self.marks else 0) + step
        while moments:
            moment = moments[0]
            batch = pending[moment]
            if len(batch) > 1:
                batch.sort(key=by_name)
            if moment > now and (batch[0] in stops or len(order) >= enough):
                here = State(moment, len(order), pending, waits, last)
                if batch[0] in stops:
                    return here
                self.marks.append(here.copy())
                enough = len(order) + step
            now = moment
            del pending[moment]
            order += batch
            left_in = True  # the moment is still in the heap: it is replaced by the first that is put there
            for node in batch:
                d = node.device
                begin = last[d]
                if begin < now:
                    begin = now
                node.readied, node.ended = node.ready, node.end
                node.ready = now
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
                            if p.end > ready:
                                ready = p.end
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

    def leave(self, states: Iterable[State]) -> None:
        """Leaves marks, those that are too near to the one before left out."""
        for state in states:
            if state.taken - self.marks[-1].taken >= self._step // 2:
                self.marks.append(state)

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
        """What is known at the last mark up to a moment, and what was after it. No task that was changed is ready before.

        The tasks that changed, and those that they wait for, are NEVER ready from there on, until they are taken again.
        """
        k = bisect_right(self.marks, moment, key=now_of) - 1
        mark = self.marks[k]
        asked = touched.union(*(n.before for n in touched if n.task is not None))
        times = {n: (n.ready, n.end) for n in asked if n.ready >= mark.now}
        past = Past(self.marks[:], k, self.order[mark.taken :], self.last, times)
        for n in times:
            n.ready = NEVER
        del self.order[mark.taken :]
        del self.marks[k:]
        state = mark.copy()
        refresh_all(self.marks, refresh(state, touched))
        return state, past

    def move(self, past: Past, start: int, stop: int, by: float) -> None:
        """Takes over what a run took from one of its tasks to another, so much later."""
        moved = past.order[start:stop]
        for n in moved:
            n.readied, n.ended = n.ready, n.end
            n.ready += by
            n.end += by
        self.order += moved

    def restore(self, past: Past) -> None:
        """All as it was before the schedule went on from a mark. Its tasks must be those of then again (`replace`)."""
        begun = past.marks[past.mark].taken
        for n in self.order[begun:]:
            n.ready, n.end = n.readied, n.ended
        for n, (ready, end) in past.times.items():
            n.ready, n.end = ready, end
        self.order[begun:] = past.order
        self.marks, self.last = past.marks, past.last

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

