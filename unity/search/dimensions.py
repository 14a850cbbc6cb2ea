"""The dimensions of a program, followed through its graph: which choices of which sites split samples, and which weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from unity.pcg.state import State
from unity.search.offers import Offers
from unity.search.sites import Sites


@dataclass(frozen=True, eq=False)
class Dimensions:
    """Sites, their choices, and for every choice a number of the dimension that it follows: equal ones are the same dimension."""

    opened: Sites
    found: Offers
    rank: list[tuple[int, ...]]
    learned: frozenset[int] = frozenset()  # sites of weights beside those that gradients are taken for

    @cached_property
    def samples(self) -> frozenset[int]:
        """The dimensions of samples: the first of every argument that is no weight."""
        return self.of_data(lambda dim: dim == 0)

    @cached_property
    def data(self) -> frozenset[int]:
        """The dimensions of all arguments that are no weights: samples, sequence, image."""
        return self.of_data(lambda dim: True)

    def of_data(self, wanted: Callable[[int], bool]) -> frozenset[int]:
        """Those dimensions of arguments that are no weights whose positions are wanted."""
        given = [s for s, site in enumerate(self.opened.sites) if site.kind == "input" and not self.weight(s)]
        pairs = ((c.results[0], r) for s in given for c, r in zip(self.found[s], self.rank[s], strict=True))
        return frozenset(r for state, r in pairs if state.kind == "P" and wanted(state.dim))

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
