"""A graph as data for the page: positions of its operators and edges, their colours, and descriptions.

Texts and descriptions are interned, since the layers of a model are alike.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unity.base.formatting import pattern, short, size
from unity.diff.placements import WHOLE, type_in_words
from unity.diff.skeleton import is_parallelization
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.user_lines import line_behind
from unity.pcg.parallel.traffic import TRAFFIC
from unity.pcg.types.parallel_type import local_shape, show
from unity.report.drawing import Drawing, DrawnLeaf
from unity.report.layout import lay_out
from unity.search.memory.memory import local

COLOURS = 8  # colours of placements; rarer placements share one more
Rows = list[tuple[str, str]]  # a description: terms with texts
Description = Callable[[Node], Rows]  # returns the description of a node


@dataclass
class Interned:
    """An intern table: values that a page contains once and refers to by number, in the order of their first use."""

    numbers: dict[str, int] = field(default_factory=dict)

    def of(self, value: Any) -> int:
        """Return the number of a value."""
        return self.numbers.setdefault(json.dumps(value, separators=(",", ":")), len(self.numbers))

    def data(self) -> list[Any]:
        """Return all values, by number."""
        return [json.loads(text) for text in self.numbers]


@dataclass(frozen=True)
class Legend:
    """The colour of each placement, by its words, the most frequent first."""

    colours: Mapping[str, int]

    def of(self, node: Node, graph: PCG) -> int:
        """Return the colour of a node, or -1 if every device holds the whole result."""
        placement = placement_of(node, graph)
        return -1 if placement == WHOLE else self.colours.get(placement, COLOURS)

    def data(self) -> list[str]:
        """Return the meaning of each colour."""
        return list(self.colours)


def legend_of(graph: PCG) -> Legend:
    """Return the colours of a parallel graph."""
    counts: Counter[str] = Counter()
    for g in graph.graphs():
        counts.update(placement_of(n, g) for n in g.nodes if not is_parallelization(n))
    del counts[WHOLE]
    return Legend({placement: k for k, (placement, _) in enumerate(counts.most_common(COLOURS))})


def placement_of(node: Node, graph: PCG) -> str:
    """Return the placement of a node's first result, in words."""
    return type_in_words(node.types[0], graph.axes) if node.types else WHOLE


def picture(
    drawing: Drawing, graph: PCG, interned: Interned, legend: Legend, keys: Mapping[int, int], describe: Description
) -> dict[str, Any]:
    """Return a graph as data.

    Args:
        drawing: the graph's drawing.
        graph: the graph.
        interned: the texts of the page.
        legend: the colours.
        keys: the numbers of nodes, by identity. Matched nodes of several pictures have the same number.
        describe: describes a node.
    """
    titles = [leaf_texts(leaf) for leaf in drawing.leaves]
    layout = lay_out(drawing, lambda k: _size(drawing.leaves[k], titles[k]))
    nodes = []
    for k, (leaf, (x, y)) in enumerate(zip(drawing.leaves, layout.corners, strict=True)):
        width, height = _size(leaf, titles[k])
        colour = legend.of(leaf.node, leaf.graph) if leaf.node is not None else -1
        key = keys[id(leaf.node)] if leaf.node is not None else -len(drawing.leaves) + k  # results are the last leaves
        description = interned.of(_description(leaf, describe))
        texts = [interned.of(text) for text in titles[k]]
        nodes.append([round(x), round(y), round(width), round(height), *texts, _shape(leaf), colour, key, description])
    frames = zip(layout.frames[1:], drawing.boxes[1:], strict=True)
    edges = [[r.source, list(r.targets), [round(n) for point in r.points for n in point]] for r in layout.routes]
    return {
        "size": [round(layout.frames[0].width), round(layout.frames[0].height)],
        "nodes": nodes,
        "boxes": [[round(n) for n in (f.x, f.y, f.width, f.height)] + [interned.of(b.title)] for f, b in frames],
        "edges": edges,
        "folded": _is_folded(drawing, graph),
    }


def _is_folded(drawing: Drawing, graph: PCG) -> bool:
    """Return whether the graph has more operators than are drawn."""
    drawn = sum(leaf.node is not None and leaf.node.kind != "input" for leaf in drawing.leaves)
    return drawn < sum(1 for n, _ in graph.walk() if n.kind != "input" and n.inside is None)


def leaf_texts(leaf: DrawnLeaf) -> tuple[str, str]:
    """Return the texts on a leaf: its name, and below it its result's tensor."""
    node = leaf.node
    if node is None:
        return leaf.title, ""
    if node.kind == "input":
        name = node.name or "input"
        return _short(pattern(name) if leaf.times > 1 else name), ""
    return node.kind, "" if is_parallelization(node) else str(node.tensors[0]) if node.tensors else ""


def _short(name: str) -> str:
    """Return the end of an argument's path: `layers.3.up` for `args[0]['layers'][3]['up']`."""
    parts = re.findall(r"[^\[\]'\".]+", name)
    text = ".".join(parts[2:][-3:]) if len(parts) > 2 else name
    return text if len(text) <= 24 else "…" + text[-23:]


def _size(leaf: DrawnLeaf, texts: tuple[str, str]) -> tuple[float, float]:
    width = max(56.0, 22.0 + 6.8 * max(len(texts[0]), 0.9 * len(texts[1])))
    return width, 38.0 if texts[1] else 24.0


def _shape(leaf: DrawnLeaf) -> str:
    """Return the shape of a leaf: an argument, an operator, a parallelization operator that communicates or does not, a result."""
    node = leaf.node
    if node is None:
        return "result"
    if node.kind == "input":
        return "input"
    if not is_parallelization(node):
        return "operator"
    return "sends" if any(TRAFFIC.get(node.kind, ())) else "quiet"


def _description(leaf: DrawnLeaf, describe: Description) -> Rows:
    node, graph = leaf.node, leaf.graph
    if node is None:
        return [("", "What the function gives.")]
    stands_for = [("stands for", f"{leaf.times} that are alike")] if leaf.times > 1 else []
    name = node.name
    argument = [("argument", pattern(name) if leaf.times > 1 else name)] if name else []
    program = node.body or node.outline
    computed = [("computes", ", ".join(dict.fromkeys(program.primitives)))] if program and not is_parallelization(node) else []
    line = short(node.source) or (line_behind(node) if is_parallelization(node) else "")
    return [*argument, *stands_for, *computed, *_results(node, graph), *([("line", line)] if line else []), *describe(node)]


def _results(node: Node, graph: PCG) -> Rows:
    rows: Rows = []
    several = len(node.tensors) > 1
    for v in node.results[:4]:
        name = f"result {v.index}" if several else "result"
        rows.append((name, str(v.tensor)))
        if node.types:
            rows += _placement_rows(v, graph)
    if len(node.results) > 4:
        rows.append(("", f"and {len(node.results) - 4} more results"))
    return rows


def _placement_rows(v: Value, graph: PCG) -> Rows:
    piece = "×".join(map(str, local_shape(v.tensor.shape, v.type, graph.axes))) or "a number"
    return [
        ("held as", f"{show(v.type, graph.axes, v.tensor.ndim)}"),
        ("", type_in_words(v.type, graph.axes)),
        ("on a device", f"{piece}, {size(local(v, graph))}"),
    ]
