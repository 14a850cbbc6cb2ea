"""One level of a picture: items in ranks from top to bottom, each below what it reads (Sugiyama's method).

Ranks by longest paths, orders by barycenters, positions by least squares: in a rank, the positions nearest to what neighbours ask
for that keep order and distance are an isotonic regression, which pooling finds exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import networkx as nx

GAP, DROP = 16.0, 30.0  # between items of a rank, between ranks
SWEEPS = 6
STRAIGHT = 8.0  # what an edge's own place in a rank counts, of what an item's does
Point = tuple[float, float]


@dataclass(frozen=True)
class Item:
    """What is placed: its size, and where it must be: among the first, among the last, or just above what reads it."""

    width: float
    height: float
    place: str = ""  # "first", "last", "late"


@dataclass(frozen=True)
class Link:
    """From one item, by number, to another; each end with how far from its item's middle it is."""

    source: int
    target: int
    leaves: float = 0.0
    enters: float = 0.0


@dataclass(frozen=True)
class Placed:
    """The left upper corner of every item, the points that each link goes through, and the size of the whole."""

    corners: tuple[Point, ...]
    routes: Mapping[Link, tuple[Point, ...]]
    width: float
    height: float


def place(items: Sequence[Item], links: Collection[Link]) -> Placed:
    """Places items so that none overlap and every link goes down. Links must not go in a circle."""
    level = _Level(items, links)
    level.order()
    level.straighten()
    return level.placed()


def ranks(items: Sequence[Item], links: Collection[Link]) -> list[int]:
    """The rank of every item: below all that it reads; items that want to be late as low as their readers allow."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(items)))
    graph.add_edges_from((k.source, k.target) for k in links)
    base = int(any(i.place == "first" for i in items))
    found = [0 if i.place == "first" else base for i in items]
    order = list(nx.lexicographical_topological_sort(graph))
    for v in order:
        found[v] = max([found[v], *(found[u] + 1 for u in graph.predecessors(v))])
    for v in reversed(order):
        if items[v].place == "late" and graph.out_degree(v):
            found[v] = max(found[v], min(found[t] for t in graph.successors(v)) - 1)
    last = 1 + max((r for r, i in zip(found, items, strict=True) if i.place != "last"), default=-1)
    return [last if i.place == "last" else r for r, i in zip(found, items, strict=True)]


def spread(wanted: Sequence[float], weights: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """The positions nearest to those that are wanted (weighted squares), in order, each at least `gaps[k]` after the one before."""
    offsets = list(accumulate(gaps))
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for want, weight, offset in zip(wanted, weights, offsets, strict=True):
        mean, count = want - offset, 1
        while pools and pools[-1][0] >= mean:
            m, w, n = pools.pop()
            mean, weight, count = (m * w + mean * weight) / (w + weight), w + weight, n + count
        pools.append((mean, weight, count))
    means = [mean for mean, _, count in pools for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]


class _Level:
    """Vertices are items, and after them places that links keep free in the ranks that they go through.

    Links that leave one place share what they keep free.
    """

    def __init__(self, items: Sequence[Item], links: Collection[Link]) -> None:
        self.items, self.links = items, links
        self.rank = ranks(items, links)
        self.width = [i.width for i in items]
        self.above: list[list[tuple[int, float]]] = [[] for _ in items]  # neighbours one rank up: which, and how far to the right
        self.below: list[list[tuple[int, float]]] = [[] for _ in items]
        self.chains: dict[tuple[int, float], list[int]] = {}
        for link in links:
            self.connect(link)
        self.rows: list[list[int]] = [[] for _ in range(max(self.rank, default=-1) + 1)]
        for v, r in enumerate(self.rank):
            self.rows[r].append(v)
        self.x = [0.0] * len(self.rank)

    def connect(self, link: Link) -> None:
        chain = self.chains.setdefault((link.source, link.leaves), [])
        while self.rank[link.source] + len(chain) + 1 < self.rank[link.target]:
            chain.append(len(self.rank))
            self.rank.append(self.rank[link.source] + len(chain))
            self.width.append(2.0)
            self.above.append([])
            self.below.append([])
            self.join(chain[-2] if len(chain) > 1 else link.source, chain[-1], link.leaves if len(chain) == 1 else 0.0)
        between = self.through(link)
        self.join(between[-1] if between else link.source, link.target, (0.0 if between else link.leaves) - link.enters)

    def through(self, link: Link) -> list[int]:
        """The vertices of a link between its ends."""
        return self.chains[link.source, link.leaves][: self.rank[link.target] - self.rank[link.source] - 1]

    def join(self, upper: int, lower: int, right: float) -> None:
        """`right`: how far to the right of the upper one's middle the lower one's should be."""
        self.below[upper].append((lower, -right))
        self.above[lower].append((upper, right))

    def order(self) -> None:
        """Sorts every rank by where the neighbours are, downwards and upwards in turns."""
        self.pack()
        for k in range(SWEEPS):
            near, rows = (self.above, self.rows[1:]) if k % 2 == 0 else (self.below, self.rows[-2::-1])
            for row in rows:
                row.sort(key=lambda v: self.mean(near[v], self.x[v]))
                self.pack_row(row)
        for row in self.rows[1:]:
            row.sort(key=lambda v: self.mean(self.above[v], self.x[v]))
            self.pack_row(row)

    def mean(self, near: Sequence[tuple[int, float]], otherwise: float) -> float:
        return sum(self.x[v] + right for v, right in near) / len(near) if near else otherwise

    def pack(self) -> None:
        for row in self.rows:
            self.pack_row(row)

    def pack_row(self, row: Sequence[int]) -> None:
        """One beside the other, the row's middle at zero."""
        at = list(accumulate(self.gaps(row)))
        for v, x in zip(row, at, strict=True):
            self.x[v] = x - (at[0] + at[-1]) / 2

    def gaps(self, row: Sequence[int]) -> list[float]:
        """From each one's middle to that of the one before it, at least."""
        return [0.0, *((self.width[a] + self.width[b]) / 2 + GAP for a, b in pairwise(row))]

    def straighten(self) -> None:
        """Moves everything towards its neighbours, rank by rank, downwards and upwards in turns."""
        both = [[*up, *down] for up, down in zip(self.above, self.below, strict=True)]
        for k in range(SWEEPS + 2):
            near, rows = (self.above, self.rows) if k % 2 == 0 else (self.below, self.rows[::-1])
            self.settle(rows, near)
        for k in range(SWEEPS):
            self.settle(self.rows if k % 2 == 0 else self.rows[::-1], both)

    def settle(self, rows: Sequence[Sequence[int]], near: Sequence[Sequence[tuple[int, float]]]) -> None:
        for row in rows:
            wanted = [self.mean(near[v], self.x[v]) for v in row]
            weights = [(STRAIGHT if v >= len(self.items) else 1.0) if near[v] else 0.1 for v in row]
            for v, x in zip(row, spread(wanted, weights, self.gaps(row)), strict=True):
                self.x[v] = x

    def placed(self) -> Placed:
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
        for link in self.links:
            s, t = link.source, link.target
            ranks = [(x[v], self.rank[v]) for v in self.through(link)]
            inner = [(at, y) for at, r in ranks for y in (tops[r], tops[r] + heights[r])]
            start, end = (x[s] + link.leaves, top(s) + self.items[s].height), (x[t] + link.enters, top(t))
            routes[link] = smoothed((start, *inner, end))
        return Placed(corners, routes, right - left, tops[-1] - DROP if self.rows else 0.0)


def smoothed(points: Sequence[Point]) -> tuple[Point, ...]:
    """Points without those on a vertical line between their neighbours."""
    found = [points[0]]
    for k in range(1, len(points) - 1):
        if not abs(found[-1][0] - points[k][0]) < 0.5 > abs(points[k][0] - points[k + 1][0]):
            found.append(points[k])
    return (*found, points[-1])
