"""Graphs as compact JSON data, in which equal nodes, as in the layers of a model, share their content.

The content of a node is its data without its operands. Each distinct content is written once. A node is a row: the number of its
content, and its operands, each the number of a node, or a pair of that and the number of the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import asdict

from unity.base.documents import Misfit, Natural, Record, at, encoded, plain, typed
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.ir.graph_json import (
    SCHEMA,
    NodeContent,
    Reference,
    Schema,
    assembled,
    check_mark,
    content_of,
    keyed,
    node_of,
    skeleton,
    values,
)
from unity.pcg.types.axis import Axis

MARK = "folded graph"
Row = tuple[int | Reference, ...]  # without bounds: msgspec 0.22 confuses those of a number with the length of a pair


class FoldedContent(NodeContent):
    """A node without its operands. The contents of its nested graph are separate."""

    inside: FoldedGraph | None = None


class GraphRows(Record):
    """A graph whose nodes refer to contents."""

    axes: tuple[Axis, ...]
    inputs: Natural
    nodes: tuple[Row, ...]
    outputs: tuple[Reference, ...]


class FoldedGraph(GraphRows):
    """A graph with the contents of its nodes."""

    contents: tuple[FoldedContent, ...]


class FoldedDocument(FoldedGraph, tag_field="unity", tag=MARK):
    """A graph with its hash."""

    schema: Schema
    key: str


class KeyedRows(GraphRows):
    """One of several graphs."""

    key: str


class FoldedGraphs(Record, tag_field="unity", tag="folded graphs"):
    """Several graphs that share the contents of their nodes."""

    contents: tuple[FoldedContent, ...]
    graphs: tuple[KeyedRows, ...]


def fold(graph: PCG) -> dict[str, Any]:
    """Convert a graph to data for `json.dumps`."""
    return plain(folded(graph))


def unfold(data: Any) -> PCG:
    """Read a graph from the data of `fold`, with the same key. Raises PlanFileError for anything else."""
    check_mark(data, MARK)
    return unfolded(typed(data, FoldedDocument))


def folded(graph: PCG) -> FoldedDocument:
    """Convert a graph to its compact form."""
    return FoldedDocument(**asdict(_folded(graph)), schema=SCHEMA, key=graph.key)


def folded_all(graphs: Iterable[PCG]) -> FoldedGraphs:
    """Convert several graphs to a compact form in which they share the contents of their nodes."""
    contents = _Contents()
    rows = tuple(KeyedRows(**asdict(contents.rows(graph)), key=graph.key) for graph in graphs)
    return FoldedGraphs(tuple(contents.every), rows)


def unfolded(document: FoldedDocument) -> PCG:
    """Return the graph that `folded` converted. Raises Misfit for any other document."""
    return keyed(_unfolded(document, document.contents), document.key)


def unfolded_all(document: FoldedGraphs) -> tuple[PCG, ...]:
    """Return the graphs that `folded_all` converted. Raises Misfit for any other document."""
    graphs = list[PCG]()
    for k, rows in enumerate(document.graphs):
        with at(f".graphs[{k}]"):
            graphs.append(keyed(_unfolded(rows, document.contents), rows.key))
    return tuple(graphs)


class _Contents:
    """Distinct contents of nodes, in the order of first appearance."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self.every: list[FoldedContent] = []

    def rows(self, graph: PCG) -> GraphRows:
        """Return a graph whose nodes refer to these contents, to which new ones are added."""
        axes, inputs, references, outputs = skeleton(graph)
        nodes = tuple(
            (self.of(node), *(number if index == 0 else (number, index) for number, index in operands))
            for node, operands in zip(graph.nodes, references, strict=True)
        )
        return GraphRows(axes, inputs, nodes, outputs)

    def of(self, node: Node) -> int:
        """Return the number of a node's content."""
        inside = None if node.inside is None else _folded(node.inside)
        content = FoldedContent(**content_of(node), inside=inside)
        number = self.numbers.setdefault(encoded(content), len(self.every))
        if number == len(self.every):
            self.every.append(content)
        return number


def _folded(graph: PCG) -> FoldedGraph:
    contents = _Contents()
    rows = contents.rows(graph)
    return FoldedGraph(**asdict(rows), contents=tuple(contents.every))


def _unfolded(graph: GraphRows, contents: Sequence[FoldedContent]) -> PCG:
    nodes = list[Node]()
    for k, (number, *reads) in enumerate(graph.nodes):
        with at(f".nodes[{k}]"):
            if not isinstance(number, int) or not 0 <= number < len(contents):
                raise Misfit(f"there is no content {number}")
            operands = values([(r, 0) if isinstance(r, int) else r for r in reads], nodes)
        with at(f".contents[{number}]"):
            content = contents[number]
            with at(".inside"):
                inside = None if content.inside is None else _unfolded(content.inside, content.inside.contents)
            nodes.append(node_of(content, operands, inside, len(graph.axes)))
    return assembled(graph.axes, graph.inputs, nodes, graph.outputs)
