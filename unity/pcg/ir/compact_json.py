"""Graphs as compact JSON data, in which equal nodes, as in the layers of a model, share their content.

The content of a node is its data without its operands. Each distinct content is written once. A node is a row: the number of its
content, and its operands, each the number of a node, or a pair of that and the number of the result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from unity.base.errors import PlanFileError
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.graph_json import from_json, to_json

MARK = "folded graph"
SEVERAL = "folded graphs"


def fold(graph: PCG) -> dict[str, Any]:
    """Convert a graph to data for `json.dumps`. Raises TypeError if an attribute is not plain data."""
    return {**_alone(to_json(graph)), "unity": MARK}


def fold_all(graphs: Iterable[PCG]) -> dict[str, Any]:
    """Convert several graphs to data, in which they share the contents of their nodes."""
    contents: dict[str, int] = {}
    rows = [_rows(to_json(graph), contents) for graph in graphs]
    return {"unity": SEVERAL, "contents": _listed(contents), "graphs": rows}


def unfold(data: Any) -> PCG:
    """Read a graph from the data of `fold`, with the same key. Raises PlanFileError for anything else."""
    if not isinstance(data, dict) or data.get("unity") != MARK:
        raise PlanFileError(f"this is not a graph that unity saved: it lacks the mark 'unity: {MARK}'")
    try:
        whole = _unfolded(data)
    except DAMAGED as error:
        raise PlanFileError(f"this graph is damaged: {type(error).__name__}: {error}") from error
    return from_json({**whole, "unity": "graph"})


def unfold_all(data: Any) -> tuple[PCG, ...]:
    """Read the graphs from the data of `fold_all`. Raises PlanFileError for anything else."""
    if not isinstance(data, dict) or data.get("unity") != SEVERAL:
        raise PlanFileError(f"these are no graphs that unity saved: they lack the mark 'unity: {SEVERAL}'")
    try:
        contents = _contents(data["contents"])
        whole = [_with_rows(graph, contents) for graph in data["graphs"]]
    except DAMAGED as error:
        raise PlanFileError(f"these graphs are damaged: {type(error).__name__}: {error}") from error
    return tuple(from_json({**graph, "unity": "graph"}) for graph in whole)


DAMAGED = (AttributeError, IndexError, KeyError, TypeError, ValueError)


def _alone(data: dict[str, Any]) -> dict[str, Any]:
    """Compact a graph's data, with a list of contents for this graph alone."""
    contents: dict[str, int] = {}
    return {**_rows(data, contents), "contents": _listed(contents)}


def _rows(data: dict[str, Any], contents: dict[str, int]) -> dict[str, Any]:
    """Replace the nodes of a graph's data by rows. New contents are numbered and added to `contents`."""
    nodes = []
    for node in data["nodes"]:
        content = {k: v for k, v in node.items() if k != "operands"}
        if "inside" in content:
            content["inside"] = _alone(content["inside"])
        reads = [number if index == 0 else [number, index] for number, index in node["operands"]]
        nodes.append([contents.setdefault(json.dumps(content), len(contents)), *reads])
    return {**data, "nodes": nodes}


def _listed(contents: dict[str, int]) -> list[Any]:
    return [json.loads(c) for c in contents]


def _unfolded(data: dict[str, Any]) -> dict[str, Any]:
    return _with_rows({k: v for k, v in data.items() if k != "contents"}, _contents(data["contents"]))


def _contents(listed: list[Any]) -> list[dict[str, Any]]:
    return [{**c, "inside": _unfolded(c["inside"])} if "inside" in c else c for c in listed]


def _with_rows(data: dict[str, Any], contents: list[dict[str, Any]]) -> dict[str, Any]:
    nodes = [
        {**contents[content], "operands": [[r, 0] if isinstance(r, int) else r for r in reads]} for content, *reads in data["nodes"]
    ]
    return {**data, "nodes": nodes}
