"""The parallelization operators as changes of type, and the sequence of them that leads from one type to another.

From every state to every other along one axis leads one of nine operators, or two. For several axes at once, changes of one kind
are one operator, and kinds go in the order in which pieces are smallest: slice, reduce-scatter and all-to-all as far as they go;
gather what is in the way of the rest, and again; then all-reduce, replicate, gather, and put pieces among zeros last.
`tests/pcg/parallel/test_resharding.py` compares this sequence with the shortest path over all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, Digit, State, Type, digits


@dataclass(frozen=True)
class Step:
    """One parallelization operator. `after` differs from `before` along `axes` (positions in the mesh) only."""

    kind: str
    axes: tuple[int, ...]
    before: Type
    after: Type


def absolute(type_: Type, axes: Sequence[Axis]) -> Type:
    """The same type with every slice position made absolute, so that axes can be taken away in any order."""
    found = digits(type_, axes)
    return tuple(s if d is None else State("P", d.dim, d.outer) for s, d in zip(type_, found, strict=True))


def kind_of(before: State, after: State) -> str:
    """The operator that changes one state into another along one axis. "" where there is none, or nothing to do."""
    if before == after:
        return ""
    return {
        "UP": "partition", "RP": "partition", "PU": "combine", "PR": "combine_replicate", "PP": "combine_partition",
        "SU": "reduce", "SP": "reduce_partition", "UR": "replicate", "RU": "unreplicate", "US": "contribute", "RS": "contribute",
        "PS": "contribute",
    }.get(before.kind + after.kind, "")  # fmt: skip


def stationary(before: State, after: State) -> bool:
    """Whether a change between absolute states along one axis can be made where not all devices of that axis are present.

    Only states that stay as they are qualify, and constants (unused, without a gradient) that become replicated for use: any
    other change communicates along the axis, forward or backward, or slices by a device's position on it.
    """
    return before == after or (before, after) == (UNUSED, REPLICATED)


def turned(step: Step, over: Iterable[int]) -> bool:
    """Whether a step moves pieces of another dimension than the first, along some of its axes: what is moved so is put together
    or cut up inside of rows, and must be laid out anew."""
    return any(s.kind == "P" and s.dim != 0 for i in over for s in (step.before[i], step.after[i]))


@lru_cache(maxsize=100_000)
def steps(before: Type, after: Type, axes: tuple[Axis, ...]) -> tuple[Step, ...]:
    """The parallelization operators that lead from one type to another, in order. Both must fit the tensor."""
    now, goal = list(absolute(before, axes)), absolute(after, axes)
    found: list[Step] = []

    def go(kind: str, changed: Iterable[int], to: State | None = None) -> None:
        change = {i: to or goal[i] for i in changed}
        if change:
            old = tuple(now)
            for i, s in change.items():
                now[i] = s
            found.append(Step(kind, tuple(sorted(change)), old, tuple(now)))

    def waiting(kind: str) -> list[int]:
        return [i for i, (s, t) in enumerate(zip(now, goal, strict=True)) if kind_of(s, t) == kind]

    stuck: int | None = -1
    while stuck is not None:
        while any(free(i, now, goal, axes) for kind in SLICING for i in waiting(kind)):
            for kind in shrinking(now, goal, axes):
                go(kind, [i for i in waiting(kind) if free(i, now, goal, axes)])
        stuck = in_the_way(now, goal, axes)
        if stuck is not None:
            whole = goal[stuck] if goal[stuck] in (UNUSED, PARTIAL) else REPLICATED
            go(kind_of(now[stuck], whole), [stuck], whole)
    go("reduce", [i for i, (s, t) in enumerate(zip(now, goal, strict=True)) if s == PARTIAL and t != PARTIAL], UNUSED)
    go("unreplicate", waiting("unreplicate"))
    go("replicate", waiting("replicate"))
    for kind in outermost_first("combine_replicate", "combine", waiting, axes):
        go(kind, waiting(kind))
    go("contribute", waiting("contribute"))
    assert tuple(now) == goal, (before, after, now)
    return tuple(found)


SLICING = ("partition", "reduce_partition", "combine_partition")


def shrinking(now: Sequence[State], goal: Type, axes: Sequence[Axis]) -> tuple[str, ...]:
    """The operators that make pieces smaller, in order.

    Slices cost nothing forward, but an all-gather backward if they are made from *unused*: over a slower level than the
    reduce-scatter's, it is better done on smaller pieces.
    """
    sliced = [axes[i].level for i, (s, t) in enumerate(zip(now, goal, strict=True)) if s == UNUSED and t.kind == "P"]
    summed = [axes[i].level for i, (s, t) in enumerate(zip(now, goal, strict=True)) if s == PARTIAL and t.kind == "P"]
    late = sliced and summed and min(sliced) < min(summed)
    return ("reduce_partition", "partition", "combine_partition") if late else SLICING


def outermost_first(first: str, second: str, waiting: Callable[[str], list[int]], axes: Sequence[Axis]) -> tuple[str, str]:
    """Gathers over a slower level go before those over a faster one, while pieces are small."""
    a, b = waiting(first), waiting(second)
    return (second, first) if a and b and min(axes[i].level for i in b) < min(axes[i].level for i in a) else (first, second)


def free(i: int, now: Sequence[State], goal: Type, axes: Sequence[Axis]) -> bool:
    """Whether an axis can be given its place: no axis, not even itself, holds any of it."""
    new = _digit(goal[i], axes[i])
    held = (_digit(s, a) for s, a in zip(now, axes, strict=True))
    return new is not None and now[i] != goal[i] and not any(d is not None and d.overlaps(new) for d in held)


def in_the_way(now: Sequence[State], goal: Type, axes: Sequence[Axis]) -> int | None:
    """The axis that must give up its place for others, or itself, to move on: the fastest level's last. None if none must."""
    wanted = [d for s, t, a in zip(now, goal, axes, strict=True) if s != t and (d := _digit(t, a))]
    held = [(i, _digit(s, a)) for i, (s, t, a) in enumerate(zip(now, goal, axes, strict=True)) if s != t]
    found = [i for i, own in held if own and any(d.overlaps(own) for d in wanted)]
    return max(found, key=lambda i: (axes[i].level, i), default=None)


def _digit(state: State, axis: Axis) -> Digit | None:
    return Digit(state.dim, state.outer, axis.size) if state.kind == "P" else None
