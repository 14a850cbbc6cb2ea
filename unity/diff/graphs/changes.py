"""Which parallelization operator of one graph is which of another, once operators are matched."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from unity.diff.graphs.pairing import Pairs
from unity.diff.graphs.skeleton import Skeleton
from unity.diff.graphs.words import marks

Places = Mapping[int, Hashable]  # of operators, by number: the same for those that are matched


def join_changes(pairs: Pairs) -> None:
    """Pairs changes of one value by what they do and for whom, then by what they do, then by for whom; then others of one use."""
    names = {j: i for i, j in pairs.partner.items()}
    before = _Changes(pairs.before, {k: ("both", k) if k in pairs.partner else ("before", k) for k in pairs.before.operators})
    after = _Changes(pairs.after, {k: ("both", names[k]) if k in names else ("after", k) for k in pairs.after.operators})
    for one, other in zip(before.labels(), after.labels(), strict=True):
        pairs.equal(one, other)


class _Changes:
    """The parallelization operators of one graph."""

    def __init__(self, side: Skeleton, places: Places) -> None:
        self.side, self.places = side, places
        graph = side.graph
        self.kinds = {k: (n.kind, bool(n.attributes.get("again"))) for k in side.roots for n in [side.nodes[k]]}
        self.goals = {k: marks(side.nodes[k].types, graph.axes) for k in side.roots}
        self.values: dict[int, Hashable] = {}
        for k, (root, index) in side.roots.items():
            operand = side.number[id(side.nodes[k].operands[0].node)]
            self.values[k] = (self.kinds[k], self.goals[k], self.values.get(operand, (places[root], index)))
        self.uses = self._uses()

    def _uses(self) -> dict[int, Hashable]:
        """For whom each change is: the operands and outputs that it leads to, through further changes too."""
        side = self.side
        found: dict[int, set[Hashable]] = {k: set() for k in side.roots}
        for k, v in enumerate(side.graph.outputs):
            number = side.number[id(v.node)]
            if number in found:
                found[number].add(("output", k))
        for n in reversed(range(len(side.nodes))):
            for position, v in enumerate(side.nodes[n].operands):
                number = side.number[id(v.node)]
                if number in found:
                    found[number] |= found[n] if n in found else {(self.places[n], position)}
        return {k: frozenset(uses) for k, uses in found.items()}

    def labels(self) -> list[dict[int, Hashable]]:
        """What pairs are made by, the surest first."""
        roots = {k: (self.places[root], index) for k, (root, index) in self.side.roots.items()}
        every = list(self.side.roots)
        return [
            {k: (self.values[k], self.uses[k]) for k in every},
            dict(self.values),
            {k: (self.kinds[k], roots[k], self.uses[k]) for k in every},
            {k: (self.kinds[k], self.goals[k], self.uses[k]) for k in every},
        ]
