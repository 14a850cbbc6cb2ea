"""Where everything of a drawing goes: boxes are laid out from the inside out, each level by itself (`layers.py`).

An edge that crosses a box's border goes through a port in it: above for what is read from outside, below for what is read outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from unity.diff.skeleton import is_parallelization
from unity.report.drawing import OUTSIDE, SOURCES, Drawing
from unity.report.layers import Item, Link, Placed, Point, place

PAD, TITLE = 14.0, 24.0  # around a box's content, above it
Size = tuple[float, float]


class End(NamedTuple):
    """Where an edge ends in a level: at a leaf, or at a port of a box for what a leaf makes."""

    kind: str  # "leaf", "in", "out"
    box: int  # of a port; a leaf has none
    leaf: int


@dataclass(frozen=True)
class Frame:
    """A box as it lies."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Route:
    """A piece of the way of what a leaf makes, to some of its readers."""

    source: int
    targets: tuple[int, ...]
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Layout:
    """The left upper corners of leaves, frames of boxes (the first is the picture), and the ways of edges."""

    corners: tuple[Point, ...]
    frames: tuple[Frame, ...]
    routes: tuple[Route, ...]


def lay_out(drawing: Drawing, size: Callable[[int], Size]) -> Layout:
    """Lays a drawing out. `size`: of every leaf, by number."""
    found = _Boxes(drawing, [size(k) for k in range(len(drawing.leaves))])
    found.measure(OUTSIDE)
    found.put(OUTSIDE, 0.0, 0.0)
    corners = tuple(found.corners[k] for k in range(len(drawing.leaves)))
    return Layout(corners, tuple(found.frames[k] for k in range(len(drawing.boxes))), tuple(found.routes))


class _Boxes:
    def __init__(self, drawing: Drawing, sizes: Sequence[Size]) -> None:
        self.drawing, self.sizes = drawing, sizes
        self.edges: list[dict[tuple[End, End], dict[int, None]]] = [{} for _ in drawing.boxes]  # of each level, with their readers
        self.ends: list[dict[End, None]] = [{} for _ in drawing.boxes]  # ports of each box
        self.leaves: list[list[int]] = [[] for _ in drawing.boxes]
        self.inner: list[list[int]] = [[] for _ in drawing.boxes]
        for k, leaf in enumerate(drawing.leaves):
            self.leaves[leaf.box].append(k)
        for k, box in enumerate(drawing.boxes):
            if k != OUTSIDE:
                self.inner[box.parent].append(k)
        for source, target in drawing.edges:
            self.edge(source, target)
        for source, box in drawing.carried:
            self.way_out(source, drawing.path(box)[:-1], None)
        self.placed: dict[int, Placed] = {}
        self.order: dict[int, list[End | int]] = {}  # of each level: leaves and ports as ends, boxes as numbers
        self.linked: dict[int, dict[Link, list[tuple[End, End]]]] = {}
        self.corners: dict[int, Point] = {}
        self.frames: dict[int, Frame] = {}
        self.routes: list[Route] = []

    def edge(self, source: int, target: int) -> None:
        here, there = (self.drawing.path(self.drawing.leaves[k].box) for k in (source, target))
        common = 0
        while common < min(len(here), len(there)) and here[common] == there[common]:
            common += 1
        start = self.way_out(source, here[:common], target)
        level = here[common - 1] if common else OUTSIDE
        for box in there[common:]:
            end = End("in", box, source)
            self.add(level, start, end, target)
            self.ends[box][end] = None
            level, start = box, end
        self.add(level, start, End("leaf", -1, target), target)

    def way_out(self, source: int, until: tuple[int, ...], target: int | None) -> End:
        """Edges through the borders of a leaf's boxes but for the outermost `until`."""
        path, start = self.drawing.path(self.drawing.leaves[source].box), End("leaf", -1, source)
        for box in reversed(path[len(until) :]):
            end = End("out", box, source)
            self.add(box, start, end, target)
            self.ends[box][end] = None
            start = end
        return start

    def add(self, level: int, start: End, end: End, target: int | None) -> None:
        readers = self.edges[level].setdefault((start, end), {})
        if target is not None:
            readers[target] = None

    def measure(self, box: int) -> None:
        """Places what is in a box, boxes inside of it first."""
        for inner in self.inner[box]:
            self.measure(inner)
        order: list[End | int] = [*self.ends[box], *(End("leaf", -1, k) for k in self.leaves[box]), *self.inner[box]]
        number = {end: k for k, end in enumerate(order)}
        items = [self.item(end) for end in order]
        linked: dict[Link, list[tuple[End, End]]] = {}
        for start, end in self.edges[box]:
            (a, leaves), (b, enters) = (self.side(box, e, number) for e in (start, end))
            if a != b:
                linked.setdefault(Link(a, b, leaves, enters), []).append((start, end))
        self.order[box], self.linked[box] = order, linked
        self.placed[box] = place(items, linked)

    def item(self, end: End | int) -> Item:
        if not isinstance(end, End):
            placed = self.placed[end]
            return Item(placed.width + 2 * PAD, placed.height + 2 * PAD + TITLE)
        if end.kind == "leaf":
            return Item(*self.sizes[end.leaf], "late" if self.late(end.leaf) else "")
        return Item(4.0, 0.0, "first" if end.kind == "in" else "last")

    def late(self, leaf: int) -> bool:
        """Whether a leaf is an argument, or an argument held otherwise: it stands where it is read."""
        node = self.drawing.leaves[leaf].node
        while node is not None and is_parallelization(node):
            node = node.operands[0].node
        return node is not None and node.kind in SOURCES

    def side(self, level: int, end: End, number: dict[End | int, int]) -> tuple[int, float]:
        """The item that an edge ends at, and how far from its middle."""
        if end.kind == "leaf" or end.box == level:
            return number[end], 0.0
        inner = self.placed[end.box]
        x = inner.corners[self.order[end.box].index(end)][0] + 2.0
        return number[end.box], round(x - inner.width / 2, 3)

    def put(self, box: int, x: float, y: float) -> None:
        """Moves what is in a box to where the box lies; `x`, `y`: of its content."""
        placed, around = self.placed[box], box != OUTSIDE
        top = y - around * (PAD + TITLE)
        self.frames[box] = Frame(x - around * PAD, top, placed.width + 2 * around * PAD, placed.height + around * (2 * PAD + TITLE))
        for end, (dx, dy) in zip(self.order[box], placed.corners, strict=True):
            if not isinstance(end, End):
                self.put(end, x + dx + PAD, y + dy + PAD + TITLE)
            elif end.kind == "leaf":
                self.corners[end.leaf] = (x + dx, y + dy)
        bottom = top + self.frames[box].height
        for link, pairs in self.linked[box].items():
            points = [(x + px, y + py) for px, py in placed.routes[link]]
            for start, end in pairs:
                ways = [*([(points[0][0], top)] if start.kind == "in" and start.box == box else []), *points]
                ways += [(points[-1][0], bottom)] if end.kind == "out" and end.box == box else []
                self.routes.append(Route(start.leaf, tuple(self.edges[box][start, end]), tuple(ways)))
