"""Clustering into FlexFlow's operators: layers, each a contraction with the light work that follows it.

FlexFlow's operators are the layers of a framework (section 4, table 2): a convolution with its bias and activation, or one step of
an LSTM layer. Captured operators are finer: a product, the sum of two products, a bias and a cell's gates may each be split and
placed separately. For FlexFlow's search that means more proposals and more simulation, while its results keep them together anyway.

`layers` is a clustering for `capture`. Light work joins the last of the layers whose results it reads, if that layer has a
contraction or a pooling window; products that nothing else reads join too, as their sum is one product. It stays separate if its
result is larger than the layer's (a concatenation), if a path from one to the other leads outside, or if the two together could not
be split in a dimension in which each can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from unity.baselines.flexflow.strategy.pieces import splits_of
from unity.pcg.capture.clustering import EquationCluster, clusters
from unity.pcg.capture.heavy_operators import Uses, light
from unity.pcg.capture.lossless import pattern
from unity.pcg.ir.dead_code import extract
from unity.pcg.ir.program import Body, Equation
from unity.pcg.types.factors import facts_of


def layers(body: Body, constant: Mapping[int, int]) -> list[EquationCluster]:
    """Return the layers of a body: its `clusters`, some of them joined. Producers come before users."""
    uses = Uses(body)
    grown = _LayerClusters(uses, constant)
    for cluster in clusters(body, constant):
        grown.add(cluster.members)
    return [EquationCluster(tuple(some), uses.outputs(some, set(some))) for some in grown.ordered()]


class _LayerClusters:
    """Layers, by number, while clusters are added one by one, producers before users."""

    def __init__(self, uses: Uses, constant: Mapping[int, int]) -> None:
        self.uses, self.constant = uses, constant
        self.members: dict[int, list[int]] = {}
        self.home: dict[int, int] = {}  # equation → layer
        self.below: dict[int, int] = {}  # by layer, present or merged: those that it depends on, as bits
        self.dims: dict[str, frozenset[int]] = {}  # by pattern of a program

    def add(self, members: Sequence[int]) -> None:
        """Add a cluster, as a new layer or as part of an existing one."""
        layer, makers = len(self.below), self._producers(members)
        self.members[layer] = list(members)
        self.home.update(dict.fromkeys(members, layer))
        self.below[layer] = self._with(makers)
        if makers and self._light(members):
            last = max(makers, key=lambda m: self.members[m][-1])
            products = {m for m in makers if self._product(m, members)}
            together = frozenset(products - {last} if last in products else ())
            for also in dict.fromkeys((together, frozenset[int]())):
                if self._join(layer, last, also):
                    return

    def ordered(self) -> list[list[int]]:
        """Return the equations of every layer, in an order where each layer follows those it depends on."""
        return [self.members[k] for k in sorted(self.members, key=lambda k: (self.below[k].bit_count(), self.members[k][-1]))]

    def _equations(self, members: Sequence[int]) -> list[Equation]:
        return [self.uses.body.equations[i] for i in members]

    def _producers(self, members: Sequence[int]) -> set[int]:
        """Return the other layers whose results some equations read."""
        maker, inside = self.uses.maker, set(members)
        read = {a for e in self._equations(members) for a in e.operands if isinstance(a, int) and a not in self.constant}
        return {self.home[maker[a]] for a in read if a in maker and maker[a] not in inside}

    def _with(self, numbers: set[int]) -> int:
        """Return layers and everything they depend on, as a bit set."""
        below = 0
        for k in numbers:
            below |= 1 << k | self.below[k]
        return below

    def _light(self, members: Sequence[int]) -> bool:
        """Return whether equations are light work on tensors: no lookups in a table, and at least one result with dimensions."""
        tensors, equations = self.uses.body.tensors, self._equations(members)
        looked_up = any(facts_of(e.name).looks_up and tensors[e.results[0]].floating for e in equations)
        results = self.uses.outputs(members, set(members))
        return not looked_up and all(light(self.uses.body, e) for e in equations) and any(tensors[v].shape for v in results)

    def _product(self, layer: int, members: Sequence[int]) -> bool:
        """Return whether a layer is a single contraction that only these equations read."""
        (first, *others), readers = self._equations(self.members[layer]), set(members)
        read = all(v not in self.uses.ends and readers.issuperset(self.uses.users.get(v, ())) for v in first.results)
        return facts_of(first.name).product and not others and read

    def _join(self, layer: int, into: int, also: frozenset[int]) -> bool:
        """Merge a layer and others into one, unless `into` has no contraction or window, or a cycle or lost split would result.

        Returns whether they were merged.
        """
        joined = {layer, into, *also}
        members = sorted(i for k in joined for i in self.members[k])
        outside = self._with({m for k in joined for m in self._producers(self.members[k])} - joined)
        if all(not (facts_of(e.name).product or facts_of(e.name).slides) for e in self._equations(self.members[into])):
            return False
        if any(outside >> k & 1 for k in joined) or not self._alike(members, self.members[into], self.members[layer]):
            return False
        gone = sum(1 << k for k in joined - {into})
        for k, below in self.below.items():
            if below & (gone | 1 << into):
                self.below[k] = below & ~gone | outside | 1 << into
        self.below[into], self.members[into] = outside, members
        self.home.update(dict.fromkeys(members, into))
        for k in joined - {into}:
            del self.members[k]
        return True

    def _alike(self, *members: Sequence[int]) -> bool:
        """Return whether a merged layer is as good as its parts. `members`: its own, those of `into`, those of the joining layer.

        Its result must have the shape of the joining layer's, be no larger than that of `into`, and be divisible as both are.
        """
        programs = [extract(self.uses.body, m, self.uses.outputs(m, set(m)), self.constant)[0] for m in members]
        shapes = [program.tensor(program.outputs[0]).shape for program in programs]
        if shapes[0] != shapes[2] or prod(shapes[0]) > prod(shapes[1]):
            return False
        joined, into, alone = map(self._dimensions, programs)
        return joined >= (alone & into if len(shapes[0]) == len(shapes[1]) else alone)

    def _dimensions(self, program: Body) -> frozenset[int]:
        """Return the dimensions in which the first result of a program can be split."""
        key = pattern(program)
        if key not in self.dims:
            self.dims[key] = frozenset(splits_of(program, len(program.inputs)))
        return self.dims[key]
