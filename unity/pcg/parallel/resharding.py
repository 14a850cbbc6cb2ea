"""The parallelization operators as changes of type, and the sequence of them that leads from one type to another.

Along one axis, one or two of nine operators change any state into any other. For several axes at once, changes of one kind are
one operator, and kinds follow the order that keeps pieces smallest: slice, reduce-scatter and all-to-all while they can; gather the
axis that blocks the remaining ones, and repeat; then all-reduce, replicate, gather, and contribute pieces to a sum last.
`tests/pcg/parallel/test_resharding.py` compares this sequence with the shortest path over all sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, Digit, State, Type, digits


@dataclass(frozen=True)
class ReshardingStep:
    """One parallelization operator. `after` differs from `before` along `axes` (positions in the mesh) only."""

    kind: str
    axes: tuple[int, ...]
    before: Type
    after: Type


def absolute(type_: Type, axes: Sequence[Axis]) -> Type:
    """Return a type with absolute slice positions, which stay valid if axes are gathered in any order."""
    return tuple(s if d is None else State("P", d.dim, d.outer) for s, d in zip(type_, digits(type_, axes), strict=True))


def kind_of(before: State, after: State) -> str:
    """Return the operator that changes one state into another along one axis, or "" if no single one does or they are equal."""
    if before == after:
        return ""
    return {
        "UP": "partition", "RP": "partition", "PU": "combine", "PR": "combine_replicate", "PP": "combine_partition",
        "SU": "reduce", "SP": "reduce_partition", "UR": "replicate", "RU": "unreplicate", "US": "contribute", "RS": "contribute",
        "PS": "contribute",
    }.get(before.kind + after.kind, "")  # fmt: skip


def stationary(before: State, after: State) -> bool:
    """Return whether devices can make a change between absolute states along one axis without the other devices of the axis.

    Only states that stay as they are qualify, and constants (unused, without a gradient) that become replicated for use: any
    other change communicates along the axis, forward or backward, or slices by a device's position on it.
    """
    return before == after or (before, after) == (UNUSED, REPLICATED)


def turned(step: ReshardingStep, over: Iterable[int]) -> bool:
    """Return whether a step, along some of its axes, gathers or scatters another dimension than the first.

    Its pieces are joined or cut inside of rows, so the step also transposes: it copies them to another layout.
    """
    return any(s.kind == "P" and s.dim != 0 for i in over for s in (step.before[i], step.after[i]))


@lru_cache(maxsize=100_000)
def steps(before: Type, after: Type, axes: tuple[Axis, ...]) -> tuple[ReshardingStep, ...]:
    """Return the parallelization operators that lead from one type to another, in order. Both types must fit the tensor."""
    now, goal = list(absolute(before, axes)), absolute(after, axes)
    sequence: list[ReshardingStep] = []

    def apply(kind: str, changed: Iterable[int], to: State | None = None) -> None:
        change = {i: to or goal[i] for i in changed}
        if change:
            old = tuple(now)
            for i, s in change.items():
                now[i] = s
            sequence.append(ReshardingStep(kind, tuple(sorted(change)), old, tuple(now)))

    def pending(kind: str) -> list[int]:
        return [i for i, (s, t) in enumerate(zip(now, goal, strict=True)) if kind_of(s, t) == kind]

    blocking: int | None = -1
    while blocking is not None:
        while any(can_take_digit(i, now, goal, axes) for kind in SLICING for i in pending(kind)):
            for kind in shrinking_operators(now, goal, axes):
                apply(kind, [i for i in pending(kind) if can_take_digit(i, now, goal, axes)])
        blocking = blocking_axis(now, goal, axes)
        if blocking is not None:
            whole = goal[blocking] if goal[blocking] in (UNUSED, PARTIAL) else REPLICATED
            apply(kind_of(now[blocking], whole), [blocking], whole)
    apply("reduce", [i for i, (s, t) in enumerate(zip(now, goal, strict=True)) if s == PARTIAL and t != PARTIAL], UNUSED)
    apply("unreplicate", pending("unreplicate"))
    apply("replicate", pending("replicate"))
    for kind in outermost_first("combine_replicate", "combine", pending, axes):
        apply(kind, pending(kind))
    apply("contribute", pending("contribute"))
    assert tuple(now) == goal, (before, after, now)
    return tuple(sequence)


SLICING = ("partition", "reduce_partition", "combine_partition")


def shrinking_operators(now: Sequence[State], goal: Type, axes: Sequence[Axis]) -> tuple[str, ...]:
    """Return the operators that make pieces smaller, in order.

    A slice costs nothing forward, but an all-gather backward if the value was unused. If that runs over a slower level than the
    reduce-scatter, the reduce-scatter goes first, so that the pieces are smaller.
    """
    sliced = [axes[i].level for i, (s, t) in enumerate(zip(now, goal, strict=True)) if s == UNUSED and t.kind == "P"]
    summed = [axes[i].level for i, (s, t) in enumerate(zip(now, goal, strict=True)) if s == PARTIAL and t.kind == "P"]
    late = sliced and summed and min(sliced) < min(summed)
    return ("reduce_partition", "partition", "combine_partition") if late else SLICING


def outermost_first(first: str, second: str, pending: Callable[[str], list[int]], axes: Sequence[Axis]) -> tuple[str, str]:
    """Order two kinds of gathers: those over a slower level go first, while pieces are small."""
    a, b = pending(first), pending(second)
    return (second, first) if a and b and min(axes[i].level for i in b) < min(axes[i].level for i in a) else (first, second)


def can_take_digit(i: int, now: Sequence[State], goal: Type, axes: Sequence[Axis]) -> bool:
    """Return whether axis `i` can take its digit in the goal, because no axis, itself included, occupies part of it now."""
    new = _digit(goal[i], axes[i])
    occupied = (_digit(s, a) for s, a in zip(now, axes, strict=True))
    return new is not None and now[i] != goal[i] and not any(d is not None and d.overlaps(new) for d in occupied)


def blocking_axis(now: Sequence[State], goal: Type, axes: Sequence[Axis]) -> int | None:
    """Return the axis to gather because its digit blocks a change: the last one of the fastest level, or None if none blocks."""
    goals = [d for s, t, a in zip(now, goal, axes, strict=True) if s != t and (d := _digit(t, a))]
    occupied = [(i, _digit(s, a)) for i, (s, t, a) in enumerate(zip(now, goal, axes, strict=True)) if s != t]
    blocking = [i for i, own in occupied if own and any(d.overlaps(own) for d in goals)]
    return max(blocking, key=lambda i: (axes[i].level, i), default=None)


def _digit(state: State, axis: Axis) -> Digit | None:
    return Digit(state.dim, state.outer, axis.size) if state.kind == "P" else None
