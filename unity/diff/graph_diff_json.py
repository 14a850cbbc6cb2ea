"""Graph differences as JSON data with a schema version.

As in a graph's file, the programs of operators are hashes. A reference to a node of both graphs is its index in the first one
(`12.0` is its first result), to an added node its index among the added ones (`+3.0`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unity.base.errors import PlanFileError
from unity.diff.graph_diff import (
    AddedNode,
    ChangedNode,
    GraphDiff,
    GraphHeader,
    Reference,
    References,
    RemovedNode,
    program_fields,
)
from unity.diff.skeleton import name_of, unnamed
from unity.pcg.ir.graph import Node
from unity.pcg.ir.graph_json import natural, node_json, read_node
from unity.pcg.types.axis import Axis

SCHEMA = 1
MARK = "graph diff"
KEYS = {"name": "attributes", "program": "body"}  # fields that stand under another key in a node's data


def to_json(diff: GraphDiff) -> dict[str, Any]:
    """Return a difference as data for `json.dumps`."""
    return {"unity": MARK, "schema": SCHEMA, **_diff_json(diff)}


def from_json(data: Any) -> GraphDiff:
    """Return the difference that `to_json` described.

    Raises:
        PlanFileError: the data are something else, of another schema, or damaged.
    """
    if not isinstance(data, dict) or data.get("unity") != MARK:
        raise PlanFileError(f"this is not a difference of two graphs that unity saved: it lacks the mark 'unity: {MARK}'")
    if data.get("schema") != SCHEMA:
        raise PlanFileError(f"this diff has schema {data.get('schema')!r}, this version of unity reads {SCHEMA}: make it again")
    try:
        return _read_diff(data)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise PlanFileError(f"this diff is damaged: {type(error).__name__}: {error}") from error


def _diff_json(diff: GraphDiff) -> dict[str, Any]:
    return {
        "before": _header_json(diff.before),
        "after": _header_json(diff.after),
        "removed": [{"number": r.number, "node": _node_json(r.node)} for r in diff.removed],
        "added": [{"number": a.number, "node": _node_json(a.node), "operands": list(map(str, a.operands))} for a in diff.added],
        "changed": [_changed_json(c) for c in diff.changed],
        **{end: list(map(str, references)) for end in ("inputs", "outputs") if (references := getattr(diff, end)) is not None},
    }


def _header_json(header: GraphHeader) -> dict[str, Any]:
    axes = [[a.name, a.size, a.level, *([a.reduce_in] if a.reduce_in else [])] for a in header.axes]
    return {"typed": header.typed, "axes": axes, "nodes": header.nodes, "key": header.key}


def _node_json(node: Node) -> dict[str, Any]:
    return node_json(node, lambda v: [])


def _changed_json(c: ChangedNode) -> dict[str, Any]:
    """Return a changed node as it is in the second graph, and the data of the first that differ."""
    old = _node_json(_node_before(c))
    fields = dict.fromkeys(KEYS.get(f, f) for f in c.fields if f != "policy")
    data = {"number": c.number, "now": c.now, "node": _node_json(c.node), "was": {f: old.get(f) for f in fields}}
    if c.operands is not None:
        data["operands"] = [list(map(str, side)) for side in c.operands]
    return data if c.inside is None else {**data, "inside": _diff_json(c.inside)}


def _node_before(c: ChangedNode) -> Node:
    """Return a changed node as it was in the first graph, as far as its data tell."""
    old = {field: before for field, (before, _) in c.fields.items() if field in ("tensors", "types", "source", "scope")}
    name = c.fields["name"][0] if "name" in c.fields else name_of(c.node)
    attributes = c.fields["attributes"][0] if "attributes" in c.fields else unnamed(c.node)
    old["attributes"] = attributes if name is None else {**attributes, "name": name}
    if "program" in c.fields:
        old |= program_fields(c.fields["program"][0])
    return replace(c.node, **old)


def _read_diff(data: Mapping[str, Any]) -> GraphDiff:
    before, after = _read_header(data["before"]), _read_header(data["after"])
    removed = tuple(RemovedNode(natural(r["number"]), _read_node(r["node"], before)) for r in data["removed"])
    added = tuple(AddedNode(natural(a["number"]), _read_node(a["node"], after), _references(a["operands"])) for a in data["added"])
    changed = tuple(_read_changed(c, before, after) for c in data["changed"])
    inputs, outputs = (_references(data[end]) if end in data else None for end in ("inputs", "outputs"))
    return GraphDiff(before, after, removed, added, changed, inputs, outputs)


def _read_header(data: Mapping[str, Any]) -> GraphHeader:
    axes = tuple(Axis(str(name), natural(size), natural(level), *map(str, more)) for name, size, level, *more in data["axes"])
    return GraphHeader(bool(data["typed"]), axes, natural(data["nodes"]), str(data["key"]))


def _read_node(data: Mapping[str, Any], header: GraphHeader) -> Node:
    return read_node({**data, "operands": []}, _no_operand, len(header.axes))


def _no_operand(reference: Any) -> Any:
    raise ValueError(f"{reference!r}: a diff's nodes are written without their operands")


def _read_changed(data: Mapping[str, Any], before: GraphHeader, after: GraphHeader) -> ChangedNode:
    node, was = _read_node(data["node"], after), data["was"]
    data_before = {k: v for k, v in data["node"].items() if k != "types" or "types" in was} | was
    old = _read_node({k: v for k, v in data_before.items() if v is not None}, before)
    pairs = {field: (of(old), of(node)) for field, of in _FIELDS.items() if KEYS.get(field, field) in was}
    # Equal types on other axes differ. The name and the other attributes share one key, so one of the two may be equal.
    fields = {field: pair for field, pair in pairs.items() if field == "types" or repr(pair[0]) != repr(pair[1])}
    operands = (_references(data["operands"][0]), _references(data["operands"][1])) if "operands" in data else None
    inside = _read_diff(data["inside"]) if "inside" in data else None
    return ChangedNode(natural(data["number"]), natural(data["now"]), node, fields, operands, inside)


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
