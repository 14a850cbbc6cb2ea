"""The layout of one level of a picture: items in ranks from top to bottom, each below the items that it reads (Sugiyama's method).

Ranks follow from longest paths, the order within a rank from barycenters, and positions from least squares. Within a rank, the
positions closest to the desired ones, in a fixed order and at minimum distances, are an isotonic regression, which pooling of
adjacent violators solves exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate, pairwise

import networkx as nx

GAP, DROP = 16.0, 30.0  # between items of a rank, between ranks
SWEEPS = 6
STRAIGHT = 8.0  # the weight of the place that an edge has in a rank that it crosses; an item has weight 1
Point = tuple[float, float]


class ItemRank(Enum):
    """The ranks in which an item may be: any, the first, the last, or as low as the item's readers allow."""

    ANY = "any"
    FIRST = "first"
    LAST = "last"
    LATE = "late"


@dataclass(frozen=True)
class LevelItem:
    """An item to place: its size, and the ranks in which it may be."""

    width: float
    height: float
    rank: ItemRank = ItemRank.ANY


@dataclass(frozen=True)
class LevelEdge:
    """An edge between two items, by number. Each end has an offset from the middle of its item."""

    source: int
    target: int
    leaves: float = 0.0
    enters: float = 0.0


@dataclass(frozen=True)
class LevelLayout:
    """The upper left corner of every item, the points that each edge goes through, and the size of the level."""

    corners: tuple[Point, ...]
    routes: Mapping[LevelEdge, tuple[Point, ...]]
    width: float
    height: float


def level_layout(items: Sequence[LevelItem], edges: Collection[LevelEdge]) -> LevelLayout:
    """Return a layout in which no items overlap and every edge points down. The edges must not form a cycle."""
    level = _Level(items, edges)
    level.order()
    level.straighten()
    return level.placed()


def ranks(items: Sequence[LevelItem], edges: Collection[LevelEdge]) -> list[int]:
    """Return the number of every item's rank: below all items that it reads, and for a late item as low as its readers allow."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(items)))
    graph.add_edges_from((k.source, k.target) for k in edges)
    base = int(any(i.rank is ItemRank.FIRST for i in items))
    rank_of = [0 if i.rank is ItemRank.FIRST else base for i in items]
    order = list(nx.lexicographical_topological_sort(graph))
    for v in order:
        rank_of[v] = max([rank_of[v], *(rank_of[u] + 1 for u in graph.predecessors(v))])
    for v in reversed(order):
        if items[v].rank is ItemRank.LATE and graph.out_degree(v):
            rank_of[v] = max(rank_of[v], min(rank_of[t] for t in graph.successors(v)) - 1)
    last = 1 + max((r for r, i in zip(rank_of, items, strict=True) if i.rank is not ItemRank.LAST), default=-1)
    return [last if i.rank is ItemRank.LAST else r for r, i in zip(rank_of, items, strict=True)]


def closest_positions(desired: Sequence[float], weights: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Return the positions closest to the desired ones in weighted squares, in order and at minimum distances.

    Args:
        desired: the desired positions.
        weights: the weight of each.
        gaps: the minimum distance of each position from the one before it.
    """
    offsets = list(accumulate(gaps))
    pools: list[tuple[float, float, int]] = []  # mean, weight, count
    for position, weight, offset in zip(desired, weights, offsets, strict=True):
        mean, count = position - offset, 1
        while pools and pools[-1][0] >= mean:
            m, w, n = pools.pop()
            mean, weight, count = (m * w + mean * weight) / (w + weight), w + weight, n + count
        pools.append((mean, weight, count))
    means = [mean for mean, _, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


class _Level:
    """The vertices of a level: the items, and after them the places that edges keep free in the ranks that they cross.

    Edges that leave one place share these places.
    """

    def __init__(self, items: Sequence[LevelItem], edges: Collection[LevelEdge]) -> None:
        self.items, self.edges = items, edges
        self.rank = ranks(items, edges)
        self.width = [i.width for i in items]
        self.above: list[list[tuple[int, float]]] = [[] for _ in items]  # neighbours one rank up, with their offset to the right
        self.below: list[list[tuple[int, float]]] = [[] for _ in items]
        self.chains: dict[tuple[int, float], list[int]] = {}
        for edge in edges:
            self.connect(edge)
        self.rows: list[list[int]] = [[] for _ in range(max(self.rank, default=-1) + 1)]
        for v, r in enumerate(self.rank):
            self.rows[r].append(v)
        self.x = [0.0] * len(self.rank)

    def connect(self, edge: LevelEdge) -> None:
        chain = self.chains.setdefault((edge.source, edge.leaves), [])
        while self.rank[edge.source] + len(chain) + 1 < self.rank[edge.target]:
            chain.append(len(self.rank))
            self.rank.append(self.rank[edge.source] + len(chain))
            self.width.append(2.0)
            self.above.append([])
            self.below.append([])
            self.join(chain[-2] if len(chain) > 1 else edge.source, chain[-1], edge.leaves if len(chain) == 1 else 0.0)
        between = self.through(edge)
        self.join(between[-1] if between else edge.source, edge.target, (0.0 if between else edge.leaves) - edge.enters)

    def through(self, edge: LevelEdge) -> list[int]:
        """Return the vertices of an edge between its ends."""
        return self.chains[edge.source, edge.leaves][: self.rank[edge.target] - self.rank[edge.source] - 1]

    def join(self, upper: int, lower: int, right: float) -> None:
        """Connect two vertices. `right` is the desired offset of the lower one from the middle of the upper one."""
        self.below[upper].append((lower, -right))
        self.above[lower].append((upper, right))

    def order(self) -> None:
        """Sort every rank by the barycenters of neighbours, alternating downwards and upwards."""
        for row in self.rows:
            self.pack_row(row)
        for k in range(SWEEPS):
            neighbours, rows = (self.above, self.rows[1:]) if k % 2 == 0 else (self.below, self.rows[-2::-1])
            for row in rows:
                row.sort(key=lambda v: self.mean(neighbours[v], self.x[v]))
                self.pack_row(row)
        for row in self.rows[1:]:
            row.sort(key=lambda v: self.mean(self.above[v], self.x[v]))
            self.pack_row(row)

    def mean(self, neighbours: Sequence[tuple[int, float]], default: float) -> float:
        return sum(self.x[v] + right for v, right in neighbours) / len(neighbours) if neighbours else default

    def pack_row(self, row: Sequence[int]) -> None:
        """Place the vertices of a row side by side, centred at zero."""
        at = list(accumulate(self.gaps(row)))
        for v, x in zip(row, at, strict=True):
            self.x[v] = x - (at[0] + at[-1]) / 2

    def gaps(self, row: Sequence[int]) -> list[float]:
        """Return the minimum distance of each vertex's middle from that of the one before it."""
        return [0.0, *((self.width[a] + self.width[b]) / 2 + GAP for a, b in pairwise(row))]

    def straighten(self) -> None:
        """Move every vertex towards its neighbours, rank by rank, alternating downwards and upwards."""
        both = [[*up, *down] for up, down in zip(self.above, self.below, strict=True)]
        for k in range(SWEEPS + 2):
            neighbours, rows = (self.above, self.rows) if k % 2 == 0 else (self.below, self.rows[::-1])
            self.settle(rows, neighbours)
        for k in range(SWEEPS):
            self.settle(self.rows if k % 2 == 0 else self.rows[::-1], both)

    def settle(self, rows: Sequence[Sequence[int]], neighbours: Sequence[Sequence[tuple[int, float]]]) -> None:
        for row in rows:
            desired = [self.mean(neighbours[v], self.x[v]) for v in row]
            weights = [(STRAIGHT if v >= len(self.items) else 1.0) if neighbours[v] else 0.1 for v in row]
            for v, x in zip(row, closest_positions(desired, weights, self.gaps(row)), strict=True):
                self.x[v] = x

    def placed(self) -> LevelLayout:
        heights = [max((self.items[v].height for v in row if v < len(self.items)), default=0.0) for row in self.rows]
        tops = list(accumulate((h + DROP for h in heights), initial=0.0))
        left = min((x - w / 2 for x, w in zip(self.x, self.width, strict=True)), default=0.0)
        right = max((x + w / 2 for x, w in zip(self.x, self.width, strict=True)), default=0.0)
        x = [x - left for x in self.x]

        def top(v: int) -> float:
            r = self.rank[v]
            return tops[r] + (heights[r] - self.items[v].height) / 2

        corners = tuple((x[v] - i.width / 2, top(v)) for v, i in enumerate(self.items))
        routes = {}
        for edge in self.edges:
            s, t = edge.source, edge.target
            ranks = [(x[v], self.rank[v]) for v in self.through(edge)]
            inner = [(at, y) for at, r in ranks for y in (tops[r], tops[r] + heights[r])]
            start, end = (x[s] + edge.leaves, top(s) + self.items[s].height), (x[t] + edge.enters, top(t))
            routes[edge] = smoothed((start, *inner, end))
        return LevelLayout(corners, routes, right - left, tops[-1] - DROP if self.rows else 0.0)


def smoothed(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return points without those that lie on a vertical line between their neighbours."""
    kept_points = [points[0]]
    for k in range(1, len(points) - 1):
        if not abs(kept_points[-1][0] - points[k][0]) < 0.5 > abs(points[k][0] - points[k + 1][0]):
            kept_points.append(points[k])
    return (*kept_points, points[-1])
