"""The layout of a drawing: boxes from the inside out, the contents of each laid out as one level (`level_layout.py`).

An edge that crosses a box's border goes through a port: at the top for a value that enters the box, at the bottom for a value that
leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from unity.diff.skeleton import is_parallelization
from unity.report.drawing import OUTSIDE, SOURCES, Drawing
from unity.report.level_layout import ItemRank, LevelEdge, LevelItem, LevelLayout, Point, level_layout

PAD, TITLE = 14.0, 24.0  # around a box's content, above it
Size = tuple[float, float]


class EndKind(Enum):
    """The kinds of ends of an edge: a leaf, the port of a box for a value that enters, the port for a value that leaves."""

    LEAF = "leaf"
    IN = "in"
    OUT = "out"


class LevelEnd(NamedTuple):
    """An end of an edge within a level: a leaf, or a port of a box for the value of a leaf."""

    kind: EndKind
    box: int  # -1 for a leaf
    leaf: int


@dataclass(frozen=True)
class BoxFrame:
    """The position and the size of a box."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Route:
    """The points of one piece of the edges from a leaf to some of its readers."""

    source: int
    targets: tuple[int, ...]
    points: tuple[Point, ...]


@dataclass(frozen=True)
class PictureLayout:
    """The upper left corners of leaves, the frames of boxes (the first is the picture), and the routes of edges."""

    corners: tuple[Point, ...]
    frames: tuple[BoxFrame, ...]
    routes: tuple[Route, ...]


def lay_out(drawing: Drawing, size: Callable[[int], Size]) -> PictureLayout:
    """Return the layout of a drawing. `size` returns the size of a leaf, by number."""
    boxes = _Boxes(drawing, [size(k) for k in range(len(drawing.leaves))])
    boxes.measure(OUTSIDE)
    boxes.put(OUTSIDE, 0.0, 0.0)
    corners = tuple(boxes.corners[k] for k in range(len(drawing.leaves)))
    return PictureLayout(corners, tuple(boxes.frames[k] for k in range(len(drawing.boxes))), tuple(boxes.routes))


class _Boxes:
    """Lays out boxes: `measure` from the inside out, then `put` from the outside in."""

    def __init__(self, drawing: Drawing, sizes: Sequence[Size]) -> None:
        self.drawing, self.sizes = drawing, sizes
        # By level, each edge with its readers.
        self.edges: list[dict[tuple[LevelEnd, LevelEnd], dict[int, None]]] = [{} for _ in drawing.boxes]
        self.ends: list[dict[LevelEnd, None]] = [{} for _ in drawing.boxes]  # the ports of each box
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
        self.layouts: dict[int, LevelLayout] = {}
        self.order: dict[int, list[LevelEnd | int]] = {}  # by level: leaves and ports as ends, boxes as numbers
        self.level_edges: dict[int, dict[LevelEdge, list[tuple[LevelEnd, LevelEnd]]]] = {}
        self.corners: dict[int, Point] = {}
        self.frames: dict[int, BoxFrame] = {}
        self.routes: list[Route] = []

    def edge(self, source: int, target: int) -> None:
        source_path, target_path = (self.drawing.path(self.drawing.leaves[k].box) for k in (source, target))
        common = 0
        while common < min(len(source_path), len(target_path)) and source_path[common] == target_path[common]:
            common += 1
        start = self.way_out(source, source_path[:common], target)
        level = source_path[common - 1] if common else OUTSIDE
        for box in target_path[common:]:
            end = LevelEnd(EndKind.IN, box, source)
            self.add(level, start, end, target)
            self.ends[box][end] = None
            level, start = box, end
        self.add(level, start, LevelEnd(EndKind.LEAF, -1, target), target)

    def way_out(self, source: int, until: tuple[int, ...], target: int | None) -> LevelEnd:
        """Add the edges from a leaf through the borders of its boxes, except the outermost ones `until`; return the last end."""
        path, start = self.drawing.path(self.drawing.leaves[source].box), LevelEnd(EndKind.LEAF, -1, source)
        for box in reversed(path[len(until) :]):
            end = LevelEnd(EndKind.OUT, box, source)
            self.add(box, start, end, target)
            self.ends[box][end] = None
            start = end
        return start

    def add(self, level: int, start: LevelEnd, end: LevelEnd, target: int | None) -> None:
        readers = self.edges[level].setdefault((start, end), {})
        if target is not None:
            readers[target] = None

    def measure(self, box: int) -> None:
        """Lay out the contents of a box, boxes inside of it first."""
        for inner in self.inner[box]:
            self.measure(inner)
        order: list[LevelEnd | int] = [
            *self.ends[box],
            *(LevelEnd(EndKind.LEAF, -1, k) for k in self.leaves[box]),
            *self.inner[box],
        ]
        number = {end: k for k, end in enumerate(order)}
        items = [self.item(end) for end in order]
        level_edges: dict[LevelEdge, list[tuple[LevelEnd, LevelEnd]]] = {}
        for start, end in self.edges[box]:
            (a, leaves), (b, enters) = (self.side(box, e, number) for e in (start, end))
            if a != b:
                level_edges.setdefault(LevelEdge(a, b, leaves, enters), []).append((start, end))
        self.order[box], self.level_edges[box] = order, level_edges
        self.layouts[box] = level_layout(items, level_edges)

    def item(self, end: LevelEnd | int) -> LevelItem:
        if not isinstance(end, LevelEnd):
            layout = self.layouts[end]
            return LevelItem(layout.width + 2 * PAD, layout.height + 2 * PAD + TITLE)
        if end.kind is EndKind.LEAF:
            return LevelItem(*self.sizes[end.leaf], ItemRank.LATE if self.is_late(end.leaf) else ItemRank.ANY)
        return LevelItem(4.0, 0.0, ItemRank.FIRST if end.kind is EndKind.IN else ItemRank.LAST)

    def is_late(self, leaf: int) -> bool:
        """Return whether a leaf is an argument, perhaps after parallelization operators, which is drawn where it is read."""
        node = self.drawing.leaves[leaf].node
        while node is not None and is_parallelization(node):
            node = node.operands[0].node
        return node is not None and node.kind in SOURCES

    def side(self, level: int, end: LevelEnd, number: dict[LevelEnd | int, int]) -> tuple[int, float]:
        """Return the item that an edge ends at, and the offset from its middle."""
        if end.kind is EndKind.LEAF or end.box == level:
            return number[end], 0.0
        inner = self.layouts[end.box]
        x = inner.corners[self.order[end.box].index(end)][0] + 2.0
        return number[end.box], round(x - inner.width / 2, 3)

    def put(self, box: int, x: float, y: float) -> None:
        """Move the contents of a box to the box's position. `x` and `y` are the corner of the contents."""
        layout, border = self.layouts[box], box != OUTSIDE
        top = y - border * (PAD + TITLE)
        self.frames[box] = BoxFrame(
            x - border * PAD, top, layout.width + 2 * border * PAD, layout.height + border * (2 * PAD + TITLE)
        )
        for end, (dx, dy) in zip(self.order[box], layout.corners, strict=True):
            if not isinstance(end, LevelEnd):
                self.put(end, x + dx + PAD, y + dy + PAD + TITLE)
            elif end.kind is EndKind.LEAF:
                self.corners[end.leaf] = (x + dx, y + dy)
        bottom = top + self.frames[box].height
        for edge, pairs in self.level_edges[box].items():
            points = [(x + px, y + py) for px, py in layout.routes[edge]]
            for start, end in pairs:
                route_points = [*([(points[0][0], top)] if start.kind is EndKind.IN and start.box == box else []), *points]
                route_points += [(points[-1][0], bottom)] if end.kind is EndKind.OUT and end.box == box else []
                self.routes.append(Route(start.leaf, tuple(self.edges[box][start, end]), tuple(route_points)))
