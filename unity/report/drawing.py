"""What is drawn of a graph: its operators, boxes around scans, remats and layers that repeat, and what reads what.

A layer that repeats is drawn once (`unity.pcg.capture.repetition`): its first operators stand for those of the others, and its
weights for theirs. So are arguments of one kind that one operator reads."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from unity.base.formatting import pattern
from unity.diff.skeleton import is_parallelization
from unity.pcg.capture.repetition import repeated
from unity.pcg.ir.graph import LOOPS, PCG, PIPELINE, Node, Value
from unity.pcg.parallel.stages import schedule_of

OUTSIDE = 0  # the box that is the picture
SOURCES = ("input", "constant")


@dataclass(frozen=True, eq=False)
class Leaf:
    """An operator, an argument, or (without a node) a result. `times`: how many it stands for."""

    node: Node | None
    graph: PCG
    box: int
    times: int
    title: str = ""


@dataclass(frozen=True)
class Box:
    """A frame around leaves and other boxes, and what is written on it. `layer`: it stands for several, with their weights."""

    parent: int
    title: str
    layer: bool = False


@dataclass(frozen=True)
class Drawing:
    """Leaves and boxes by number, edges between leaves; `carried`: what of a box its next repetition reads: (leaf, box).

    `places`: the leaf of every node, by identity, also of those that another one stands for.
    """

    leaves: tuple[Leaf, ...]
    boxes: tuple[Box, ...]
    edges: tuple[tuple[int, int], ...]
    carried: tuple[tuple[int, int], ...]
    places: Mapping[int, int]

    def path(self, box: int) -> tuple[int, ...]:
        """The boxes around a box and the box itself, outermost first, the picture left out."""
        found: list[int] = []
        while box != OUTSIDE:
            found.append(box)
            box = self.boxes[box].parent
        return tuple(reversed(found))


def drawing_of(graph: PCG, fold: bool) -> Drawing:
    """The drawing of a graph; `fold`: layers that repeat are drawn once."""
    pen = _Pen(fold)
    pen.draw(graph, OUTSIDE, 1, None)
    for k, v in enumerate(graph.outputs):
        title = "result" if len(graph.outputs) == 1 else f"result {k}"
        pen.leaf(Leaf(None, graph, OUTSIDE, 1, title), (v,))
    reads = [*pen.reads, *((leaf, v) for w, v in pen.others if (leaf := pen.maker(w)) is not None)]
    edges = {(source, leaf): None for leaf, v in reads if (source := pen.maker(v)) is not None}
    carried = {(source, box): None for v, box in pen.again if (source := pen.maker(v)) is not None and pen.lies_in(source, box)}
    places = {id(n): leaf for n, _ in graph.walk() if n.inside is None and (leaf := pen.maker(Value(n))) is not None}
    return _with_sources_inside(Drawing(tuple(pen.leaves), tuple(pen.boxes), tuple(edges), tuple(carried), places))


class _Pen:
    """Draws graphs, outer ones first. What reads what is settled at the end, when all that is drawn is known."""

    def __init__(self, fold: bool) -> None:
        self.fold = fold
        self.leaves: list[Leaf] = []
        self.boxes = [Box(OUTSIDE, "")]
        self.made: dict[Value, int] = {}  # the leaf that draws what makes a value
        self.same: dict[Value, Value] = {}  # values that are others, drawn elsewhere
        self.reads: list[tuple[int, Value]] = []
        self.again: list[tuple[Value, int]] = []  # what the next repetition of a box reads
        self.others: list[tuple[Value, Value]] = []  # what stands for a reader, and what the reader reads

    def draw(self, graph: PCG, box: int, times: int, given: Sequence[Value] | None) -> None:
        """`given`: what a graph's inputs are, if it is inside of another."""
        folds = _Folds(graph, given is None) if self.fold else NOTHING
        if given is not None:
            self.same.update(zip(map(Value, graph.inputs), given, strict=True))
        frames = {run: self.frame(box, f"{count} × the same", True) for run, count in folds.times.items()}
        for node in graph.nodes:
            run, _ = folds.place(node)
            first = folds.instead.get(id(node), node)
            if first is not node:
                self.same.update(zip(node.results, first.results, strict=True))
                if run is not None:
                    self.repeated(folds, node, first, frames[run])
            elif given is None or node.kind != "input":
                self.one(node, graph, box if run is None else frames[run], times * folds.often.get(id(node), 1))

    def one(self, node: Node, graph: PCG, box: int, times: int) -> None:
        if node.inside is None:
            return self.leaf(Leaf(node, graph, box, times), node.operands)
        frame = self.frame(box, _around(node))
        self.draw(node.inside, frame, times, node.operands)
        self.same.update(zip(node.results, node.inside.outputs, strict=True))
        if node.kind in LOOPS:
            self.again += [(v, frame) for v in node.inside.outputs[: int(node.attributes.get("carry", 0))]]
        return None

    def leaf(self, leaf: Leaf, operands: Iterable[Value]) -> None:
        number = len(self.leaves)
        self.leaves.append(leaf)
        if leaf.node is not None:
            self.made.update(dict.fromkeys(leaf.node.results, number))
        self.reads += [(number, v) for v in operands]

    def repeated(self, folds: _Folds, node: Node, first: Node, frame: int) -> None:
        """What another repetition reads of the one before it, or of something that it alone reads."""
        run, segment = folds.place(node)
        for v in node.operands:
            where, other = folds.place(v.node)
            if where == run and other != segment:
                self.again.append((v, frame))
            elif where != run and v.node.kind not in SOURCES and first.inside is None:
                self.others.append((Value(first), v))

    def maker(self, v: Value) -> int | None:
        """The leaf that draws what makes a value."""
        while v in self.same:
            v = self.same[v]
        return self.made.get(v)

    def lies_in(self, leaf: int, box: int) -> bool:
        around = self.leaves[leaf].box
        while around not in (box, OUTSIDE):
            around = self.boxes[around].parent
        return around == box

    def frame(self, parent: int, title: str, layer: bool = False) -> int:
        self.boxes.append(Box(parent, title, layer))
        return len(self.boxes) - 1


def _around(node: Node) -> str:
    """What is written on the box of a node with a graph inside."""
    if node.kind == PIPELINE:
        s = schedule_of(node)
        return f"pipeline, {s.stages} stages, {s.micro_batches} micro-batches"
    return f"{node.kind}, {node.attributes['length']} steps" if "length" in node.attributes else node.kind


class _Folds:
    """The layers of a graph that repeat, and which node stands for which."""

    def __init__(self, graph: PCG | None, outer: bool = False) -> None:
        runs = repeated(graph) if graph is not None else ()
        self.times = {r: run.times for r, run in enumerate(runs)}
        self.where = {id(n): (r, k) for r, run in enumerate(runs) for k, segment in enumerate(run.segments) for n in segment}
        self.instead: dict[int, Node] = {}
        for run in runs:
            for segment in run.segments[1:]:
                for node, first in zip(segment, run.segments[0], strict=True):
                    self.instead[id(node)] = first
                    self.sources(graph, node, first)
        if graph is not None and outer:
            own = {id(n) for n in graph.inputs}
            for node in graph.nodes:
                self.alike(graph, node, own)
        self.often: dict[int, int] = {}  # how many a drawn node stands for
        for node in self.instead.values():
            self.often[id(node)] = self.often.get(id(node), 1) + 1

    def sources(self, graph: PCG | None, node: Node, first: Node) -> None:
        """An argument that only one repetition reads is drawn as that of the first."""
        for v, w in zip(node.operands, first.operands, strict=True):
            both = v.node.kind in SOURCES and w.node.kind in SOURCES and v.node is not w.node
            if both and graph and all(self.place(user)[1] > 0 for user, _ in graph.users[id(v.node)]):
                self.instead.setdefault(id(v.node), w.node)

    def alike(self, graph: PCG, node: Node, own: Collection[int]) -> None:
        """Arguments that a node alone reads, in the same way, as a stack of all layers' weights does, are drawn as the first."""
        found: dict[Hashable, list[Node]] = {}
        for v in node.operands if id(node) not in self.instead else ():
            chain = _chain(graph, v.node, own)
            if chain and not any(id(n) in self.instead for n in chain):
                key = tuple((n.kind, n.types, str(n.tensors), pattern(str(n.attributes.get("name", "")))) for n in chain)
                for n, first in zip(chain, found.setdefault(key, chain), strict=True):
                    if n is not first:
                        self.instead[id(n)] = first

    def place(self, node: Node) -> tuple[int | None, int]:
        """The run and the segment of a node."""
        return self.where.get(id(node), (None, 0))


def _chain(graph: PCG, node: Node, own: Collection[int]) -> list[Node]:
    """A node, if it is an argument that is read once, or a change of type of such a one, and all up to that; else nothing."""
    found = [node]
    while is_parallelization(found[-1]) and len(graph.users[id(found[-1])]) == 1:
        found.append(found[-1].operands[0].node)
    last = found[-1]
    return found if id(last) in own and len(graph.users[id(last)]) == 1 else []


NOTHING = _Folds(None)  # repeats


def _with_sources_inside(drawing: Drawing) -> Drawing:
    """Arguments and constants in the innermost layer around all that read them."""
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
