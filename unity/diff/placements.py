"""Parallel types in words: along which mesh axes a tensor is partitioned, replicated or a partial sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from msgspec.structs import replace

from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.types.axis import Axis, LevelPart, joined_names
from unity.pcg.types.parallel_type import State, Type, joined_digits

Placement = tuple[tuple[Axis, State], ...]  # the axes that a type uses, each with its state

WHOLE = "whole"


def placement(type_: Type, axes: Sequence[Axis]) -> Placement:
    """Return a type without the axes that it does not use, so that types on different meshes can be compared."""
    return tuple((a, s) for a, s in zip(axes, type_, strict=True) if s.kind != "U")


def placements(types: Sequence[Type], axes: Sequence[Axis]) -> tuple[Placement, ...]:
    """Return the placements of several types."""
    return tuple(placement(t, axes) for t in types)


def type_in_words(type_: Type, axes: Sequence[Axis]) -> str:
    """Return a type in words: `dim 0 over node·device_a, replicated over device_b`, or `whole`."""
    return in_words(placement(type_, axes))


def in_words(placed: Placement) -> str:
    """Return a placement in words."""
    by_state: dict[State, list[Axis]] = {}
    for axis, state in placed:
        by_state.setdefault(state, []).append(axis)
    return _listed({state: "·".join(joined_names(axes)) for state, axes in by_state.items()})


def change_in_words(before: Placement, after: Placement) -> str:
    """Return two placements in words, with the sizes of axes if these alone tell them apart."""
    words = [in_words(placed) for placed in (before, after)]
    if words[0] == words[1]:
        words = [in_words(tuple((_sized(axis), state) for axis, state in placed)) for placed in (before, after)]
    return " → ".join(words)


def _sized(axis: Axis) -> Axis:
    """Return an axis whose name has its size."""
    if isinstance(axis, LevelPart):
        axis = replace(axis, whole=f"{axis.whole} of {axis.whole_size}")
    return replace(axis, name=f"{axis.name} of {axis.size}")


def stored_in_words(type_: Type, names: AxisNames) -> str:
    """Return a type in words, as `type_in_words` does, with names that may not tell all of its axes apart."""
    by_state: dict[State, list[int]] = {}
    for k, state in enumerate(joined_digits(type_, names.axes)):
        if state.kind != "U":
            by_state.setdefault(state, []).append(k)
    return _listed({state: names.listed(axes) for state, axes in by_state.items()})


def _listed(by_state: Mapping[State, str]) -> str:
    order = sorted(by_state, key=lambda s: ("PRS".index(s.kind), s.dim, s.outer))
    return ", ".join(f"{_state_in_words(s)} over {by_state[s]}" for s in order) or WHOLE


def _state_in_words(state: State) -> str:
    if state.kind != "P":
        return {"R": "replicated", "S": "partial sum"}[state.kind]
    return f"dim {state.dim}" + (f" (inside of {state.outer})" if state.outer > 1 else "")


def is_moved(before: Placement, after: Placement) -> bool:
    """Return whether a tensor is split into as many pieces along the same dimensions as before, but on other devices."""
    return before != after and _degrees(before) == _degrees(after)


def _degrees(placed: Placement) -> dict[State, int]:
    return {state: prod(a.size for a, s in placed if s == state) for state in {s for _, s in placed}}
