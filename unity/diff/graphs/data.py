"""Differences as JSON data, with a schema version.

As in a graph's file, what an operator computes is kept as a hash. A node that is kept goes by its number in the first graph
(`12.0`: its first result), an added one by its place among those (`+3.0`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from unity.base.errors import PlanFileError
from unity.diff.graphs.difference import Added, Changed, Diff, Frame, Reference, Removed, name_of, unnamed
from unity.pcg.ir.graph import Node
from unity.pcg.ir.graph_json import node_json, read_node
from unity.pcg.ir.program import Body
from unity.pcg.types.axis import Axis

SCHEMA = 1
MARK = "graph diff"
SAME = {"name": "attributes", "program": "body"}  # fields that a node's data has under another name


def to_json(diff: Diff) -> dict[str, Any]:
    """A difference as data for `json.dumps`."""
    return {"unity": MARK, "schema": SCHEMA, **_diff(diff)}


def from_json(data: Any) -> Diff:
    """The difference that `to_json` described. Raises PlanFileError if the data are anything else."""
    if not isinstance(data, dict) or data.get("unity") != MARK:
        raise PlanFileError(f"this is not a difference of two graphs that unity saved: it lacks the mark 'unity: {MARK}'")
    if data.get("schema") != SCHEMA:
        raise PlanFileError(f"this diff has schema {data.get('schema')!r}, this version of unity reads {SCHEMA}: make it again")
    try:
        return _read(data)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise PlanFileError(f"this diff is damaged: {type(error).__name__}: {error}") from error


def _diff(diff: Diff) -> dict[str, Any]:
    return {
        "before": _frame(diff.before),
        "after": _frame(diff.after),
        "removed": [{"number": r.number, "node": _node(r.node)} for r in diff.removed],
        "added": [{"number": a.number, "node": _node(a.node), "operands": list(map(str, a.operands))} for a in diff.added],
        "changed": [_changed(c) for c in diff.changed],
        **{end: list(map(str, found)) for end in ("inputs", "outputs") if (found := getattr(diff, end)) is not None},
    }


def _frame(frame: Frame) -> dict[str, Any]:
    axes = [[a.name, a.size, a.level, *([a.reduce_in] if a.reduce_in else [])] for a in frame.axes]
    return {"typed": frame.typed, "axes": axes, "nodes": frame.nodes, "key": frame.key}


def _node(node: Node) -> dict[str, Any]:
    return node_json(node, lambda v: [])


def _changed(c: Changed) -> dict[str, Any]:
    """A changed node as it is, and those of its data that were otherwise."""
    old = _node(_as_it_was(c))
    fields = dict.fromkeys(SAME.get(f, f) for f in c.fields if f != "policy")
    data = {"number": c.number, "now": c.now, "node": _node(c.node), "was": {f: old.get(f) for f in fields}}
    if c.operands is not None:
        data["operands"] = [list(map(str, side)) for side in c.operands]
    return data if c.inside is None else {**data, "inside": _diff(c.inside)}


def _as_it_was(c: Changed) -> Node:
    old = {field: before for field, (before, _) in c.fields.items() if field in ("tensors", "types", "source", "scope")}
    name = c.fields["name"][0] if "name" in c.fields else name_of(c.node)
    plain = c.fields["attributes"][0] if "attributes" in c.fields else unnamed(c.node)
    old["attributes"] = plain if name is None else {**plain, "name": name}
    if "program" in c.fields:
        program = c.fields["program"][0]
        old |= {"body": program, "outline": None} if isinstance(program, Body) else {"body": None, "outline": program}
    return replace(c.node, **old)


def _read(data: Mapping[str, Any]) -> Diff:
    before, after = _read_frame(data["before"]), _read_frame(data["after"])
    removed = tuple(Removed(_natural(r["number"]), _read_node(r["node"], before)) for r in data["removed"])
    added = tuple(Added(_natural(a["number"]), _read_node(a["node"], after), _references(a["operands"])) for a in data["added"])
    changed = tuple(_read_changed(c, before, after) for c in data["changed"])
    inputs, outputs = (_references(data[end]) if end in data else None for end in ("inputs", "outputs"))
    return Diff(before, after, removed, added, changed, inputs, outputs)


def _read_frame(data: Mapping[str, Any]) -> Frame:
    axes = tuple(Axis(str(name), _natural(size), _natural(level), *map(str, more)) for name, size, level, *more in data["axes"])
    return Frame(bool(data["typed"]), axes, _natural(data["nodes"]), str(data["key"]))


def _read_node(data: Mapping[str, Any], frame: Frame) -> Node:
    return read_node({**data, "operands": []}, _no_operand, len(frame.axes))


def _no_operand(reference: Any) -> Any:
    raise ValueError(f"{reference!r}: a diff's nodes are written without their operands")


def _read_changed(data: Mapping[str, Any], before: Frame, after: Frame) -> Changed:
    node, was = _read_node(data["node"], after), data["was"]
    given = {k: v for k, v in data["node"].items() if k != "types" or "types" in was} | was
    old = _read_node({k: v for k, v in given.items() if v is not None}, before)
    pairs = {field: (of(old), of(node)) for field, of in _FIELDS.items() if SAME.get(field, field) in was}
    # equal types on other axes say something else; a name and other attributes are written together, and may be equal
    fields = {field: pair for field, pair in pairs.items() if field == "types" or repr(pair[0]) != repr(pair[1])}
    operands = (_references(data["operands"][0]), _references(data["operands"][1])) if "operands" in data else None
    inside = _read(data["inside"]) if "inside" in data else None
    return Changed(_natural(data["number"]), _natural(data["now"]), node, fields, operands, inside)


_FIELDS: Mapping[str, Callable[[Node], Any]] = {
    "tensors": lambda n: n.tensors,
    "types": lambda n: n.types,
    "attributes": unnamed,
    "name": name_of,
    "program": lambda n: n.outline,
    "source": lambda n: n.source,
    "scope": lambda n: n.scope,
}


def _references(data: Sequence[str]) -> tuple[Reference, ...]:
    return tuple(map(_reference, data))


def _reference(text: str) -> Reference:
    number, _, index = text.removeprefix("+").partition(".")
    return Reference(text.startswith("+"), int(number), int(index))


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} should be a natural number")
    return value
