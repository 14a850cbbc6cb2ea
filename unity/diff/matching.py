"""Matching of the nodes of two graphs: first by the computations that lead to and from them, then by their neighbours.

1. Inputs are matched by name and tensor, then by position and tensor, then by name alone.
2. Operators are matched whose operands *and* uses are computed in the same way, then those whose operands are (by a Merkle hash
   from the inputs), then those whose uses are, with the same inputs (by a Merkle hash from the outputs, so that one changed leaf
   does not unmatch everything that follows it).
3. Operators that compute the same function of their operands (their *signature*) are matched where they are neighbours of matched
   operators, in the order of how many edges agree; then the remaining ones are aligned in order, as repeated layers are.
4. Operators of one kind that differ in their shapes or programs are matched where they are neighbours of matched operators; then
   those of one source line.
5. Parallelization operators are matched by the value that they change, by its types before and after, and by its users.

The matching is maximal in three respects. Of the operators of each signature, as many are matched as both graphs have. So are those
that are computed from the same matched inputs by the same operators. And equal graphs are matched node by node. Heuristics choose
among several equal operators, and decide which two different operators count as one that changed: rewiring the fewest operands is a
quadratic assignment problem.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Mapping
from difflib import SequenceMatcher

from unity.diff.placements import placements
from unity.diff.skeleton import Labels, Skeleton, name_of
from unity.pcg.ir.graph import PCG

MAX_CROSSED = 1024  # pairs of users of one value that are all compared; beyond that, the first is compared with the first only

Labelling = Mapping[int, Hashable]  # of nodes, by index
Vote = tuple[int, int, float]  # two nodes, and the weight of the evidence that they match


def matching(before: PCG, after: PCG) -> dict[int, int]:
    """Return the matched nodes: from indices in the first graph's `nodes` to indices in the second's."""
    labels = Labels()
    pairs = _Pairs(Skeleton(before, labels), Skeleton(after, labels))
    _match_inputs(pairs)
    _match_by_content(pairs)
    pairs.grow(pairs.before.signature, pairs.after.signature)
    pairs.match_aligned(pairs.before.signature, pairs.after.signature)
    pairs.grow(pairs.before.signature, pairs.after.signature)
    pairs.match_equal(pairs.before.signature, pairs.after.signature)
    pairs.grow(pairs.before.form, pairs.after.form)
    pairs.match_equal(_lines(pairs.before), _lines(pairs.after))
    _match_parallelization(pairs)
    return pairs.partner


class _Pairs:
    """A growing matching of two skeletons: a node has at most one partner, and a pair is never given up."""

    def __init__(self, before: Skeleton, after: Skeleton) -> None:
        self.before, self.after = before, after
        self.partner: dict[int, int] = {}
        self.matched: set[int] = set()  # nodes of the second graph

    def are_free(self, i: int, j: int) -> bool:
        return i not in self.partner and j not in self.matched

    def join(self, i: int, j: int) -> None:
        self.partner[i] = j
        self.matched.add(j)

    def free_before(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes of the first graph that have no partner, in order."""
        return sorted(i for i in nodes if i not in self.partner)

    def free_after(self, nodes: Iterable[int]) -> list[int]:
        """Return the nodes of the second graph that have no partner, in order."""
        return sorted(j for j in nodes if j not in self.matched)

    def match_equal(self, before: Labelling, after: Labelling) -> None:
        """Match nodes with equal labels, the first with the first. Nodes without a label stay as they are."""
        by_label: dict[Hashable, list[int]] = {}
        for j in self.free_after(after):
            by_label.setdefault(after[j], []).append(j)
        queues = {label: iter(nodes) for label, nodes in by_label.items()}
        for i in self.free_before(before):
            j = next(queues[before[i]], None) if before[i] in queues else None
            if j is not None:
                self.join(i, j)

    def match_aligned(self, before: Labelling, after: Labelling) -> None:
        """Match nodes with equal labels in the blocks that `difflib` finds, so that most pairs keep their order."""
        left, right = self.free_before(before), self.free_after(after)
        matcher = SequenceMatcher(None, [before[i] for i in left], [after[j] for j in right])
        for block in matcher.get_matching_blocks():
            for k in range(block.size):
                self.join(left[block.a + k], right[block.b + k])

    def grow(self, before: Labelling, after: Labelling) -> None:
        """Match neighbours of pairs that have equal labels, those first whose edges to matched nodes agree most."""
        votes: dict[tuple[int, int], float] = {}
        heap: list[tuple[float, int, int]] = []

        def vote(neighbours: Iterable[Vote]) -> None:
            for x, y, weight in neighbours:
                if self.are_free(x, y) and before[x] == after[y]:
                    votes[x, y] = votes.get((x, y), 0.0) + weight
                    heapq.heappush(heap, (-votes[x, y], x, y))

        for i, j in list(self.partner.items()):
            vote(self._neighbours(i, j))
        ends = zip(self.before.outputs, self.after.outputs, strict=False)
        vote((x, y, 1.0) for (x, index), (y, other) in ends if index == other)
        while heap:
            weight, x, y = heapq.heappop(heap)
            if self.are_free(x, y) and votes[x, y] == -weight:
                self.join(x, y)
                vote(self._neighbours(x, y))

    def _neighbours(self, i: int, j: int) -> Iterator[Vote]:
        """Yield pairs of nodes that have the same edge to the two nodes of a pair: the same operand, or users at the same position.

        An edge counts less the more users the value has: a mask has many users, a weight has one.
        """
        for (x, index), (y, other) in zip(self.before.operands[i], self.after.operands[j], strict=False):
            if index == other:
                yield x, y, 1 / max(len(self.before.users[x]), len(self.after.users[y]))
        uses, others = self.before.users[i], self.after.users[j]
        crossed = len(uses) * len(others) <= MAX_CROSSED
        weight = 1 / max(len(uses), len(others), 1)
        for (x, *place), (y, *other) in ((u, v) for u in uses for v in others) if crossed else zip(uses, others, strict=False):
            if place == other:
                yield x, y, weight


def _match_inputs(pairs: _Pairs) -> None:
    """Match inputs by name and tensor, by position and tensor, or by name."""
    sides = [[(k, n, side.nodes[n]) for k, n in enumerate(side.inputs)] for side in (pairs.before, pairs.after)]
    exact = [{n: (name, node.tensors) for _, n, node in side if (name := name_of(node)) is not None} for side in sides]
    placed = [{n: (k, node.tensors) for k, n, node in side} for side in sides]
    named = [{n: name for _, n, node in side if (name := name_of(node)) is not None} for side in sides]
    for before, after in (exact, placed, named):
        pairs.match_equal(before, after)


def _match_by_content(pairs: _Pairs) -> None:
    """Match operators whose operands or uses are computed in the same way.

    Uses alone are evidence only if a matched input is part of them, since all losses end alike.
    """
    sides = pairs.before, pairs.after
    matched: list[dict[int, Hashable]] = [{i: i for i in pairs.partner}, {j: i for i, j in pairs.partner.items()}]
    unmatched = [{n: (k, n) for n in side.inputs} for k, side in enumerate(sides)]
    above = [side.above({**other, **same}) for side, other, same in zip(sides, unmatched, matched, strict=True)]
    below = [side.below(same) for side, same in zip(sides, matched, strict=True)]
    around = [_with_siblings(side, up, down) for side, up, down in zip(sides, above, below, strict=True)]
    both = [{k: (up[k], down[k]) for k in up} for up, down in zip(above, below, strict=True)]
    used = [{k: down[k] for k in side.leading_to_inputs(same)} for side, down, same in zip(sides, below, matched, strict=True)]
    for before, after in (around, both, above, used):
        pairs.match_equal(before, after)


def _with_siblings(side: Skeleton, above: dict[int, int], below: dict[int, int]) -> dict[int, Hashable]:
    """Return labels that distinguish equal operators with equal uses by the other operands of their users."""
    return {
        k: (above[k], below[k], tuple(sorted((above[user], position, index) for user, position, index in side.users[k])))
        for k in above
    }


def _lines(side: Skeleton) -> dict[int, Hashable]:
    """Return the form and the source line of every operator that has a line. Inputs have none."""
    return {k: (form, side.nodes[k].source) for k, form in side.form.items() if side.nodes[k].source}


def _match_parallelization(pairs: _Pairs) -> None:
    """Match parallelization operators.

    Those of one value are matched by their changes of type and users, then by their changes, then by their users; then those of any
    value with the same change and the same users.
    """
    names = {j: i for i, j in pairs.partner.items()}
    before = _Parallelization(
        pairs.before, {k: ("both", k) if k in pairs.partner else ("before", k) for k in pairs.before.operators}
    )
    after = _Parallelization(pairs.after, {k: ("both", names[k]) if k in names else ("after", k) for k in pairs.after.operators})
    for one, other in zip(before.labellings(), after.labellings(), strict=True):
        pairs.match_equal(one, other)


class _Parallelization:
    """The parallelization operators of one graph.

    `places` has an identity for every other operator, the same in both graphs for operators that are matched.
    """

    def __init__(self, side: Skeleton, places: Mapping[int, Hashable]) -> None:
        self.side, self.places = side, places
        graph = side.graph
        self.kinds = {k: (n.kind, bool(n.again)) for k in side.roots for n in [side.nodes[k]]}
        self.goals = {k: placements(side.nodes[k].types, graph.axes) for k in side.roots}
        self.values: dict[int, Hashable] = {}
        for k, (root, index) in side.roots.items():
            operand = side.number[id(side.nodes[k].operands[0].node)]
            self.values[k] = (self.kinds[k], self.goals[k], self.values.get(operand, (places[root], index)))
        self.uses = self._uses()

    def _uses(self) -> dict[int, Hashable]:
        """Return the operand positions and outputs that each operator leads to, through further parallelization operators too."""
        side = self.side
        uses: dict[int, set[Hashable]] = {k: set() for k in side.roots}
        for k, v in enumerate(side.graph.outputs):
            number = side.number[id(v.node)]
            if number in uses:
                uses[number].add(("output", k))
        for n in reversed(range(len(side.nodes))):
            for position, v in enumerate(side.nodes[n].operands):
                number = side.number[id(v.node)]
                if number in uses:
                    uses[number] |= uses[n] if n in uses else {(self.places[n], position)}
        return {k: frozenset(ends) for k, ends in uses.items()}

    def labellings(self) -> list[dict[int, Hashable]]:
        """Return the labels that the operators are matched by, the most reliable first."""
        roots = {k: (self.places[root], index) for k, (root, index) in self.side.roots.items()}
        every = list(self.side.roots)
        return [
            {k: (self.values[k], self.uses[k]) for k in every},
            dict(self.values),
            {k: (self.kinds[k], roots[k], self.uses[k]) for k in every},
            {k: (self.kinds[k], self.goals[k], self.uses[k]) for k in every},
        ]
