"""Graphs as small JSON data: what many nodes have in common is written once, as in the layers of a model.

A node's content is all of its data but what it reads. Each different content is kept once; a node is the number of its content,
and what it reads: the number of another node, or a pair of that and of the result.
"""

from __future__ import annotations

import json
from typing import Any

from unity.pcg.errors import PlanFileError
from unity.pcg.graph import PCG
from unity.pcg.serialize import from_json, to_json

MARK = "folded graph"


def fold(graph: PCG) -> dict[str, Any]:
    """A graph as data for `json.dumps`. Raises TypeError if an attribute is no plain value."""
    return {**_folded(to_json(graph)), "unity": MARK}


def unfold(data: Any) -> PCG:
    """The graph that `fold` described, with the same key. Raises PlanFileError if the data are anything else."""
    if not isinstance(data, dict) or data.get("unity") != MARK:
        raise PlanFileError(f"this is not a graph that unity saved: it lacks the mark 'unity: {MARK}'")
    try:
        whole = _unfolded(data)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise PlanFileError(f"this graph is damaged: {type(error).__name__}: {error}") from error
    return from_json({**whole, "unity": "graph"})


def _folded(data: dict[str, Any]) -> dict[str, Any]:
    contents: dict[str, int] = {}
    nodes = []
    for node in data["nodes"]:
        content = {k: v for k, v in node.items() if k != "operands"}
        if "inside" in content:
            content["inside"] = _folded(content["inside"])
        reads = [number if index == 0 else [number, index] for number, index in node["operands"]]
        nodes.append([contents.setdefault(json.dumps(content), len(contents)), *reads])
    return {**data, "contents": [json.loads(c) for c in contents], "nodes": nodes}


def _unfolded(data: dict[str, Any]) -> dict[str, Any]:
    contents = [{**c, "inside": _unfolded(c["inside"])} if "inside" in c else c for c in data["contents"]]
    nodes = [
        {**contents[content], "operands": [[r, 0] if isinstance(r, int) else r for r in reads]} for content, *reads in data["nodes"]
    ]
    return {**{k: v for k, v in data.items() if k != "contents"}, "nodes": nodes}
