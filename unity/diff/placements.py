"""Parallel types in words: along which mesh axes a tensor is partitioned, replicated or a partial sum."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import State, Type

Placement = tuple[tuple[Axis, State], ...]  # the axes that a type uses, each with its state

WHOLE = "whole"


def placement(type_: Type, axes: Sequence[Axis]) -> Placement:
    """Return a type without the axes that it does not use, so that types on different meshes can be compared."""
    return tuple((a, s) for a, s in zip(axes, type_, strict=True) if s.kind != "U")


def placements(types: Sequence[Type], axes: Sequence[Axis]) -> tuple[Placement, ...]:
    """Return the placements of several types."""
    return tuple(placement(t, axes) for t in types)


def type_in_words(type_: Type, axes: Sequence[Axis]) -> str:
    """Return a type in words: `dim 0 over n0·d0, replicated over d1`, or `whole`."""
    return in_words(placement(type_, axes))


def in_words(placed: Placement) -> str:
    """Return a placement in words."""
    by_state: dict[State, list[str]] = {}
    for axis, state in placed:
        by_state.setdefault(state, []).append(axis.name)
    order = sorted(by_state, key=lambda s: ("PRS".index(s.kind), s.dim, s.outer))
    return ", ".join(f"{_state_in_words(s)} over {'·'.join(by_state[s])}" for s in order) or WHOLE


def _state_in_words(state: State) -> str:
    if state.kind != "P":
        return {"R": "replicated", "S": "partial sum"}[state.kind]
    return f"dim {state.dim}" + (f" (inside of {state.outer})" if state.outer > 1 else "")


def is_moved(before: Placement, after: Placement) -> bool:
    """Return whether a tensor is split into as many pieces along the same dimensions as before, but on other devices."""
    return before != after and _degrees(before) == _degrees(after)


def _degrees(placed: Placement) -> dict[State, int]:
    return {state: prod(a.size for a, s in placed if s == state) for state in {s for _, s in placed}}
