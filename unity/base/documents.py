"""JSON documents of declared types. Decoding is strict, runs no code, and names the place of a value that does not fit.

A document's type is a `Record` of fields with types, bounds and patterns. Conditions that no declaration can express, such as that
a reference names a node, are checked by the reader of the document, which raises the same error.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform

import msgspec
import numpy as np
from msgspec import Meta

from unity.base.errors import PlanFileError

T = TypeVar("T")

MARKED = {
    "plan": "a plan",
    "graph": "a graph",
    "folded graph": "a graph",
    "folded graphs": "a file of graphs",
    "graph diff": "a difference of two graphs",
}
MACHINE, LIBRARY = "a machine", "a library of rules"
UNMARKED = {MACHINE: {"schema", "device", "levels"}, LIBRARY: {"schema", "rules"}}

Natural = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base of documents' declared types: immutable, and without fields that are not declared."""


class Misfit(PlanFileError):
    """A value that does not fit its declared type or the rest of its document.

    Attributes:
        cause: the fault.
        place: the path of the value in the document, such as ".nodes[3].types".
    """

    def __init__(self, cause: str, place: str = "") -> None:
        self.cause, self.place = cause, place
        super().__init__(f"the data are damaged at ${place}: {cause}")

    def within(self, place: str) -> Misfit:
        """Return the same fault in a document that has this one at a place."""
        return Misfit(self.cause, place + self.place)


class at:
    """A context manager that adds a place to the faults inside of it."""

    __slots__ = ("place",)

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        if isinstance(fault, Misfit):
            raise fault.within(self.place) from None


def parsed(text: bytes) -> Any:
    """Return the data of a JSON text. Raises PlanFileError for any other text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise PlanFileError(f"it is no JSON: {error}") from None


def document_kind(data: Any) -> str:
    """Return what kind of document of unity's data are, for an error where another kind is expected: "a plan", "a machine"; "" for
    data of no known kind.
    """
    if not isinstance(data, dict):
        return ""
    if isinstance(mark := data.get("unity"), str) and mark in MARKED:
        return MARKED[mark]
    return next((kind for kind, fields in UNMARKED.items() if fields <= data.keys()), "")


def typed(data: Any, kind: type[T]) -> T:
    """Return data, as `parsed` returns them, as a value of a declared type. Raises Misfit if they are not."""
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at ")
        place = where.strip("`").rpartition("$")[2]
        if field := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", text):
            raise Misfit("it is missing" if "missing" in field[1] else "no such field is known", f"{place}.{field[2]}") from None
        text = re.sub(r"str matching regex .*", "a text of another form", text.replace("`", ""))
        raise Misfit(text[:1].lower() + text[1:], place) from None
    except RecursionError:
        raise Misfit("the values are nested too deeply") from None


def refuse_unknown(value: object, data: Any, place: str = "") -> None:
    """Raise Misfit if data have fields that the dataclasses decoded from them do not declare. (`typed` checks only Records.)

    Args:
        value: a dataclass, or a tuple of them.
        data: the data that the value was decoded from.
        place: the path of the data in the document.
    """
    if isinstance(value, tuple):
        for k, (item, part) in enumerate(zip(value, data, strict=True)):
            refuse_unknown(item, part, f"{place}[{k}]")
    elif is_dataclass(value):
        declared = {field.name for field in fields(value)}
        if unknown := data.keys() - declared:
            raise Misfit("no such field is known", f"{place}.{min(unknown)}")
        for name, part in data.items():
            refuse_unknown(getattr(value, name), part, f"{place}.{name}")


def plain(value: Any) -> Any:
    """Return a value of a declared type as dicts, lists, texts and numbers, as `parsed` would return them from its text."""
    return parsed(encoded(value))


def encoded(value: Any, order: Literal["sorted"] | None = None) -> bytes:
    """Return a value as JSON. Values that are equal have the same text if fields and keys are sorted."""
    try:
        return msgspec.json.encode(value, enc_hook=_number, order=order)
    except UnicodeEncodeError:  # a text from a path or a name that is not UTF-8: its code points are written as escapes
        return json.dumps(msgspec.to_builtins(value, enc_hook=_number), sort_keys=order is not None, separators=(",", ":")).encode()


def _number(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number."""
    assert isinstance(value, np.generic), f"{value!r} of type {type(value).__name__} is no data"
    return value.item()
