"""Graphs in Graphviz' DOT language: colours for parallel types, boxes for scans and remats."""

from __future__ import annotations

from collections.abc import Iterator

from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.pcg.ir.payloads import LoopPayload
from unity.pcg.types.parallel_type import show

CHANGES = {  # warm colours communicate, cool ones do not
    "partition": "#cfe8ff", "replicate": "#dcd6f7", "view": "#eeeeee", "combine": "#ffd59e", "reduce": "#ffadad",
    "reduce_partition": "#ffc6ff", "combine_replicate": "#fdffb6", "combine_partition": "#ffcfd2",
    "contribute": "#c7f0ee", "unreplicate": "#e8e4f8",
}  # fmt: skip
PALETTE = ("#b7e4c7", "#a8dadc", "#e9edc9", "#d8e2dc", "#c5dedd", "#f1faee", "#bee1e6", "#dbe7e4")
SERIAL = "#ffffff"
Names = dict[Value, str]


def to_dot(graph: PCG) -> str:
    """Return the graph in the DOT language. Operators with results of one type have one colour."""
    colours: dict[str, str] = {}
    lines = ["digraph pcg {", "  rankdir=TB; node [shape=box, style=filled, fontname=Helvetica, fontsize=10];"]
    lines += _lines(graph, "n", "  ", colours)
    return "\n".join([*lines, "}"]) + "\n"


def _lines(graph: PCG, prefix: str, indent: str, colours: dict[str, str]) -> Iterator[str]:
    """Iterate over the lines of a graph's nodes and edges."""
    names: Names = {}
    for k, node in enumerate(graph.nodes):
        name = f"{prefix}{k}"
        if node.inside is None:
            names.update(dict.fromkeys(node.results, name))
            shape = ", shape=ellipse" if node.kind == "input" else ""
            yield f'{indent}{name} [label="{escaped(label(node, graph))}", fillcolor="{_colour(node, graph, colours)}"{shape}];'
        else:
            yield from _box(node, name, names, indent, colours)
        yield from (f"{indent}{names[v]} -> {name};" for v in node.operands if node.inside is None)
    for k, v in enumerate(graph.outputs):
        yield f'{indent}{prefix}out{k} [label="result {k}", shape=ellipse, fillcolor="{SERIAL}"];'
        yield f"{indent}{names[v]} -> {prefix}out{k};"


def _box(node: Node, name: str, names: Names, indent: str, colours: dict[str, str]) -> Iterator[str]:
    """Iterate over the lines of a node with a graph inside, in a box. Its results are those of the inner graph."""
    assert node.inside is not None
    times = f" × {node.payload.length}" if isinstance(node.payload, LoopPayload) else ""
    yield f'{indent}subgraph cluster_{name} {{ label="{escaped(node.kind + times)}"; style=dashed;'
    yield from _lines(node.inside, f"{name}_", indent + "  ", colours)
    yield f"{indent}}}"
    inner = {id(n): k for k, n in enumerate(node.inside.nodes)}
    pairs = zip(node.operands, node.inside.inputs, strict=True)
    yield from (f"{indent}{names[v]} -> {name}_{inner[id(n)]};" for v, n in pairs)
    names.update((v, f"{name}_out{k}") for k, v in enumerate(node.results))


def label(node: Node, graph: PCG) -> str:
    """Return the label of a node: its kind, or an argument's name, and its results with their types."""
    what = node.name or node.kind
    tensors = [f"{v.tensor}{' ' + show(v.type, graph.axes, v.tensor.ndim) if node.types else ''}" for v in node.results]
    return "\n".join([what, *tensors])


def _colour(node: Node, graph: PCG, colours: dict[str, str]) -> str:
    if node.kind in PARALLELIZATION:
        return CHANGES[node.kind]
    if not node.types:
        return SERIAL
    shown = show(node.types[0], graph.axes, node.tensors[0].ndim)
    return colours.setdefault(shown, PALETTE[len(colours) % len(PALETTE)])


def escaped(text: str) -> str:
    """Escape text for a string of the DOT language."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
