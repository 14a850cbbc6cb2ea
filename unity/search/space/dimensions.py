"""The dimensions of a program, followed through its graph: they tell which choices split samples, and which split weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from unity.pcg.types.parallel_type import State, partitioned
from unity.search.space.offers import Offers
from unity.search.space.sites import Sites, Slicing


@dataclass(frozen=True, eq=False)
class ProgramDimensions:
    """The sites of a graph, their choices, and the dimension of the program that each choice splits.

    Args:
        opened: The sites.
        choices: The choices of every site.
        rank: For every choice of every site, the number of the dimension that it splits.
        learned: Sites of weights in addition to the differentiated arguments.
    """

    opened: Sites
    choices: Offers
    rank: list[tuple[int, ...]]
    learned: frozenset[int] = frozenset()

    @cached_property
    def samples(self) -> frozenset[int]:
        """The dimensions of samples: the first of every argument except weights.

        If loops iterate over the first, and a later one belongs to no weight either, that one: the first holds micro-batches then.
        """
        inputs = {s: site for s, site in enumerate(self.opened.sites) if site.kind == "input"}
        of_weights = {rank for (s, *_), rank in self.of_slot.items() if s in inputs and self.is_weight(s)}

        def first(dims: Mapping[int, frozenset[int]]) -> frozenset[int]:
            outer = dims.get(0, frozenset())
            if not outer or not outer <= self.steps:
                return outer
            inner = (dims[d] for d in sorted(dims) if not dims[d] <= self.steps and dims[d].isdisjoint(of_weights))
            return next(inner, outer)

        return self._of_data(first)

    @cached_property
    def data(self) -> frozenset[int]:
        """The dimensions of all arguments except weights, such as samples, sequence and image."""
        return self._of_data(lambda dims: frozenset().union(*dims.values()))

    def _of_data(self, chosen: Callable[[Mapping[int, frozenset[int]]], frozenset[int]]) -> frozenset[int]:
        """Return the dimensions that `chosen` selects from every argument that is not a weight.

        One dimension of an argument is several of the program where a reshape cuts it, as into micro-batches and their samples.
        """
        arguments = [s for s, site in enumerate(self.opened.sites) if site.kind == "input" and not self.is_weight(s)]
        digits = {s: dict[int, set[int]]() for s in arguments}
        for (s, _, state), rank in self.of_slot.items():
            if s in digits:
                digits[s].setdefault(state.dim, set()).add(rank)
        return frozenset[int]().union(*(chosen({d: frozenset(ranks) for d, ranks in dims.items()}) for dims in digits.values()))

    @cached_property
    def steps(self) -> frozenset[int]:
        """The dimensions that loops iterate over: those of their sliced operands and of their stacked results."""
        slots: list[tuple[int, int, State]] = []
        for s, site in enumerate(self.opened.sites):
            if site.step == Slicing.SLICE:
                slots.append((site.ports[0].source, site.ports[0].index, partitioned(0)))
            elif site.step == Slicing.STACK:
                slots.append((s, 0, partitioned(0)))
        return frozenset(self.of_slot[slot] for slot in slots if slot in self.of_slot)

    @cached_property
    def weights(self) -> tuple[bool, ...]:
        """For every site, whether it depends on weights alone."""
        return from_weights(self.opened, self.learned)

    def is_weight(self, s: int) -> bool:
        """Return whether a site is an argument that is a weight."""
        return self.opened.sites[s].weight or s in self.learned

    @cached_property
    def of_slot(self) -> Mapping[tuple[int, int, State], int]:
        """The dimension that is split when a result of a site has a partitioned state, by (site, result, state)."""
        dimensions: dict[tuple[int, int, State], int] = {}
        for s, (site, choices, rank) in enumerate(zip(self.opened.sites, self.choices, self.rank, strict=True)):
            for c, r in ((c, r) for c, r in zip(choices, rank, strict=True) if not c.moves):
                slots = [(p.source, p.index, state) for p, state in zip(site.ports, c.operands, strict=True)]
                slots += [(s, k, state) for k, state in enumerate(c.results)]
                dimensions.update((slot, r) for slot in slots if slot[2].kind == "P")
        return dimensions


def from_weights(opened: Sites, learned: frozenset[int] = frozenset()) -> tuple[bool, ...]:
    """Return for every site whether it depends on weights alone. `learned` are weights beside the differentiated arguments."""
    flags: list[bool] = []
    for s, site in enumerate(opened.sites):
        sources = [flags[p.source] for p in site.ports if p.source < s]
        flags.append(site.weight or s in learned if site.kind == "input" else bool(sources) and all(sources))
    return tuple(flags)
