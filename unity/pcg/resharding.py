"""The parallelization operators as changes of type, and the sequence of them that leads from one type to another.

Along one axis a change is one of seven operators (design section 2). For several axes at once, changes of one kind are one
operator, and kinds go in the order in which pieces are smallest: gather what is in the way, slice, reduce-scatter, all-to-all,
all-reduce, replicate, and gather last. `tests/test_resharding.py` compares this sequence with the shortest path over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from unity.pcg.axis import Axis
from unity.pcg.state import PARTIAL, REPLICATED, UNUSED, Digit, State, Type, digits


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
        "SU": "reduce", "SP": "reduce_partition", "UR": "replicate",
    }.get(before.kind + after.kind, "")  # fmt: skip


IMPOSSIBLE = {("R", "U"), ("R", "S"), ("U", "S"), ("P", "S")}  # no operator leads there


def possible(before: Type, after: Type) -> bool:
    """Whether any sequence of operators leads from one type to another."""
    return all((s.kind, t.kind) not in IMPOSSIBLE for s, t in zip(before, after, strict=True))


@lru_cache(maxsize=100_000)
def steps(before: Type, after: Type, axes: tuple[Axis, ...]) -> tuple[Step, ...]:
    """The parallelization operators that lead from one type to another, in order. Both must fit the tensor."""
    assert possible(before, after), (before, after)
    now, goal = list(absolute(before, axes)), absolute(after, axes)
    found: list[Step] = []

    def go(kind: str, change: dict[int, State]) -> None:
        if change:
            old = tuple(now)
            for i, s in change.items():
                now[i] = s
            found.append(Step(kind, tuple(sorted(change)), old, tuple(now)))

    early = in_the_way(tuple(now), goal, axes)
    go("combine_replicate", {i: REPLICATED for i in early if goal[i] != UNUSED})
    go("combine", {i: UNUSED for i in early if goal[i] == UNUSED})
    go("partition", {i: t for i, (s, t) in enumerate(zip(now, goal, strict=True)) if kind_of(s, t) == "partition"})
    for kind in ("reduce_partition", "combine_partition"):
        go(kind, {i: t for i, (s, t) in enumerate(zip(now, goal, strict=True)) if kind_of(s, t) == kind})
    go("reduce", {i: UNUSED for i, (s, t) in enumerate(zip(now, goal, strict=True)) if s == PARTIAL and t != PARTIAL})
    for kind in ("replicate", "combine_replicate", "combine"):
        go(kind, {i: t for i, (s, t) in enumerate(zip(now, goal, strict=True)) if kind_of(s, t) == kind})
    assert tuple(now) == goal, (before, after, now)
    return tuple(found)


def in_the_way(now: Type, goal: Type, axes: Sequence[Axis]) -> list[int]:
    """Axes that must be gathered first: they move within a dimension, or hold digits that another axis is to be given."""
    old, new = digits(now, axes), digits(goal, axes)
    found = []
    for i, d in enumerate(old):
        if d is None or d == new[i]:
            continue
        other = new[i]
        within = other is not None and other.dim == d.dim
        if within or any(_claims(n, old[j], d) for j, n in enumerate(new) if j != i):
            found.append(i)
    return found


def _claims(new: Digit | None, old: Digit | None, held: Digit) -> bool:
    return new is not None and new != old and new.overlaps(held)
