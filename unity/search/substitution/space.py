"""Parallel graphs as the search by substitution sees them, and their costs.

A parallel graph is given by the choice of every site (`unity.search.space.sites`) along every axis: the operators' types follow,
and so do the parallelization operators between them, which `pcg.parallel.resharding.steps` puts in their simplest form. So a state
is a number for each site, a substitution changes a few of them, and only those sites and their edges are priced again. Prices are
those of the exact search (`unity.search.cost.assembly`), shared by equal sites and cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from math import prod

import numpy as np

from unity.machine.machine import Machine
from unity.machine.resharding_tables import Types
from unity.pcg.ir.graph import PCG
from unity.pcg.propagation.choice import Choice
from unity.pcg.types.parallel_type import UNUSED, Type
from unity.search.cost.assembly import Assembled, Listed, assemble
from unity.search.cost.cost import Training, site_cost
from unity.search.solver.problem import Alternatives, Point, direction
from unity.search.space.configurations import Domain, Limits, domain_of_picks, fits, shapes_of
from unity.search.space.sites import Port, Site

Graph = tuple[int, ...]  # a parallel graph: for each site, which of its kind's values
Axes = tuple[int, ...]
FEW = (Limits(1, 1, np.inf),)  # values are generated here on demand, not listed in advance


@dataclass(frozen=True, eq=False)
class SiteKind:
    """A class of equal sites: their choices, and the values met so far, numbered. Value 0 is serial."""

    site: Site
    choices: tuple[Choice, ...]
    serial: int  # the choice that leaves an axis unused
    values: list[tuple[int, ...]] = field(default_factory=list)  # for each value, the choice along each axis
    numbers: dict[tuple[int, ...], int] = field(default_factory=dict)
    ends: list[tuple[int, ...]] = field(default_factory=list)  # for each value, the type numbers of operands and results
    prices: list[float] = field(default_factory=list)
    turned: dict[tuple[int, Axes], tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class GraphSpace:
    """All parallel graphs of one serial graph on one machine. `weight` is the price of a byte of memory in seconds."""

    assembled: Assembled
    weight: float = 0.0
    types: dict[Type, int] = field(default_factory=dict)  # numbers of the types met so far
    listed: list[Type] = field(default_factory=list)  # the same types by number
    changes: dict[tuple[int, int, int], float] = field(default_factory=dict)

    @staticmethod
    def of(graph: PCG, differentiated: frozenset[int], machine: Machine, training: Training, weight: float = 0.0) -> GraphSpace:
        """Return the parallel graphs of a serial one."""
        return GraphSpace(assemble(graph, differentiated, machine, training, FEW, Listed()), weight)

    @property
    def sites(self) -> Sequence[Site]:
        return self.assembled.opened.sites

    @property
    def machine(self) -> Machine:
        return self.assembled.machine

    @cached_property
    def kinds(self) -> tuple[SiteKind, ...]:
        """The kind of every site; equal sites have the same object."""
        kind_of: dict[int, SiteKind] = {}
        for site, domain, cost in zip(self.sites, self.assembled.domains, self.assembled.costs, strict=True):
            if id(cost) not in kind_of:
                serial = next(i for i, c in enumerate(domain.choices) if all(s == UNUSED for s in c.states))
                kind = kind_of[id(cost)] = SiteKind(site, domain.choices, serial)
                self.add(kind, np.full((1, len(self.machine.axes)), serial))
        return tuple(kind_of[id(cost)] for cost in self.assembled.costs)

    @cached_property
    def serial(self) -> Graph:
        """The graph at which the search starts: every tensor is unused along every axis."""
        return (0,) * len(self.kinds)

    @cached_property
    def edges(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """For every site and operand: the site that produces it, its position among that site's ends, and the number of the edge's
        kind.
        """
        numbers = {kind: k for k, kind in enumerate(self.edge_kinds)}
        position = self.assembled.position
        return tuple(tuple((p.source, position(p), numbers[self.edge_kind(site, p)]) for p in site.ports) for site in self.sites)

    @cached_property
    def edge_kinds(self) -> tuple[tuple[Port, bool], ...]:
        """The distinct edges, as far as the price of a change of type is concerned."""
        return tuple(dict.fromkeys(self.edge_kind(site, p) for site in self.sites for p in site.ports))

    def edge_kind(self, site: Site, port: Port) -> tuple[Port, bool]:
        """Return what the price of a change of type on an edge depends on: the port, and whether the user is a product."""
        return replace(port.as_priced, index=0), site.is_product

    @cached_property
    def users(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For every site the users of its results, as (site, operand)."""
        users: list[list[tuple[int, int]]] = [[] for _ in self.sites]
        for s, site in enumerate(self.sites):
            for p, port in enumerate(site.ports):
                users[port.source].append((s, p))
        return tuple(map(tuple, users))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of interchangeable axes: those of one size on one level."""
        numbered = groupby(enumerate(self.machine.axes), key=lambda a: a[1].extent)
        return tuple(tuple(i for i, _ in same) for _, same in numbered)

    @cached_property
    def degrees(self) -> tuple[Axes, ...]:
        """The axes that one substitution may use: neighbouring ones, most devices first. A rule holds for every degree, not for a
        single axis.
        """
        sizes = [a.size for a in self.machine.axes]
        runs = (tuple(range(start, end)) for start in range(len(sizes)) for end in range(start + 1, len(sizes) + 1))
        return tuple(sorted(runs, key=lambda axes: (-prod(sizes[i] for i in axes), axes)))

    def add(self, kind: SiteKind, picks: np.ndarray) -> None:
        """Price new values."""
        cost = site_cost(kind.site, Domain(kind.choices, picks, ""), self.machine, self.assembled.training)
        time, memory = direction(self.weight)
        prices = time * cost.time + memory * cost.memory
        for row, price in zip(picks.tolist(), prices.tolist(), strict=True):
            pick = tuple(row)
            kind.numbers[pick] = len(kind.values)
            kind.values.append(pick)
            kind.prices.append(price)
            chosen = [kind.choices[c].states for c in pick]
            ends = (tuple(states[e] for states in chosen) for e in range(len(kind.choices[0].states)))
            kind.ends.append(tuple(map(self.number, ends)))

    def number(self, type_: Type) -> int:
        """Return a type's number."""
        number = self.types.setdefault(type_, len(self.listed))
        if number == len(self.listed):
            self.listed.append(type_)
        return number

    def turned(self, kind: SiteKind, value: int, axes: Axes) -> tuple[int, ...]:
        """Return the values that have each of the choices in turn on some axes; -1 where the tensors cannot be divided like
        this.
        """
        key = (value, axes)
        if key not in kind.turned:
            picks = np.repeat(np.array([kind.values[value]], np.int16), len(kind.choices), axis=0)
            picks[:, axes] = np.arange(len(kind.choices))[:, None]
            good = fits(kind.choices, shapes_of(kind.site), picks, self.machine.axes)
            new = [k for k in np.flatnonzero(good) if tuple(picks[k].tolist()) not in kind.numbers]
            if new:
                self.add(kind, picks[new])
            kind.turned[key] = tuple(kind.numbers[tuple(row)] if ok else -1 for row, ok in zip(picks.tolist(), good, strict=True))
        return kind.turned[key]

    def change(self, edge: int, before: int, after: int) -> float:
        """Return the price of the parallelization operators on an edge; infinite if none convert between the types."""
        key = (edge, before, after)
        price = self.changes.get(key)
        if price is None:
            port, product = self.edge_kinds[edge]
            old, new = (_alone(self.listed[t]) for t in (before, after))
            times, memories = self.assembled.change(old, new, port, product)
            time, memory = direction(self.weight)
            seconds = float(times[0, 0, 0])
            price = self.changes[key] = time * seconds + memory * float(memories[0, 0, 0]) if np.isfinite(seconds) else np.inf
        return price

    def price(self, graph: Graph, part: Sequence[int] | None = None) -> float:
        """Return the cost of a graph, or of a part of its sites with all edges that touch it."""
        inside = set(range(len(graph)) if part is None else part)
        total = sum(self.kinds[s].prices[graph[s]] for s in sorted(inside))
        for s, edges in enumerate(self.edges):
            user_ends = self.kinds[s].ends[graph[s]]
            for p, (source, position, edge) in enumerate(edges):
                if s in inside or source in inside:
                    total += self.change(edge, self.kinds[source].ends[graph[source]][position], user_ends[p])
        return total

    def difference(self, graph: Graph, changed: Mapping[int, int]) -> float:
        """Return how much more a graph costs if some sites have other values; infinite if it is impossible then."""
        kinds, edges, ends = self.kinds, self.edges, {s: self.kinds[s].ends[v] for s, v in changed.items()}
        total = 0.0
        for s, value in changed.items():
            kind, old, new = kinds[s], graph[s], ends[s]
            total += kind.prices[value] - kind.prices[old]
            for p, (source, position, edge) in enumerate(edges[s]):
                source_ends = kinds[source].ends[graph[source]]
                total += self.change(edge, ends.get(source, source_ends)[position], new[p])
                total -= self.change(edge, source_ends[position], kind.ends[old][p])
            for u, p in self.users[s]:
                if u not in changed:
                    _, position, edge = edges[u][p]
                    user_type = kinds[u].ends[graph[u]][p]
                    total += self.change(edge, new[position], user_type)
                    total -= self.change(edge, kind.ends[old][position], user_type)
        return total

    def point(self, graph: Graph) -> tuple[Assembled, Point]:
        """Return a graph as the only point of a problem, in the form of the exact search's points."""
        domains = [
            domain_of_picks(kind.choices, np.array([kind.values[v]], np.int16), shapes_of(kind.site), self.machine.axes)
            for kind, v in zip(self.kinds, graph, strict=True)
        ]
        costs = [site_cost(k.site, d, self.machine, self.assembled.training) for k, d in zip(self.kinds, domains, strict=True)]
        only = replace(self.assembled, domains=tuple(domains), costs=tuple(costs))
        tables = [cost for _, cost in only.problem.tables]
        time, memory = (sum(float(getattr(c, of).reshape(len(c.time), -1)[0, 0]) for c in tables) for of in ("time", "memory"))
        alternatives = Alternatives((0,) * len(graph), (0,) * len(only.ports))
        return only, Point(time, memory, (0,) * len(graph), alternatives, exact=False)


def _alone(type_: Type) -> Types:
    """Return a set of one type. On a single device, which has no axes, a set still has a state."""
    states = tuple(dict.fromkeys((UNUSED, *type_)))
    return Types(states, np.array([states.index(s) for s in type_], np.int16).reshape(1, -1))
