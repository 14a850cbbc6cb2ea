"""A plan's strategy as data: for every node of a serial graph, in the graph's own order, the types of what it takes and gives.

The same JSON is a saved plan and an entry of the plan cache. It names nothing but states, so reading it runs no code, and it
means something only together with the graph whose hash it carries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unity.base.errors import PlanError
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.parallel.parallelize import Assignment
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import State, Type
from unity.search.session import Candidate


def _graphs(graph: PCG) -> Iterator[PCG]:
    yield graph
    for node in graph.nodes:
        if node.inside is not None:
            yield from _graphs(node.inside)


def _nodes(graph: PCG) -> list[Node]:
    return [node for node, _ in graph.walk()]


def to_json(graph: PCG, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """All candidates of one graph. Equal types are written once; and so are nodes of equal types, as in the layers of a model.

    A row is what a node gives, what each operand goes through, the operands that are gathered again, and whether it is computed
    again: its inner values (1), or all of it (2).
    """
    types: dict[Type, int] = {}
    rows: dict[str, int] = {}

    def numbers(through: Sequence[Type]) -> list[int]:
        return [types.setdefault(t, len(types)) for t in through]

    def row(a: Assignment, n: Node) -> int:
        places = range(len(n.operands))
        operands = [numbers(a.operands.get((id(n), p), ())) for p in places]
        again = [p for p in places if (id(n), p) in a.again]
        found = [numbers(a.results.get(id(n), ())), operands, again, 2 if id(n) in a.rerun else int(id(n) in a.recomputed)]
        return rows.setdefault(json.dumps(found), len(rows))

    nodes, graphs = _nodes(graph), list(_graphs(graph))
    points = []
    for c in candidates:
        outputs = [[numbers(c.assignment.outputs.get((id(g), k), ())) for k in range(len(g.outputs))] for g in graphs]
        found = [row(c.assignment, n) for n in nodes]
        points.append({"time": c.time, "memory": c.memory, "nodes": found, "outputs": outputs})
    shown = [[_state_text(s) for s in t] for t in types]
    return {"types": shown, "rows": [json.loads(text) for text in rows], "points": points}


def from_json(graph: PCG, axes: tuple[Axis, ...], data: Mapping[str, Any]) -> tuple[Candidate, ...]:
    """The candidates that `to_json` wrote, for a graph with the same hash. Raises PlanError if they do not fit together."""
    try:
        types = [tuple(_state(s) for s in row) for row in data["types"]]
        if any(len(t) != len(axes) for t in types):
            raise PlanError(f"a type speaks of other axes than the {len(axes)} of the machine")
        return tuple(_candidate(graph, axes, types, data["rows"], point) for point in data["points"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise PlanError(f"the plan's strategies do not fit its graph ({what}): the file is damaged") from error


def _candidate(graph: PCG, axes: tuple[Axis, ...], types: list[Type], rows: Sequence[Any], point: Mapping[str, Any]) -> Candidate:
    nodes, graphs = _nodes(graph), list(_graphs(graph))
    found = [(n, *rows[k]) for n, k in zip(nodes, point["nodes"], strict=True)]
    results = {id(n): tuple(types[t] for t in made) for n, made, *_ in found if made}
    operands = {
        (id(n), p): tuple(types[t] for t in through)
        for n, _, given, _, _ in found
        for p, through in zip(range(len(n.operands)), given, strict=True)
    }
    outputs = {
        (id(g), k): tuple(types[t] for t in row)
        for g, ends in zip(graphs, point["outputs"], strict=True)
        for k, row in zip(range(len(g.outputs)), ends, strict=True)
    }
    again = frozenset((id(n), int(p)) for n, _, _, places, _ in found for p in places)
    recomputed, rerun = (frozenset(id(n) for n, *_, once_more in found if once_more == way) for way in (1, 2))
    assignment = Assignment(axes, results, operands, outputs, again, recomputed, rerun)
    return Candidate(float(point["time"]), float(point["memory"]), assignment)


def _state_text(state: State) -> str:
    return state.kind if state.kind != "P" else f"P{state.dim}/{state.outer}"


def _state(text: str) -> State:
    if text in ("U", "R", "S"):
        return State(text)
    dim, outer = text.removeprefix("P").split("/")
    return State("P", int(dim), int(outer))
