"""Parallel types: the piece of a tensor that each device holds. Proofs, search, cost and the running program share them.

Along every mesh axis a tensor is in one of four states. A *type* is a tuple of states, one for each axis in mesh order. Degrees,
replica dimensions and machine mappings follow from it.

    UNUSED          all devices along the axis hold the same value and compute the same with it
    partitioned     device k along the axis holds the k-th slice of a dimension
    REPLICATED      all devices hold the same value, but use it differently: its cotangent is a partial sum
    PARTIAL         the value is the sum of the pieces of all devices along the axis

A dimension can be partitioned at an inner *digit*: seen as `[outer, n / outer]`, its inner part is sliced. A fused
query-key-value dimension of size 3·d is partitioned at outer=3, so that every device holds a slice of each of the three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from unity.pcg.types.axis import Axis, joined_names


class State(NamedTuple):
    """The state of a tensor along one axis: a constant below, or `partitioned`. It is a tuple, compared millions of times."""

    kind: str  # "U", "P", "R" or "S"
    dim: int = -1
    outer: int = 1

    def __str__(self) -> str:
        if self.kind != "P":
            return {"U": "unused", "R": "replicated", "S": "partial"}[self.kind]
        return f"{self.dim}" if self.outer == 1 else f"{self.dim}/{self.outer}"


UNUSED = State("U")
REPLICATED = State("R")
PARTIAL = State("S")

Type = tuple[State, ...]
Shape = tuple[int, ...]


def partitioned(dim: int, outer: int = 1) -> State:
    """Return the state of a tensor whose dimension `dim`, seen as `[outer, n / outer]`, is sliced along its inner part."""
    return State("P", int(dim), int(outer))  # JAX gives some numbers as NumPy's, which print otherwise


@dataclass(frozen=True)
class Digit:
    """An absolute slice position: dimension `dim` seen as `[outer, size, rest]`, whose middle index is the device's."""

    dim: int
    outer: int
    size: int

    def overlaps(self, other: Digit) -> bool:
        """Return whether a tensor cannot be sliced at both: they share part of an index range, or one does not divide the other."""
        first, second = (self, other) if self.outer <= other.outer else (other, self)
        return self.dim == other.dim and second.outer % (first.outer * first.size) != 0


def digits(type_: Type, axes: Sequence[Axis]) -> tuple[Digit | None, ...]:
    """Return the absolute slice position of each axis, or None for an axis that partitions nothing.

    Axes that partition one dimension at one digit nest in mesh order, the first one major.
    """
    taken: dict[State, int] = {}
    result: list[Digit | None] = []
    for state, axis in zip(type_, axes, strict=True):
        if state.kind != "P":
            result.append(None)
            continue
        already = taken.get(state, 1)
        result.append(Digit(state.dim, state.outer * already, axis.size))
        taken[state] = already * axis.size
    return tuple(result)


def joined_digits(type_: Type, axes: Sequence[Axis]) -> Type:
    """Return the type with the same slices in which axes that nest directly partition a dimension at one digit.

    Changes of types have every axis at its absolute digit, [2, 2, n / 4] as outer=1 and outer=2, instead of twice outer=1.
    """
    states = list[State]()
    ends: dict[State, int] = {}  # for each state, the first digit behind the slices at it so far
    for state, axis, digit in zip(type_, axes, digits(type_, axes), strict=True):
        if digit is not None:
            around = (s for s, end in ends.items() if s.dim == digit.dim and end == digit.outer)
            state = next(around, partitioned(digit.dim, digit.outer))
            ends[state] = digit.outer * axis.size
        states.append(state)
    return tuple(states)


def degrees(type_: Type, axes: Sequence[Axis], rank: int) -> Shape:
    """Return the number of slices of each dimension: the degrees of the Unity paper."""
    result = [1] * rank
    for state, axis in zip(type_, axes, strict=True):
        if state.kind == "P":
            result[state.dim] *= axis.size
    return tuple(result)


def local_shape(shape: Shape, type_: Type, axes: Sequence[Axis]) -> Shape:
    """Return the shape of one device's piece."""
    return tuple(n // d for n, d in zip(shape, degrees(type_, axes, len(shape)), strict=True))


def slice_count(type_: Type, axes: Sequence[Axis]) -> int:
    """Return the number of slices of a tensor: the factor by which one device's piece is smaller than the whole."""
    return prod(axis.size for state, axis in zip(type_, axes, strict=True) if state.kind == "P")


def misfit(shape: Shape, type_: Type, axes: Sequence[Axis]) -> str | None:
    """Explain why a tensor of this shape cannot have this type: a dimension or a digit does not divide. None if it can."""
    by_dim: dict[int, dict[int, int]] = {}
    for state, axis in zip(type_, axes, strict=True):
        if state.kind == "P":
            if not 0 <= state.dim < len(shape):
                return f"a type partitions dimension {state.dim} of a tensor of rank {len(shape)}"
            slots = by_dim.setdefault(state.dim, {})
            slots[state.outer] = slots.get(state.outer, 1) * axis.size
    for dim, slots in by_dim.items():
        ends = [*sorted(slots)[1:], shape[dim]]
        for (outer, degree), end in zip(sorted(slots.items()), ends, strict=True):
            if end % (outer * degree):
                nearest = -(-shape[dim] // (outer * degree)) * outer * degree
                size = f"dimension {dim} of size {shape[dim]}"
                return f"{size} is not divisible by {outer * degree} (the nearest that is: {nearest})"
    return None


def show(type_: Type, axes: Sequence[Axis], rank: int) -> str:
    """Format a type like a PartitionSpec: `[b0·n1, -, d0] +d1 *n0` (`+` partial sum, `*` replicated for use)."""
    dims: list[list[tuple[Axis, tuple[str, str]]]] = [[] for _ in range(rank)]
    marked = []
    for state, axis in zip(type_, axes, strict=True):
        if state.kind == "P":
            dims[state.dim].append((axis, ("", "" if state.outer == 1 else f"/{state.outer}")))
        elif state.kind != "U":
            marked.append((axis, ("*" if state.kind == "R" else "+", "")))
    *names, marks = (joined_names((a for a, _ in row), (m for _, m in row)) for row in (*dims, marked))
    return " ".join(["[" + ", ".join("·".join(d) or "-" for d in names) + "]", *marks])
