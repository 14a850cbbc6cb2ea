"""What the loop of a simulation knows at a moment, and what a change of tasks or of the time makes of that (see `schedule`)."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from unity.search.simulator.tasks import Task

NONE: list[Node] = []  # of nodes without successors, most of which need no list of their own; nothing is added to it
NEVER = float("inf")
by_name, at = attrgetter("name"), attrgetter("at")


class Stretch:
    """Tasks that were taken one after the other, from a mark to the next one, and by how much later all of that is than is said:
    so a stretch of a run is moved at once."""

    __slots__ = ("by", "order")

    def __init__(self) -> None:
        self.order: list[Node] = []
        self.by = 0.0


NOWHERE = Stretch()  # of nodes that were not taken yet; nothing is added to it


class Node:
    """A task that is simulated: who waits for it, and when it is ready and ends. `task` is None if it was taken away.

    Its times are earlier than they are meant by what its stretch is later: `when` and `until` are as they are meant.
    """

    __slots__ = (
        "alone", "before", "device", "end", "ended", "joint", "name", "readied", "ready", "seconds", "stretch", "task", "was"
    )  # fmt: skip

    def __init__(self, name: int, task: Task) -> None:
        self.name = name
        self.ready = self.end = NEVER
        self.readied = self.ended = NEVER  # the same in the run before
        self.stretch = self.was = NOWHERE  # now, and then
        self.alone: list[Node] = NONE  # wait for this one alone
        self.joint: list[Node] = NONE  # wait for others as well
        self.before: tuple[Node, ...] = ()
        self.task: Task | None = task
        self.device, self.seconds = task.device, task.seconds

    @property
    def when(self) -> float:
        """The moment at which it is ready."""
        return self.ready + self.stretch.by

    @property
    def until(self) -> float:
        """The moment at which it ends."""
        return self.end + self.stretch.by


@dataclass(eq=False)
class State:
    """What the loop knows at a moment when it has taken all tasks that are ready before, and none that is ready then.

    `stretch` is what is taken from there on. As with its tasks, all times are earlier than they are meant by what it is later.
    """

    now: float
    pending: dict[float, list[Node]]  # by moment: the tasks that are ready then
    waits: dict[Node, int]  # how many predecessors are missing, where some are taken and some are not
    last: list[float]  # by device: when the last task so far ends
    stretch: Stretch

    @property
    def at(self) -> float:
        """The moment as it is meant."""
        return self.now + self.stretch.by

    def copy(self, by: float = 0.0, stretch: Stretch | None = None) -> State:
        """The same, all its own, so many seconds later."""
        pending = {moment + by: batch[:] for moment, batch in self.pending.items()}
        last = [end + by for end in self.last] if by else self.last[:]
        return State(self.now + by, pending, self.waits.copy(), last, stretch or self.stretch)

    @property
    def first(self) -> list[Node]:
        """The tasks that are ready at this moment."""
        return self.pending.get(self.now, [])


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
    now, by, waits = state.at, state.stretch.by, state.waits
    for n in changed:
        if n in waits:
            del waits[n]
            known.add(n)
        if n.task is None or n.ready + n.stretch.by < now:
            continue
        ends = [p.end + p.stretch.by for p in n.before if p.ready + p.stretch.by < now]
        if len(ends) == len(n.before):
            state.pending.setdefault(max(ends, default=0.0) - by, []).append(n)
        elif ends:
            waits[n] = len(n.before) - len(ends)
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
