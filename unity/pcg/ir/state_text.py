"""States and types as the texts that documents contain: "U", "R", "S", "P0", or "P0/3" at an inner digit; "P0 U R" for a type."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

from msgspec import Meta

from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, Type, partitioned

_STATE = r"(?:[URS]|P[0-9]{1,4}(?:/[1-9][0-9]{0,14})?)"
StateText = Annotated[str, Meta(pattern=rf"^{_STATE}\Z")]
TypeText = Annotated[str, Meta(pattern=rf"^(?:{_STATE}(?: {_STATE})*)?\Z")]
_WHOLE = {"U": UNUSED, "R": REPLICATED, "S": PARTIAL}


def state_text(state: State) -> StateText:
    """Return a state as text."""
    if state.kind != "P":
        return state.kind
    return f"P{state.dim}" if state.outer == 1 else f"P{state.dim}/{state.outer}"


@lru_cache(maxsize=4096)
def state_of(text: StateText) -> State:
    """Return the state that `state_text` wrote."""
    if text in _WHOLE:
        return _WHOLE[text]
    dim, _, outer = text[1:].partition("/")
    return partitioned(int(dim), int(outer or 1))


def type_text(type_: Type) -> TypeText:
    """Return a type, or other states in a row, as text."""
    return " ".join(map(state_text, type_))


def type_of(text: TypeText) -> Type:
    """Return the type that `type_text` wrote."""
    return tuple(map(state_of, text.split()))
