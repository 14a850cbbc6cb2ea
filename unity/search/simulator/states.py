"""What the loop of a simulation knows at a moment, and what a change of tasks or of the time makes of that (see `schedule`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

from unity.search.simulator.tasks import Task

NONE: list[Node] = []  # of nodes without successors, most of which need no list of their own; nothing is added to it
NEVER = float("inf")
by_name, now_of = attrgetter("name"), attrgetter("now")


class Node:
    """A task that is simulated: who waits for it, and when it is ready and ends. `task` is None if it was taken away."""

    __slots__ = ("alone", "before", "device", "end", "ended", "joint", "name", "readied", "ready", "seconds", "task")

    def __init__(self, name: int, task: Task) -> None:
        self.name = name
        self.ready = self.end = NEVER
        self.readied = self.ended = NEVER  # the same in the run before
        self.alone: list[Node] = NONE  # wait for this one alone
        self.joint: list[Node] = NONE  # wait for others as well
        self.before: tuple[Node, ...] = ()
        self.task: Task | None = task
        self.device, self.seconds = task.device, task.seconds


@dataclass(eq=False)
class State:
    """What the loop knows at a moment when it has taken all tasks that are ready before, and none that is ready then.

    Times of `pending` and `last` are earlier by `by` than they are meant: states that differ in time alone share them.
    """

    now: float
    taken: int  # how many tasks
    pending: dict[float, list[Node]]  # by moment: the tasks that are ready then
    waits: dict[Node, int]  # how many predecessors are missing, where some are taken and some are not
    last: list[float]  # by device: when the last task so far ends
    by: float = 0.0

    def later(self, by: float, more: int) -> State:
        """The same so many seconds later, after so many tasks more."""
        return replace(self, now=self.now + by, taken=self.taken + more, by=self.by + by)

    def copy(self) -> State:
        """The same, all its own, and times as they are meant."""
        by = self.by
        pending = {moment + by: batch[:] for moment, batch in self.pending.items()}
        return State(self.now, self.taken, pending, self.waits.copy(), [end + by for end in self.last] if by else self.last[:])

    @property
    def first(self) -> list[Node]:
        """The tasks that are ready at this moment."""
        return self.pending.get(self.now - self.by, [])


def refresh(state: State, changed: set[Node]) -> set[Node]:
    """Brings what is known at a moment (a copy) up to date after a change of tasks.

    Of the tasks that changed, and of those that they wait for, the ones that are not taken yet are ready later, or NEVER. Gives
    those of which something was known, or is now. Of the others nothing was known at earlier moments, either, nor would be.
    """
    known: set[Node] = set()
    for moment, batch in list(state.pending.items()):
        if not changed.isdisjoint(batch):
            known.update(changed.intersection(batch))
            left = [n for n in batch if n not in changed]
            if left:
                state.pending[moment] = left
            else:
                del state.pending[moment]
    for n in changed:
        if n in state.waits:
            del state.waits[n]
            known.add(n)
        if n.task is None or n.ready < state.now:
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


def refresh_all(states: list[State], changed: set[Node]) -> None:
    """Brings states, in the order of their moments, up to date; those of which it is others are replaced, not changed."""
    for k in reversed(range(len(states))):
        if not changed:
            return
        state = states[k].copy()
        changed = refresh(state, changed)
        if changed:
            states[k] = state
