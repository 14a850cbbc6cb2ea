"""Pairs of nodes of two graphs, found step by step: those whose labels are equal, and neighbours of those that are paired."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Mapping
from difflib import SequenceMatcher

from unity.diff.graphs.skeleton import Skeleton

MANY = 1024  # pairs of users of one value that are all looked at; where there are more, the first goes with the first

Label = Mapping[int, Hashable]
Vote = tuple[int, int, float]  # two nodes, and how much speaks for their being one


class Pairs:
    """A matching of two skeletons that grows: a node has at most one partner, and a pair is never given up."""

    def __init__(self, before: Skeleton, after: Skeleton) -> None:
        self.before, self.after = before, after
        self.partner: dict[int, int] = {}
        self.taken: set[int] = set()

    def free(self, i: int, j: int) -> bool:
        return i not in self.partner and j not in self.taken

    def join(self, i: int, j: int) -> None:
        self.partner[i] = j
        self.taken.add(j)

    def left(self, nodes: Iterable[int]) -> list[int]:
        """Those of the first graph that have no partner, in order."""
        return sorted(i for i in nodes if i not in self.partner)

    def right(self, nodes: Iterable[int]) -> list[int]:
        """Those of the second."""
        return sorted(j for j in nodes if j not in self.taken)

    def equal(self, before: Label, after: Label) -> None:
        """Pairs nodes with equal labels, the first with the first. What the labels leave out is not looked at."""
        waiting: dict[Hashable, list[int]] = {}
        for j in self.right(after):
            waiting.setdefault(after[j], []).append(j)
        queues = {label: iter(nodes) for label, nodes in waiting.items()}
        for i in self.left(before):
            j = next(queues[before[i]], None) if before[i] in queues else None
            if j is not None:
                self.join(i, j)

    def aligned(self, before: Label, after: Label) -> None:
        """Pairs nodes with equal labels so that most pairs are in one order (as `difflib` finds it)."""
        left, right = self.left(before), self.right(after)
        matcher = SequenceMatcher(None, [before[i] for i in left], [after[j] for j in right])
        for block in matcher.get_matching_blocks():
            for k in range(block.size):
                self.join(left[block.a + k], right[block.b + k])

    def grow(self, before: Label, after: Label) -> None:
        """Pairs neighbours of pairs with equal labels, always those next whose edges to pairs agree most."""
        votes: dict[tuple[int, int], float] = {}
        heap: list[tuple[float, int, int]] = []

        def ask(near: Iterable[Vote]) -> None:
            for x, y, weight in near:
                if self.free(x, y) and before[x] == after[y]:
                    votes[x, y] = votes.get((x, y), 0.0) + weight
                    heapq.heappush(heap, (-votes[x, y], x, y))

        for i, j in list(self.partner.items()):
            ask(self._neighbours(i, j))
        ends = zip(self.before.outputs, self.after.outputs, strict=False)
        ask((x, y, 1.0) for (x, index), (y, other) in ends if index == other)
        while heap:
            weight, x, y = heapq.heappop(heap)
            if self.free(x, y) and votes[x, y] == -weight:
                self.join(x, y)
                ask(self._neighbours(x, y))

    def _neighbours(self, i: int, j: int) -> Iterator[Vote]:
        """Nodes that are to a pair what the other is: the same operand, or users in the same place.

        An edge counts the less the more others read the same value: many read a mask, and one operator reads its weight.
        """
        for (x, index), (y, other) in zip(self.before.operands[i], self.after.operands[j], strict=False):
            if index == other:
                yield x, y, 1 / max(len(self.before.users[x]), len(self.after.users[y]))
        uses, others = self.before.users[i], self.after.users[j]
        crossed = len(uses) * len(others) <= MANY
        weight = 1 / max(len(uses), len(others), 1)
        for (x, *where), (y, *there) in ((u, v) for u in uses for v in others) if crossed else zip(uses, others, strict=False):
            if where == there:
                yield x, y, weight
