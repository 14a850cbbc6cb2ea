"""Graph differences as JSON data of declared types, with a schema version.

As in a graph's file, the programs of operators are hashes. A reference to a node of both graphs is its index in the first one
(`12.0` is its first result), to an added node its index among the added ones (`+3.0`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta

from unity.base.documents import Natural, Record, at, plain, typed
from unity.base.errors import PlanFileError
from unity.diff.graph_diff import (
    AddedNode,
    ChangedNode,
    GraphDiff,
    GraphHeader,
    Reference,
    References,
    RemovedNode,
    attribute_fields,
    program_fields,
)
from unity.diff.skeleton import name_of, unnamed
from unity.pcg.ir.graph import Node
from unity.pcg.ir.graph_json import NodeRecord, node_record, read_node

SCHEMA = 2
MARK = "graph diff"
KEYS = {"name": "attributes", "program": "body"}  # fields that have another key in a node's data

ReferenceText = Annotated[str, Meta(pattern=r"^\+?[0-9]{1,9}\.[0-9]{1,9}\Z")]


class RemovedRecord(Record):
    """A `RemovedNode`."""

    number: Natural
    node: NodeRecord


class AddedRecord(Record):
    """An `AddedNode`."""

    number: Natural
    node: NodeRecord
    operands: tuple[ReferenceText, ...]


class ChangedRecord(Record, omit_defaults=True):
    """A `ChangedNode`: the second graph's node, and in `was` the data of the first graph's node that differ."""

    number: Natural
    now: Natural
    node: NodeRecord
    was: dict[str, Any]
    operands: tuple[tuple[ReferenceText, ...], tuple[ReferenceText, ...]] | None = None
    inside: DiffRecord | None = None


class DiffRecord(Record, omit_defaults=True):
    """A `GraphDiff`."""

    before: GraphHeader
    after: GraphHeader
    removed: tuple[RemovedRecord, ...]
    added: tuple[AddedRecord, ...]
    changed: tuple[ChangedRecord, ...]
    inputs: tuple[ReferenceText, ...] | None = None
    outputs: tuple[ReferenceText, ...] | None = None


def to_json(diff: GraphDiff) -> dict[str, Any]:
    """Return a difference as data for `json.dumps`."""
    return {"unity": MARK, "schema": SCHEMA, **plain(_record(diff))}


def from_json(data: Any) -> GraphDiff:
    """Return the difference that `to_json` described.

    Raises:
        PlanFileError: the data are something else, of another schema, or damaged.
    """
    if not isinstance(data, dict) or data.get("unity") != MARK:
        raise PlanFileError(f"this is not a difference of two graphs that unity saved: it lacks the mark 'unity: {MARK}'")
    if data.get("schema") != SCHEMA:
        raise PlanFileError(f"this diff has schema {data.get('schema')!r}, this version of unity reads {SCHEMA}: make it again")
    return _read_diff(typed({k: v for k, v in data.items() if k not in ("unity", "schema")}, DiffRecord))


def _record(diff: GraphDiff) -> DiffRecord:
    return DiffRecord(
        before=diff.before,
        after=diff.after,
        removed=tuple(RemovedRecord(r.number, node_record(r.node)) for r in diff.removed),
        added=tuple(AddedRecord(a.number, node_record(a.node), _texts(a.operands)) for a in diff.added),
        changed=tuple(map(_changed, diff.changed)),
        inputs=None if diff.inputs is None else _texts(diff.inputs),
        outputs=None if diff.outputs is None else _texts(diff.outputs),
    )


def _texts(references: References) -> tuple[str, ...]:
    return tuple(map(str, references))


def _changed(c: ChangedNode) -> ChangedRecord:
    old = plain(node_record(_node_before(c)))
    was = {f: old.get(f) for f in dict.fromkeys(KEYS.get(f, f) for f in c.fields if f != "policy")}
    operands = None if c.operands is None else (_texts(c.operands[0]), _texts(c.operands[1]))
    return ChangedRecord(c.number, c.now, node_record(c.node), was, operands, None if c.inside is None else _record(c.inside))


def _node_before(c: ChangedNode) -> Node:
    """Return a changed node as it was in the first graph, as far as the difference tells."""
    old = {field: before for field, (before, _) in c.fields.items() if field in ("tensors", "types", "source", "scope")}
    old |= attribute_fields(c.node, {k: before for k, (before, _) in c.fields.items()})
    if "program" in c.fields:
        old |= program_fields(c.fields["program"][0])
    return replace(c.node, **old)


def _read_diff(diff: DiffRecord) -> GraphDiff:
    before, after = diff.before, diff.after
    with at(".removed"):
        removed = tuple(RemovedNode(r.number, _read_node(r.node, before)) for r in diff.removed)
    with at(".added"):
        added = tuple(AddedNode(a.number, _read_node(a.node, after), _references(a.operands)) for a in diff.added)
    with at(".changed"):
        changed = tuple(_read_changed(c, before, after) for c in diff.changed)
    inputs, outputs = (None if texts is None else _references(texts) for texts in (diff.inputs, diff.outputs))
    return GraphDiff(before, after, removed, added, changed, inputs, outputs)


def _read_node(record: NodeRecord, header: GraphHeader) -> Node:
    return read_node(record, (), len(header.axes))


def _read_changed(c: ChangedRecord, before: GraphHeader, after: GraphHeader) -> ChangedNode:
    node, was = _read_node(c.node, after), c.was
    with at(".was"):
        data_before = {k: v for k, v in plain(c.node).items() if k != "types" or "types" in was} | was
        old = _read_node(typed({k: v for k, v in data_before.items() if v is not None}, NodeRecord), before)
    pairs = {field: (of(old), of(node)) for field, of in _FIELDS.items() if KEYS.get(field, field) in was}
    # Equal types on other axes differ. The name and the other attributes share one key, so one of the two may be equal.
    fields = {field: pair for field, pair in pairs.items() if field == "types" or repr(pair[0]) != repr(pair[1])}
    operands = None if c.operands is None else (_references(c.operands[0]), _references(c.operands[1]))
    with at(".inside"):
        inside = None if c.inside is None else _read_diff(c.inside)
    return ChangedNode(c.number, c.now, node, fields, operands, inside)


_FIELDS: Mapping[str, Callable[[Node], Any]] = {
    "tensors": lambda n: n.tensors,
    "types": lambda n: n.types,
    "attributes": unnamed,
    "name": name_of,
    "program": lambda n: n.outline,
    "source": lambda n: n.source,
    "scope": lambda n: n.scope,
}


def _references(data: Sequence[str]) -> References:
    return tuple(map(_reference, data))


def _reference(text: str) -> Reference:
    number, _, index = text.removeprefix("+").partition(".")
    return Reference(text.startswith("+"), int(number), int(index))
