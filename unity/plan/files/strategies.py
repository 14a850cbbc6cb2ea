"""Plans' strategies in documents: the types of every node's operands and results, in the order of the serial graph's nodes.

Saved plans and entries of the plan cache both contain this form. It consists of numbers and names of states, so reading it runs no
code, and it has a meaning only together with the graph whose hash the document carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from unity.base.documents import Misfit, Natural, Record, at
from unity.pcg.ir.graph import PCG, THROUGH, Node
from unity.pcg.ir.state_text import TypeText, type_of, type_text
from unity.pcg.parallel.parallelize import Assignment
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Type
from unity.search.session import Candidate

Figure = Annotated[float, Meta(ge=0)]


class TypeRow(Record, array_like=True):
    """The types of a node, by their numbers.

    Attributes:
        results: the types of its results.
        operands: for each operand, the types that it passes through.
        again: the operands that the backward pass gathers again.
        rerun: what the backward pass recomputes: nothing (0), its inner values (1), or the whole node (2).
    """

    results: tuple[Natural, ...]
    operands: tuple[tuple[Natural, ...], ...]
    again: tuple[Natural, ...]
    rerun: Annotated[int, Meta(ge=0, le=2)]


class SavedPoint(Record):
    """A candidate: its figures, the rows of the nodes, and the types that the outputs of every graph pass through.

    `hosted` are the nodes, by number, of weights whose optimizer's state the search put in the memory of the host.
    """

    time: Figure
    memory: Figure
    nodes: tuple[Natural, ...]
    outputs: tuple[tuple[tuple[Natural, ...], ...], ...]
    simulated: Figure | None = None
    hosted: tuple[Natural, ...] = ()


class Strategies(Record, kw_only=True):
    """Candidates of one graph, in which equal types, and nodes of equal types as in a model's layers, are shared."""

    types: tuple[TypeText, ...]
    rows: tuple[TypeRow, ...]
    points: Annotated[tuple[SavedPoint, ...], Meta(min_length=1)]


def strategies(graph: PCG, candidates: Sequence[Candidate]) -> Strategies:
    """Return candidates of one graph for a document."""
    types: dict[Type, int] = {}
    rows: dict[TypeRow, int] = {}

    def numbers(through: Sequence[Type]) -> tuple[int, ...]:
        return tuple(types.setdefault(t, len(types)) for t in through)

    def row(a: Assignment, n: Node) -> int:
        places = range(len(n.operands))
        operands = tuple(numbers(a.operands.get((id(n), p), ())) for p in places)
        again = tuple(p for p in places if (id(n), p) in a.again)
        rerun = 2 if id(n) in a.rerun else int(id(n) in a.recomputed)
        return rows.setdefault(TypeRow(numbers(a.results.get(id(n), ())), operands, again, rerun), len(rows))

    nodes, graphs = _nodes(graph), list(graph.graphs())
    points = []
    for c in candidates:
        of = c.assignment.outputs
        outputs = tuple(tuple(numbers(of.get((id(g), k), ())) for k in range(len(g.outputs))) for g in graphs)
        rows_of_nodes = tuple(row(c.assignment, n) for n in nodes)
        hosted = tuple(k for k, n in enumerate(nodes) if id(n) in c.assignment.hosted)
        points.append(SavedPoint(c.time, c.memory, rows_of_nodes, outputs, c.simulated, hosted))
    return Strategies(types=tuple(map(type_text, types)), rows=tuple(rows), points=tuple(points))


def candidates(graph: PCG, axes: tuple[Axis, ...], record: Strategies) -> tuple[Candidate, ...]:
    """Return the candidates that `strategies` recorded for a graph with the same hash. Raises Misfit if they do not fit it."""
    types = tuple(map(type_of, record.types))
    for k, type_ in enumerate(types):
        if len(type_) != len(axes):
            raise Misfit(f"expected a state for each of the machine's {len(axes)} axes", f".types[{k}]")
    result = []
    for k, point in enumerate(record.points):
        with at(f".points[{k}]"):
            try:
                result.append(_candidate(graph, axes, types, record.rows, point))
            except (IndexError, ValueError) as error:  # a number that no row or type has; lists of different lengths
                raise Misfit(f"it does not fit the graph: {error}") from None
    return tuple(result)


def _candidate(graph: PCG, axes: tuple[Axis, ...], types: Sequence[Type], rows: Sequence[TypeRow], point: SavedPoint) -> Candidate:
    nodes, graphs = _nodes(graph), list(graph.graphs())
    described = [(n, rows[k]) for n, k in zip(nodes, point.nodes, strict=True)]
    following = {id(m) for n in nodes if n.kind in THROUGH and n.inside is not None for m in (n, *n.inside.inputs)}
    if any(len(row.results) != len(n.tensors) and (row.results or id(n) not in following) for n, row in described):
        raise Misfit("it does not fit the graph: a node has fewer types than results, or more")
    results = {id(n): tuple(types[t] for t in row.results) for n, row in described if row.results}
    operands = {
        (id(n), p): tuple(types[t] for t in through)
        for n, row in described
        for p, through in zip(range(len(n.operands)), row.operands, strict=True)
    }
    outputs = {
        (id(g), k): tuple(types[t] for t in row)
        for g, outputs_of_graph in zip(graphs, point.outputs, strict=True)
        for k, row in zip(range(len(g.outputs)), outputs_of_graph, strict=True)
    }
    again = frozenset((id(n), p) for n, row in described for p in row.again)
    if not again <= operands.keys():
        raise Misfit("it does not fit the graph: an operand that is gathered again does not exist")
    recomputed, rerun = (frozenset(id(n) for n, row in described if row.rerun == wanted) for wanted in (1, 2))
    hosted = frozenset(id(nodes[k]) for k in point.hosted)
    if any(nodes[k].kind != "input" for k in point.hosted):
        raise Misfit("it does not fit the graph: a node with an optimizer's state on the host is no argument")
    assignment = Assignment(axes, results, operands, outputs, again, recomputed, rerun, hosted)
    return Candidate(point.time, point.memory, assignment, point.simulated)


def _nodes(graph: PCG) -> list[Node]:
    return [node for node, _ in graph.walk()]
