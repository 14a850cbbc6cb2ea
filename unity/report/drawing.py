"""The drawing of a graph: leaves for operators, boxes for nested graphs and repeated layers, and edges.

A repeated layer is drawn once (`unity.pcg.capture.repetition`): the operators and weights of its first repetition stand for those
of the others. Equal arguments that one operator reads are drawn once, too.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from unity.base.formatting import pattern
from unity.diff.skeleton import is_parallelization
from unity.pcg.capture.repetition import repeated
from unity.pcg.ir.graph import PCG, PIPELINE, Node, Value
from unity.pcg.ir.payloads import LoopPayload
from unity.pcg.parallel.stages import schedule_of

OUTSIDE = 0  # the box that is the picture
SOURCES = ("input", "constant")


@dataclass(frozen=True, eq=False)
class DrawnLeaf:
    """A leaf: an operator, an argument, or (without a node) a result. `times` is the number of nodes that it stands for."""

    node: Node | None
    graph: PCG
    box: int
    times: int
    title: str = ""


@dataclass(frozen=True)
class Box:
    """A frame around leaves and other boxes, with a title. `layer` is true if it stands for several equal layers."""

    parent: int
    title: str
    layer: bool = False


@dataclass(frozen=True)
class Drawing:
    """Leaves and boxes by number, and the edges between leaves.

    Attributes:
        leaves: the leaves.
        boxes: the boxes; the first is the whole picture.
        edges: pairs of leaves.
        carried: pairs of a leaf and a box of which the next repetition reads the leaf's value.
        places: the leaf of every node, by identity. A node that another one stands for has the other's leaf.
    """

    leaves: tuple[DrawnLeaf, ...]
    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]
    carried: tuple[tuple[int, int], ...]
    places: Mapping[int, int]

    def path(self, box: int) -> tuple[int, ...]:
        """Return the boxes around a box and the box itself, outermost first, without the picture."""
        path: list[int] = []
        while box != OUTSIDE:
            path.append(box)
            box = self.boxes[box].parent
        return tuple(reversed(path))


def drawing_of(graph: PCG, fold: bool) -> Drawing:
    """Return the drawing of a graph. With `fold`, repeated layers are drawn once."""
    pen = _Pen(fold)
    pen.draw_graph(graph, OUTSIDE, 1, None)
    for k, v in enumerate(graph.outputs):
        title = "result" if len(graph.outputs) == 1 else f"result {k}"
        pen.add_leaf(DrawnLeaf(None, graph, OUTSIDE, 1, title), (v,))
    reads = [*pen.reads, *((leaf, v) for w, v in pen.stand_in_reads if (leaf := pen.producing_leaf(w)) is not None)]
    edges = {(source, leaf): None for leaf, v in reads if (source := pen.producing_leaf(v)) is not None}
    sources = [(pen.producing_leaf(v), box) for v, box in pen.carried_reads]
    carried = {(source, box): None for source, box in sources if source is not None and pen.is_in_box(source, box)}
    places = {id(n): leaf for n, _ in graph.walk() if n.inside is None and (leaf := pen.producing_leaf(Value(n))) is not None}
    return _with_sources_in_layers(Drawing(tuple(pen.leaves), tuple(pen.boxes), tuple(edges), tuple(carried), places))


class _Pen:
    """A pen that draws graphs, outer ones first. Edges are resolved at the end, when every leaf is known."""

    def __init__(self, fold: bool) -> None:
        self.fold = fold
        self.leaves: list[DrawnLeaf] = []
        self.boxes = [Box(OUTSIDE, "")]
        self.leaf_of: dict[Value, int] = {}  # the leaf of the node that computes a value
        self.replaced: dict[Value, Value] = {}  # values that are drawn as other values
        self.reads: list[tuple[int, Value]] = []
        self.carried_reads: list[tuple[Value, int]] = []  # values that the next repetition of a box reads
        # Pairs of the value that stands for a reader's result, and a value that the reader reads.
        self.stand_in_reads: list[tuple[Value, Value]] = []

    def draw_graph(self, graph: PCG, box: int, times: int, operands: Sequence[Value] | None) -> None:
        """Draw a graph into a box.

        Args:
            graph: the graph.
            box: the box.
            times: the number of nodes that each node of the graph stands for.
            operands: the values of a nested graph's inputs; None for the outermost graph.
        """
        folds = _Folds(graph, operands is None) if self.fold else NO_FOLDS
        if operands is not None:
            self.replaced.update(zip(map(Value, graph.inputs), operands, strict=True))
        boxes = {run: self.add_box(box, f"{count} × the same", True) for run, count in folds.times.items()}
        for node in graph.nodes:
            run, _ = folds.place(node)
            first = folds.stand_in.get(id(node), node)
            if first is not node:
                self.replaced.update(zip(node.results, first.results, strict=True))
                if run is not None:
                    self.add_repetition(folds, node, first, boxes[run])
            elif operands is None or node.kind != "input":
                self.draw_node(node, graph, box if run is None else boxes[run], times * folds.counts.get(id(node), 1))

    def draw_node(self, node: Node, graph: PCG, box: int, times: int) -> None:
        if node.inside is None:
            return self.add_leaf(DrawnLeaf(node, graph, box, times), node.operands)
        inner_box = self.add_box(box, _box_title(node))
        self.draw_graph(node.inside, inner_box, times, node.operands)
        self.replaced.update(zip(node.results, node.inside.outputs, strict=True))
        if isinstance(node.payload, LoopPayload):
            self.carried_reads += [(v, inner_box) for v in node.inside.outputs[: node.payload.carry]]
        return None

    def add_leaf(self, leaf: DrawnLeaf, operands: Iterable[Value]) -> None:
        number = len(self.leaves)
        self.leaves.append(leaf)
        if leaf.node is not None:
            self.leaf_of.update(dict.fromkeys(leaf.node.results, number))
        self.reads += [(number, v) for v in operands]

    def add_repetition(self, folds: _Folds, node: Node, first: Node, box: int) -> None:
        """Record the values that a further repetition reads of the previous one, or that only this repetition reads."""
        run, segment = folds.place(node)
        for v in node.operands:
            run_of_operand, segment_of_operand = folds.place(v.node)
            if run_of_operand == run and segment_of_operand != segment:
                self.carried_reads.append((v, box))
            elif run_of_operand != run and v.node.kind not in SOURCES and first.inside is None:
                self.stand_in_reads.append((Value(first), v))

    def producing_leaf(self, v: Value) -> int | None:
        """Return the leaf of the node that computes a value."""
        while v in self.replaced:
            v = self.replaced[v]
        return self.leaf_of.get(v)

    def is_in_box(self, leaf: int, box: int) -> bool:
        around = self.leaves[leaf].box
        while around not in (box, OUTSIDE):
            around = self.boxes[around].parent
        return around == box

    def add_box(self, parent: int, title: str, layer: bool = False) -> int:
        self.boxes.append(Box(parent, title, layer))
        return len(self.boxes) - 1


def _box_title(node: Node) -> str:
    """Return the title of the box of a node with a nested graph."""
    if node.kind == PIPELINE:
        s = schedule_of(node)
        return f"pipeline, {s.stages} stages, {s.micro_batches} micro-batches"
    return f"{node.kind}, {node.payload.length} steps" if isinstance(node.payload, LoopPayload) else node.kind


class _Folds:
    """The repeated layers of a graph, and the nodes that stand for others."""

    def __init__(self, graph: PCG | None, outer: bool = False) -> None:
        runs = repeated(graph) if graph is not None else ()
        self.times = {r: run.times for r, run in enumerate(runs)}
        self.where = {id(n): (r, k) for r, run in enumerate(runs) for k, segment in enumerate(run.segments) for n in segment}
        self.stand_in: dict[int, Node] = {}
        for run in runs:
            for segment in run.segments[1:]:
                for node, first in zip(segment, run.segments[0], strict=True):
                    self.stand_in[id(node)] = first
                    self.fold_sources(graph, node, first)
        if graph is not None and outer:
            inputs = {id(n) for n in graph.inputs}
            for node in graph.nodes:
                self.fold_equal_arguments(graph, node, inputs)
        self.counts: dict[int, int] = {}  # the number of nodes that a drawn node stands for
        for node in self.stand_in.values():
            self.counts[id(node)] = self.counts.get(id(node), 1) + 1

    def fold_sources(self, graph: PCG | None, node: Node, first: Node) -> None:
        """Draw an argument that only one repetition reads as that of the first repetition."""
        for v, w in zip(node.operands, first.operands, strict=True):
            are_sources = v.node.kind in SOURCES and w.node.kind in SOURCES and v.node is not w.node
            if are_sources and graph and all(self.place(user)[1] > 0 for user, _ in graph.users[id(v.node)]):
                self.stand_in.setdefault(id(v.node), w.node)

    def fold_equal_arguments(self, graph: PCG, node: Node, own: Collection[int]) -> None:
        """Draw equal arguments of one node, such as the weights of all layers that it stacks, as the first of them."""
        by_content: dict[Hashable, list[Node]] = {}
        for v in node.operands if id(node) not in self.stand_in else ():
            chain = _argument_chain(graph, v.node, own)
            if chain and not any(id(n) in self.stand_in for n in chain):
                key = tuple((n.kind, n.types, str(n.tensors), pattern(n.name)) for n in chain)
                for n, first in zip(chain, by_content.setdefault(key, chain), strict=True):
                    if n is not first:
                        self.stand_in[id(n)] = first

    def place(self, node: Node) -> tuple[int | None, int]:
        """Return a node's run of repeated segments, or None, and its segment."""
        return self.where.get(id(node), (None, 0))


def _argument_chain(graph: PCG, node: Node, own: Collection[int]) -> list[Node]:
    """Return a node, the parallelization operators before it, and the argument that they change, if each is read once; else []."""
    chain = [node]
    while is_parallelization(chain[-1]) and len(graph.users[id(chain[-1])]) == 1:
        chain.append(chain[-1].operands[0].node)
    last = chain[-1]
    return chain if id(last) in own and len(graph.users[id(last)]) == 1 else []


NO_FOLDS = _Folds(None)


def _with_sources_in_layers(drawing: Drawing) -> Drawing:
    """Return the drawing with arguments and constants moved into the innermost layer around all their readers."""
    readers: Mapping[int, list[int]] = {k: [] for k in range(len(drawing.leaves))}
    for source, target in drawing.edges:
        readers[source].append(target)
    leaves = list(drawing.leaves)
    for k, leaf in enumerate(leaves):
        if leaf.node is not None and leaf.node.kind in SOURCES and readers[k]:
            paths = [drawing.path(leaves[r].box) for r in readers[k]]
            shared = OUTSIDE
            for boxes in zip(*paths, strict=False):
                if len(set(boxes)) > 1 or not drawing.boxes[boxes[0]].layer:
                    break
                shared = boxes[0]
            leaves[k] = replace(leaf, box=shared)
    return replace(drawing, leaves=tuple(leaves))
