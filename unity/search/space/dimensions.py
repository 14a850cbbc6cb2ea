"""The dimensions of a program, followed through its graph: which choices of which sites split samples, and which weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from unity.pcg.types.parallel_type import State, partitioned
from unity.search.space.offers import Offers
from unity.search.space.sites import Sites


@dataclass(frozen=True, eq=False)
class Dimensions:
    """Sites, their choices, and for every choice a number of the dimension that it follows: equal ones are the same dimension."""

    opened: Sites
    found: Offers
    rank: list[tuple[int, ...]]
    learned: frozenset[int] = frozenset()  # sites of weights beside those that gradients are taken for

    @cached_property
    def samples(self) -> frozenset[int]:
        """The dimensions of samples: the first of every argument that is no weight, after those that loops step through."""
        return self.of_data(
            lambda dims: next((ranks for ranks in dims if not ranks <= self.steps), dims[0] if dims else frozenset())
        )

    @cached_property
    def data(self) -> frozenset[int]:
        """The dimensions of all arguments that are no weights: samples, sequence, image."""
        return self.of_data(lambda dims: frozenset().union(*dims))

    def of_data(self, chosen: Callable[[Sequence[frozenset[int]]], frozenset[int]]) -> frozenset[int]:
        """The dimensions chosen of every argument that is no weight. Each of an argument's dimensions may be several of the
        program, where a reshape cuts it: micro-batches, and the samples in each."""
        arguments = [s for s, site in enumerate(self.opened.sites) if site.kind == "input" and not self.weight(s)]
        digits = {s: dict[int, set[int]]() for s in arguments}
        for (s, _, state), rank in self.of_slot.items():
            if s in digits:
                digits[s].setdefault(state.dim, set()).add(rank)
        return frozenset[int]().union(*(chosen([frozenset(dims[d]) for d in sorted(dims)]) for dims in digits.values()))

    @cached_property
    def steps(self) -> frozenset[int]:
        """The dimensions that loops step through: of what they take a step of, and of what they stack."""
        slots: list[tuple[int, int, State]] = []
        for s, site in enumerate(self.opened.sites):
            if site.step == "in":
                slots.append((site.ports[0].source, site.ports[0].index, partitioned(0)))
            elif site.step == "out":
                slots.append((s, 0, partitioned(0)))
        return frozenset(self.of_slot[slot] for slot in slots if slot in self.of_slot)

    @cached_property
    def weights(self) -> tuple[bool, ...]:
        """For every site, whether it is made of nothing but weights."""
        found: list[bool] = []
        for site in self.opened.sites:
            sources = [found[p.source] for p in site.ports if p.source < len(found)]
            found.append(self.weight(len(found)) if site.kind == "input" else bool(sources) and all(sources))
        return tuple(found)

    def weight(self, s: int) -> bool:
        """Whether a site is an argument that is a weight."""
        return self.opened.sites[s].weight or s in self.learned

    @cached_property
    def of_slot(self) -> Mapping[tuple[int, int, State], int]:
        """The dimension that is split where a result of a site is partitioned so."""
        found: dict[tuple[int, int, State], int] = {}
        for s, (site, choices, rank) in enumerate(zip(self.opened.sites, self.found, self.rank, strict=True)):
            for c, r in zip(choices, rank, strict=True):
                slots = [(p.source, p.index, state) for p, state in zip(site.ports, c.operands, strict=True)]
                slots += [(s, k, state) for k, state in enumerate(c.results)]
                found.update((slot, r) for slot in slots if slot[2].kind == "P")
        return found
