"""Plans' strategies as JSON: the types of every node's operands and results, in the order of the serial graph's nodes.

Saved plans and entries of the plan cache both contain this form. It consists of numbers and names of states, so reading it runs no
code, and it has a meaning only together with the graph whose hash the file carries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from unity.base.errors import PlanError
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.parallel.parallelize import Assignment
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import State, Type
from unity.search.session import Candidate


def _nodes(graph: PCG) -> list[Node]:
    return [node for node, _ in graph.walk()]


def to_json(graph: PCG, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Return candidates of one graph as data, in which equal types, and nodes of equal types as in a model's layers, are shared.

    A row describes a node: the types of its results; for each operand the types that it passes through; the operands that the
    backward pass gathers again; and what the backward pass recomputes: nothing (0), its inner values (1), or the whole node (2).
    """
    types: dict[Type, int] = {}
    rows: dict[str, int] = {}

    def numbers(through: Sequence[Type]) -> list[int]:
        return [types.setdefault(t, len(types)) for t in through]

    def row(a: Assignment, n: Node) -> int:
        places = range(len(n.operands))
        operands = [numbers(a.operands.get((id(n), p), ())) for p in places]
        again = [p for p in places if (id(n), p) in a.again]
        fields = [numbers(a.results.get(id(n), ())), operands, again, 2 if id(n) in a.rerun else int(id(n) in a.recomputed)]
        return rows.setdefault(json.dumps(fields), len(rows))

    nodes, graphs = _nodes(graph), list(graph.graphs())
    points = []
    for c in candidates:
        outputs = [[numbers(c.assignment.outputs.get((id(g), k), ())) for k in range(len(g.outputs))] for g in graphs]
        numbered = [row(c.assignment, n) for n in nodes]
        points.append({"time": c.time, "memory": c.memory, "nodes": numbered, "outputs": outputs})
    texts = [[_state_text(s) for s in t] for t in types]
    return {"types": texts, "rows": [json.loads(text) for text in rows], "points": points}


def from_json(graph: PCG, axes: tuple[Axis, ...], data: Mapping[str, Any]) -> tuple[Candidate, ...]:
    """Return the candidates that `to_json` wrote for a graph with the same hash. Raises PlanError if they do not fit it."""
    try:
        types = [tuple(_state(s) for s in row) for row in data["types"]]
        if any(len(t) != len(axes) for t in types):
            raise PlanError(f"a type speaks of other axes than the {len(axes)} of the machine")
        return tuple(_candidate(graph, axes, types, data["rows"], point) for point in data["points"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise PlanError(f"the plan's strategies do not fit its graph ({cause}): the file is damaged") from error


def _candidate(graph: PCG, axes: tuple[Axis, ...], types: list[Type], rows: Sequence[Any], point: Mapping[str, Any]) -> Candidate:
    nodes, graphs = _nodes(graph), list(graph.graphs())
    described = [(n, *rows[k]) for n, k in zip(nodes, point["nodes"], strict=True)]
    results = {id(n): tuple(types[t] for t in numbers) for n, numbers, *_ in described if numbers}
    operands = {
        (id(n), p): tuple(types[t] for t in through)
        for n, _, paths, _, _ in described
        for p, through in zip(range(len(n.operands)), paths, strict=True)
    }
    outputs = {
        (id(g), k): tuple(types[t] for t in row)
        for g, outputs_of_graph in zip(graphs, point["outputs"], strict=True)
        for k, row in zip(range(len(g.outputs)), outputs_of_graph, strict=True)
    }
    again = frozenset((id(n), int(p)) for n, _, _, places, _ in described for p in places)
    recomputed, rerun = (frozenset(id(n) for n, *_, level in described if level == wanted) for wanted in (1, 2))
    assignment = Assignment(axes, results, operands, outputs, again, recomputed, rerun)
    return Candidate(float(point["time"]), float(point["memory"]), assignment)


def _state_text(state: State) -> str:
    return state.kind if state.kind != "P" else f"P{state.dim}/{state.outer}"


def _state(text: str) -> State:
    if text in ("U", "R", "S"):
        return State(text)
    dim, outer = text.removeprefix("P").split("/")
    return State("P", int(dim), int(outer))
