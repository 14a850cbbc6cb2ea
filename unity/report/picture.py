"""A graph as data for the page: where its operators and edges are drawn, their colours, and what is said of each.

Texts and descriptions are written once, in `Shared`, and named by number: layers of a model are alike.
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
from unity.report.drawing import Drawing, Leaf
from unity.report.layout import lay_out
from unity.search.memory.memory import local

COLOURS = 8  # of parallelizations; those that are rarer share one more
Rows = list[tuple[str, str]]  # what is said: term and text
Said = Callable[[Node], Rows]


@dataclass
class Shared:
    """Values that are written once: numbers are given in the order of their first use."""

    numbers: dict[str, int] = field(default_factory=dict)

    def of(self, value: Any) -> int:
        """The number of a value."""
        return self.numbers.setdefault(json.dumps(value, separators=(",", ":")), len(self.numbers))

    def data(self) -> list[Any]:
        """All values, by number."""
        return [json.loads(text) for text in self.numbers]


@dataclass(frozen=True)
class Legend:
    """Which parallelization has which colour, the most frequent first."""

    colours: Mapping[str, int]

    def of(self, node: Node, graph: PCG) -> int:
        """The colour of a node: -1 where every device holds the whole result."""
        said = held(node, graph)
        return -1 if said == WHOLE else self.colours.get(said, COLOURS)

    def data(self) -> list[str]:
        """What each colour means."""
        return list(self.colours)


def legend_of(graph: PCG) -> Legend:
    """The colours of a parallel graph."""
    often: Counter[str] = Counter()
    for inner in graphs(graph):
        often.update(held(n, inner) for n in inner.nodes if not is_parallelization(n))
    del often[WHOLE]
    return Legend({said: k for k, (said, _) in enumerate(often.most_common(COLOURS))})


def graphs(graph: PCG) -> list[PCG]:
    """A graph, and all inside of it."""
    return [graph, *(g for node in graph.nodes if node.inside is not None for g in graphs(node.inside))]


def held(node: Node, graph: PCG) -> str:
    """How devices hold a node's first result, in words."""
    return type_in_words(node.types[0], graph.axes) if node.types else WHOLE


def picture(drawing: Drawing, graph: PCG, shared: Shared, legend: Legend, keys: Mapping[int, int], said: Said) -> dict[str, Any]:
    """A graph as data. `keys`: numbers of nodes, by identity, that stay what they are from one picture to the next."""
    titles = [title(leaf) for leaf in drawing.leaves]
    layout = lay_out(drawing, lambda k: _size(drawing.leaves[k], titles[k]))
    nodes = []
    for k, (leaf, (x, y)) in enumerate(zip(drawing.leaves, layout.corners, strict=True)):
        width, height = _size(leaf, titles[k])
        colour = legend.of(leaf.node, leaf.graph) if leaf.node is not None else -1
        key = keys[id(leaf.node)] if leaf.node is not None else -len(drawing.leaves) + k  # results are the last leaves
        told = shared.of(_described(leaf, said))
        texts = [shared.of(text) for text in titles[k]]
        nodes.append([round(x), round(y), round(width), round(height), *texts, _look(leaf), colour, key, told])
    frames = zip(layout.frames[1:], drawing.boxes[1:], strict=True)
    edges = [[r.source, list(r.targets), [round(n) for point in r.points for n in point]] for r in layout.routes]
    return {
        "size": [round(layout.frames[0].width), round(layout.frames[0].height)],
        "nodes": nodes,
        "boxes": [[round(n) for n in (f.x, f.y, f.width, f.height)] + [shared.of(b.title)] for f, b in frames],
        "edges": edges,
        "folded": _folded(drawing, graph),
    }


def _folded(drawing: Drawing, graph: PCG) -> bool:
    """Whether there is more in the graph than is drawn."""
    drawn = sum(leaf.node is not None and leaf.node.kind != "input" for leaf in drawing.leaves)
    return drawn < sum(1 for n, _ in graph.walk() if n.kind != "input" and n.inside is None)


def title(leaf: Leaf) -> tuple[str, str]:
    """What is written on a leaf: its name, and below it what it makes."""
    node = leaf.node
    if node is None:
        return leaf.title, ""
    if node.kind == "input":
        name = str(node.attributes.get("name", "input"))
        return _short(pattern(name) if leaf.times > 1 else name), ""
    return node.kind, "" if is_parallelization(node) else str(node.tensors[0]) if node.tensors else ""


def _short(name: str) -> str:
    """The end of an argument's name: `layers.3.up` of `args[0]['layers'][3]['up']`."""
    parts = re.findall(r"[^\[\]'\".]+", name)
    said = ".".join(parts[2:][-3:]) if len(parts) > 2 else name
    return said if len(said) <= 24 else "…" + said[-23:]


def _size(leaf: Leaf, texts: tuple[str, str]) -> tuple[float, float]:
    width = max(56.0, 22.0 + 6.8 * max(len(texts[0]), 0.9 * len(texts[1])))
    return width, 38.0 if texts[1] else 24.0


def _look(leaf: Leaf) -> str:
    """The shape: an argument, an operator, a change of type that sends or does not, a result."""
    node = leaf.node
    if node is None:
        return "result"
    if node.kind == "input":
        return "input"
    if not is_parallelization(node):
        return "operator"
    return "sends" if any(TRAFFIC.get(node.kind, ())) else "quiet"


def _described(leaf: Leaf, said: Said) -> Rows:
    node, graph = leaf.node, leaf.graph
    if node is None:
        return [("", "What the function gives.")]
    times = [("stands for", f"{leaf.times} that are alike")] if leaf.times > 1 else []
    name = str(node.attributes.get("name", "")) if node.kind == "input" else ""
    named = [("argument", pattern(name) if leaf.times > 1 else name)] if name else []
    program = node.body or node.outline
    computed = [("computes", ", ".join(dict.fromkeys(program.primitives)))] if program and not is_parallelization(node) else []
    line = short(node.source) or (line_behind(node) if is_parallelization(node) else "")
    return [*named, *times, *computed, *_results(node, graph), *([("line", line)] if line else []), *said(node)]


def _results(node: Node, graph: PCG) -> Rows:
    found: Rows = []
    many = len(node.tensors) > 1
    for v in node.results[:4]:
        name = f"result {v.index}" if many else "result"
        found.append((name, str(v.tensor)))
        if node.types:
            found += _held_as(v, graph)
    if len(node.results) > 4:
        found.append(("", f"and {len(node.results) - 4} more results"))
    return found


def _held_as(v: Value, graph: PCG) -> Rows:
    piece = "×".join(map(str, local_shape(v.tensor.shape, v.type, graph.axes))) or "a number"
    return [
        ("held as", f"{show(v.type, graph.axes, v.tensor.ndim)}"),
        ("", type_in_words(v.type, graph.axes)),
        ("on a device", f"{piece}, {size(local(v, graph))}"),
    ]
