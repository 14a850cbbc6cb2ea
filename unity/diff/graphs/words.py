"""Types in words: along which axes a tensor is held how, and what became of that."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import State, Type

Marks = tuple[tuple[tuple[Axis, State], ...], ...]  # of each result: the axes that it uses, and how

WHOLE = "whole"


def marks(types: Sequence[Type], axes: Sequence[Axis]) -> Marks:
    """Types without the axes that they do not use: equal for types on different meshes that say the same."""
    return tuple(tuple((a, s) for a, s in zip(axes, t, strict=True) if s.kind != "U") for t in types)


def words(type_: Type, axes: Sequence[Axis]) -> str:
    """A type in words: `dim 0 over n0·d0, replicated over d1`, or `whole`."""
    return said(tuple((a, s) for a, s in zip(axes, type_, strict=True) if s.kind != "U"))


def said(held: tuple[tuple[Axis, State], ...]) -> str:
    """One result's marks in words."""
    by_state: dict[State, list[str]] = {}
    for axis, state in held:
        by_state.setdefault(state, []).append(axis.name)
    order = sorted(by_state, key=lambda s: ("PRS".index(s.kind), s.dim, s.outer))
    return ", ".join(f"{_state(s)} over {'·'.join(by_state[s])}" for s in order) or WHOLE


def _state(state: State) -> str:
    if state.kind != "P":
        return {"R": "replicated", "S": "partial sum"}[state.kind]
    return f"dim {state.dim}" + (f" (inside of {state.outer})" if state.outer > 1 else "")


def moved(before: tuple[tuple[Axis, State], ...], after: tuple[tuple[Axis, State], ...]) -> bool:
    """Whether a tensor is cut into as many pieces as before, along the same dimensions, but lies on other devices."""
    return before != after and _degrees(before) == _degrees(after)


def _degrees(held: tuple[tuple[Axis, State], ...]) -> dict[State, int]:
    return {state: prod(a.size for a, s in held if s == state) for state in {s for _, s in held}}
