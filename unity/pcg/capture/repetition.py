"""Repetition: layers that are written out one after the other, found again.

Two nodes are alike if they compute the same (kind, body, tensors, what is inside), whatever their operands are called. A graph's
nodes in order are a word over these letters; a run of equal segments in which operands are wired alike is a repeated layer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unity.pcg.ir.graph import PCG, Node, Value

LONGEST = 2048  # operators in one segment
ALIKE = 16  # equal operators in one segment


@dataclass(frozen=True, eq=False)
class Repeated:
    """Equal segments that follow each other. Corresponding operators have the same position in every segment."""

    segments: tuple[tuple[Node, ...], ...]

    @property
    def times(self) -> int:
        return len(self.segments)

    @property
    def operators(self) -> int:
        return len(self.segments[0])

    def __str__(self) -> str:
        return f"{self.times} × {self.operators} operators"


def repeated(graph: PCG) -> tuple[Repeated, ...]:
    """Maximal runs of equal segments of a graph, in order; they do not overlap. What covers most is chosen first.

    The work is proportional to the number of nodes times that of the distances at which many nodes have their like.
    """
    word = _Word(_late(graph))
    found: list[tuple[int, int, int]] = []  # start, period, times
    for period in word.periods():
        for start, end in word.agreements(period):
            times = (end - start) // period + 1
            if times >= 2:
                found.append((start, period, times))
    found.sort(key=lambda run: (-run[1] * run[2], run[1], run[0]))
    taken = [False] * len(word.nodes)
    chosen = []
    for start, period, times in found:
        for first, count in _free(taken, start, period, times):
            taken[first : first + period * count] = [True] * (period * count)
            chosen.append((first, period, count))
    return tuple(
        Repeated(tuple(tuple(word.nodes[start + k * period : start + (k + 1) * period]) for k in range(times)))
        for start, period, times in sorted(chosen, key=lambda run: run[0])
    )


def _late(graph: PCG) -> list[Node]:
    """Operators in an order in which a layer's follow each other: each as late as its users allow.

    What several layers share and is made of inputs alone (a mask, a table of positions) comes first.
    """
    shared: set[int] = set()
    for n in graph.nodes:
        made = n.kind in ("input", "constant") or (len(graph.users[id(n)]) > 1 and any(v.node.kind == "input" for v in n.operands))
        if made and all(id(v.node) in shared for v in n.operands):
            shared.add(id(n))
    steps: dict[int, int] = {}  # longest way to the end
    for n in reversed(graph.nodes):
        after = [steps[id(user)] + 1 for user, _ in graph.users[id(n)]]
        steps[id(n)] = max(after, default=0)
    operators = [n for n in graph.nodes if n.kind not in ("input", "constant")]
    return sorted(operators, key=lambda n: (id(n) not in shared, -steps[id(n)], signature(n)))


class _Word:
    """Nodes in order, and their letters."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.number = {id(n): i for i, n in enumerate(nodes)}
        self.letters = [signature(n) for n in nodes]

    def periods(self) -> list[int]:
        """Distances at which many letters are followed by their like: as many, at least, as one segment has."""
        last: dict[str, deque[int]] = {}
        found: Counter[int] = Counter()
        for i, letter in enumerate(self.letters):
            places = last.setdefault(letter, deque(maxlen=ALIKE))
            found.update(i - j for j in places if i - j <= LONGEST)
            places.append(i)
        return sorted(p for p, count in found.items() if count >= p > 1)

    def agreements(self, period: int) -> Iterator[tuple[int, int]]:
        """Maximal ranges in which every node is like the one a period later."""
        start = -1
        for i in range(len(self.nodes) - period):
            alike = self.letters[i] == self.letters[i + period]
            if start >= 0 and not (alike and self.wired_alike(i, period, start)):
                yield start, i
                start = -1
            if alike and start < 0:
                start = i
        if start >= 0:
            yield start, len(self.nodes) - period

    def wired_alike(self, i: int, period: int, start: int) -> bool:
        """Whether operands lie equally far back, are one shared value, or come from outside of the run."""
        pairs = zip(self.nodes[i].operands, self.nodes[i + period].operands, strict=True)
        return all(a == b or self.same(a, b, period, start) for a, b in pairs)

    def same(self, a: Value, b: Value, period: int, start: int) -> bool:
        x, y = self.number.get(id(a.node), -1), self.number.get(id(b.node), -1)
        if x < start:  # given to the first segment from outside; an input is one to all segments
            return a.tensor == b.tensor and (x >= 0 or y < 0)
        return y - x == period and a.index == b.index


def signature(node: Node) -> str:
    """What a node computes, whatever it computes it from."""
    attributes = sorted((k, v) for k, v in node.attributes.items() if k != "name")
    program = node.body or node.outline
    body, inside = program.key if program else "", node.inside.key if node.inside is not None else ""
    return f"{node.kind} {attributes!r} {[str(t) for t in node.tensors]} {node.types!r} {body} {inside}"


def _free(taken: Sequence[bool], start: int, period: int, times: int) -> Iterator[tuple[int, int]]:
    """The parts of a run, as (start, times), of which nothing is taken yet and which still repeat."""
    count, first = 0, start
    for k in range(times):
        here = start + k * period
        if any(taken[here : here + period]):
            if count >= 2:
                yield first, count
            count, first = 0, here + period
        else:
            count += 1
    if count >= 2:
        yield first, count
