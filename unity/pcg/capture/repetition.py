"""Detection of repeated layers in a graph that lists them one after the other.

Two nodes are alike if they compute the same function: kind, body, tensors and nested graph agree, whatever their operands are. The
nodes of a graph, in order, are a word over these signatures as letters; a run of equal segments of the word whose operands
correspond is a repeated layer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unity.pcg.ir.graph import PCG, Node, Value

LONGEST = 2048  # the maximal number of operators in one segment
ALIKE = 16  # the maximal number of equal operators in one segment


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
    """Return disjoint maximal runs of equal segments of a graph, in order. Greedy: runs of most operators are chosen first.

    The work is proportional to the number of nodes times the number of distances at which many nodes are alike.
    """
    word = _Word(_as_late_as_possible(graph))
    candidates: list[tuple[int, int, int]] = []  # start, period, times
    for period in word.periods():
        for start, end in word.agreements(period):
            times = (end - start) // period + 1
            if times >= 2:
                candidates.append((start, period, times))
    candidates.sort(key=lambda run: (-run[1] * run[2], run[1], run[0]))
    covered = [False] * len(word.nodes)
    chosen = []
    for start, period, times in candidates:
        for first, count in _uncovered(covered, start, period, times):
            covered[first : first + period * count] = [True] * (period * count)
            chosen.append((first, period, count))
    return tuple(
        Repeated(tuple(tuple(word.nodes[start + k * period : start + (k + 1) * period]) for k in range(times)))
        for start, period, times in sorted(chosen, key=lambda run: run[0])
    )


def _as_late_as_possible(graph: PCG) -> list[Node]:
    """Return the operators, each as late as its users allow, so that those of one layer follow each other.

    Values that several layers share and that depend on inputs alone (a mask, a table of positions) come first.
    """
    shared: set[int] = set()
    for n in graph.nodes:
        is_leaf = n.kind in ("input", "constant")
        is_shared = len(graph.users[id(n)]) > 1 and any(v.node.kind == "input" for v in n.operands)
        if (is_leaf or is_shared) and all(id(v.node) in shared for v in n.operands):
            shared.add(id(n))
    steps: dict[int, int] = {}  # the length of the longest path to an output
    for n in reversed(graph.nodes):
        after = [steps[id(user)] + 1 for user, _ in graph.users[id(n)]]
        steps[id(n)] = max(after, default=0)
    operators = [n for n in graph.nodes if n.kind not in ("input", "constant")]
    return sorted(operators, key=lambda n: (id(n) not in shared, -steps[id(n)], signature(n)))


class _Word:
    """The operators of a graph in order, each with its signature as a letter."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.number = {id(n): i for i, n in enumerate(nodes)}
        self.letters = [signature(n) for n in nodes]

    def periods(self) -> list[int]:
        """Return the distances at which at least one segment's number of letters recur."""
        last: dict[str, deque[int]] = {}
        recurrences: Counter[int] = Counter()
        for i, letter in enumerate(self.letters):
            places = last.setdefault(letter, deque(maxlen=ALIKE))
            recurrences.update(i - j for j in places if i - j <= LONGEST)
            places.append(i)
        return sorted(p for p, count in recurrences.items() if count >= p > 1)

    def agreements(self, period: int) -> Iterator[tuple[int, int]]:
        """Yield the maximal ranges in which every node is like the one a period later, with corresponding operands."""
        start = -1
        for i in range(len(self.nodes) - period):
            alike = self.letters[i] == self.letters[i + period]
            if start >= 0 and not (alike and self.has_corresponding_operands(i, period, start)):
                yield start, i
                start = -1
            if alike and start < 0:
                start = i
        if start >= 0:
            yield start, len(self.nodes) - period

    def has_corresponding_operands(self, i: int, period: int, start: int) -> bool:
        """Return whether the operands of two nodes a period apart are one period apart, too, or shared, or from outside."""
        pairs = zip(self.nodes[i].operands, self.nodes[i + period].operands, strict=True)
        return all(a == b or self.corresponds(a, b, period, start) for a, b in pairs)

    def corresponds(self, a: Value, b: Value, period: int, start: int) -> bool:
        """Return whether `b` is a value one period after `a`, or `a` comes from before the run at `start`."""
        x, y = self.number.get(id(a.node), -1), self.number.get(id(b.node), -1)
        if x < start:  # an operand of the first segment from outside; an input must be an input for all segments
            return a.tensor == b.tensor and (x >= 0 or y < 0)
        return y - x == period and a.index == b.index


def signature(node: Node) -> str:
    """Return a key of the function that a node computes, independent of its operands."""
    attributes = sorted((k, v) for k, v in node.attributes.items() if k != "name")
    program = node.body or node.outline
    body, inside = program.key if program else "", node.inside.key if node.inside is not None else ""
    return f"{node.kind} {attributes!r} {[str(t) for t in node.tensors]} {node.types!r} {body} {inside}"


def _uncovered(covered: Sequence[bool], start: int, period: int, times: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a run, as (start, times), that repeat and that no other run covers."""
    count, first = 0, start
    for k in range(times):
        here = start + k * period
        if any(covered[here : here + period]):
            if count >= 2:
                yield first, count
            count, first = 0, here + period
        else:
            count += 1
    if count >= 2:
        yield first, count
