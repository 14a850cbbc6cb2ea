"""Residuals: the types in which the backward pass keeps each value, and how many instances of it are live at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from unity.search.space.sites import Around, Site, Where, copies

Use = tuple[int, int]  # (site, operand)


def count_residuals(sites: Sequence[Site], needed: Mapping[Where, Sequence[Around]], flying: Mapping[int, float]) -> None:
    """Decide for every value in which types it is a residual and how many instances are live, and note it at its site and ports.

    Args:
        sites: All sites, to whose `stored`, and whose ports' `kept` and `sole`, it adds.
        needed: Values that are residuals in their own type whoever else reads them, with the surroundings of these readers.
        flying: For the free site of each operand of a pipeline, the size of what is live of it for the batch before, as a
            multiple of the operand's.
    """
    _Residuals(sites, needed).count()
    for s, count in flying.items():
        sites[s].stored[0] += count


@dataclass(frozen=True)
class _Residuals:
    """All sites, and the values that are needed as in `count_residuals`."""

    sites: Sequence[Site]
    needed: Mapping[Where, Sequence[Around]]

    def count(self) -> None:
        """Count the residuals of every value.

        A value that one operator alone reads for its gradient is a residual in the type that this operator reads, also where it
        reads a copy that others share; any other value is one in its own type, and once more for each user that changes its type. A
        free site passes the demand on to the site that it copies; only a loop's carry is stacked at the free site itself.
        """
        readers: dict[Where, list[Use]] = {}
        for s in reversed(range(len(self.sites))):
            site = self.sites[s]
            uses = readers.get((s, 0), [])
            if self.is_sole_copy(s, uses):
                self.mark_sole(*uses[0])
            elif copies(site) and ((s, 0) in self.needed or uses):
                site.ports[0] = replace(site.ports[0], kept=self.alive((s, 0), uses))
            for p, port in enumerate(site.ports):
                if port.kept:
                    readers.setdefault((port.source, port.index), []).append((s, p))
        for s, site in enumerate(self.sites):
            for k in range(len(site.results)):
                uses = readers.get((s, k), [])
                times = {self.sites[u].ports[p].times for u, p in uses} | {around.times for around in self.needed.get((s, k), ())}
                if copies(site) or not times:
                    continue
                if site.kind != "input" and (s, k) not in self.needed and self.has_sole_reader(site, uses):
                    self.mark_sole(*uses[0])
                elif site.kind == "free":  # a carry: its stack for the steps, its last value for later users
                    after = site.ports[0].times / site.around.times
                    later = [(u, p) for u, p in uses if self.sites[u].ports[p].times != site.around.times]
                    site.stored[k] = site.alive if site.around.times in times else 0.0
                    site.stored[k] += self.alive((s, k), later, after) if times != {site.around.times} else 0.0
                else:
                    site.stored[k] = self.alive((s, k), uses)

    @cached_property
    def users(self) -> Counter[Where]:
        """The number of sites that read each value, for a gradient or not."""
        return Counter((port.source, port.index) for site in self.sites for port in site.ports)

    def is_sole_copy(self, s: int, uses: Sequence[Use]) -> bool:
        """Return whether a site is a copy that is a residual of a single reader, of a value that nothing else reads."""
        site = self.sites[s]
        if site.kind != "free" or not copies(site) or site.step or site.ports[0].argument or (s, 0) in self.needed:
            return False
        source = site.ports[0].source, site.ports[0].index
        return self.users[source] == 1 and source not in self.needed and self.has_sole_reader(site, uses)

    def mark_sole(self, s: int, p: int) -> None:
        """Mark an operand of a site as a residual that no other site needs."""
        self.sites[s].ports[p] = replace(self.sites[s].ports[p], sole=True)

    def has_sole_reader(self, site: Site, uses: Sequence[Use]) -> bool:
        """Return whether a value's only use is as a residual where the value is computed, or outside of a remat around that."""
        if len(uses) != 1:
            return False
        reader, port = self.sites[uses[0][0]], self.sites[uses[0][0]].ports[uses[0][1]]
        outside = bool(site.around.remats) and reader.around.encloses(site.around)
        return port.times == site.around.times and (port.kept == site.alive or outside)

    def alive(self, where: Where, uses: Sequence[Use], after: float = 1.0) -> float:
        """Return the instances of a value that are live at once as residuals in its own type, if these are its uses as a residual.

        One of several sibling remats is live at a time, but a value that is read outside of its remat is always live there.
        `after` is the fraction of the instances that is live once the loop that computes the value has ended.
        """
        site = self.sites[where[0]]
        readers = [(around, around.of(site.hoisted)) for around in self.needed.get(where, ())]
        readers += [(self.sites[u].around, self.sites[u].ports[p].kept) for u, p in uses]
        alive: dict[int, float] = {}
        for around, count in readers if site.around.remats else ():
            if around.encloses(site.around) and (after == 1 or around.times != site.around.times):
                alive[len(around.remats)] = max(alive.get(len(around.remats), 0.0), count)
        return sum(alive.values()) if alive else after * site.alive
