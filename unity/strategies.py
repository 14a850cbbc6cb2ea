"""A plan's strategy as data: for every node of a serial graph, in the graph's own order, the types of what it takes and gives.

The same JSON is a saved plan and an entry of the plan cache. It names nothing but states, so reading it runs no code, and it
means something only together with the graph whose hash it carries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unity.pcg.axis import Axis
from unity.pcg.errors import PlanError
from unity.pcg.graph import PCG, Node
from unity.pcg.parallelize import Assignment
from unity.pcg.state import State, Type
from unity.search.session import Candidate


def _graphs(graph: PCG) -> Iterator[PCG]:
    yield graph
    for node in graph.nodes:
        if node.inside is not None:
            yield from _graphs(node.inside)


def _nodes(graph: PCG) -> list[Node]:
    return [node for node, _ in graph.walk()]


def to_json(graph: PCG, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """All candidates of one graph; equal types are written once."""
    types: dict[Type, int] = {}

    def number(type_: Type) -> int:
        return types.setdefault(type_, len(types))

    nodes, graphs = _nodes(graph), list(_graphs(graph))
    points = []
    for c in candidates:
        a = c.assignment
        points.append(
            {
                "time": c.time,
                "memory": c.memory,
                "results": [[number(t) for t in a.results.get(id(n), ())] for n in nodes],
                "operands": [[[number(t) for t in a.operands.get((id(n), p), ())] for p in range(len(n.operands))] for n in nodes],
                "outputs": [[[number(t) for t in a.outputs.get((id(g), k), ())] for k in range(len(g.outputs))] for g in graphs],
                "again": [[i, p] for i, n in enumerate(nodes) for p in range(len(n.operands)) if (id(n), p) in a.again],
                "recomputed": [i for i, n in enumerate(nodes) if id(n) in a.recomputed],
            }
        )
    return {"types": [[_state_text(s) for s in t] for t in types], "points": points}


def from_json(graph: PCG, axes: tuple[Axis, ...], data: Mapping[str, Any]) -> tuple[Candidate, ...]:
    """The candidates that `to_json` wrote, for a graph with the same hash. Raises PlanError if they do not fit together."""
    try:
        types = [tuple(_state(s) for s in row) for row in data["types"]]
        return tuple(_candidate(graph, axes, types, point) for point in data["points"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise PlanError(f"the plan's strategies do not fit its graph ({what}): the file is damaged") from error


def _candidate(graph: PCG, axes: tuple[Axis, ...], types: list[Type], point: Mapping[str, Any]) -> Candidate:
    nodes, graphs = _nodes(graph), list(_graphs(graph))
    results = {id(n): tuple(types[t] for t in row) for n, row in zip(nodes, point["results"], strict=True) if row}
    operands = {
        (id(n), p): tuple(types[t] for t in row)
        for n, rows in zip(nodes, point["operands"], strict=True)
        for p, row in zip(range(len(n.operands)), rows, strict=True)
    }
    outputs = {
        (id(g), k): tuple(types[t] for t in row)
        for g, rows in zip(graphs, point["outputs"], strict=True)
        for k, row in zip(range(len(g.outputs)), rows, strict=True)
    }
    again = frozenset((id(nodes[i]), int(p)) for i, p in point["again"])
    recomputed = frozenset(id(nodes[i]) for i in point["recomputed"])
    assignment = Assignment(axes, results, operands, outputs, again, recomputed)
    return Candidate(float(point["time"]), float(point["memory"]), assignment)


def _state_text(state: State) -> str:
    return state.kind if state.kind != "P" else f"P{state.dim}/{state.outer}"


def _state(text: str) -> State:
    if text in ("U", "R", "S"):
        return State(text)
    dim, outer = text.removeprefix("P").split("/")
    return State("P", int(dim), int(outer))
