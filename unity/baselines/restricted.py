"""Restrictions of the search's values: what published systems, and strategies that people choose by hand, do not have.

A restriction leaves every operator some of its values, and forbids some pairs of values along edges. What it leaves open is found
by exact search, so what comes out is the best of its kind. All else, costs included, is that of the search it is taken from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from unity.base.errors import InfeasibleError
from unity.pcg.propagation.choices import Choice
from unity.pcg.types.axis import Axis
from unity.search.cost.assembly import Assembled
from unity.search.cost.cost import SiteCost, site_cost
from unity.search.session import Candidate, Search
from unity.search.solver.frontier import Frontier, fastest_fitting, frontier
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Array, Cost, Edge, Point, Problem
from unity.search.space.configurations import Domain, fits, made, ranks, shapes_of
from unity.search.space.dimensions import Dimensions
from unity.search.space.offers import Offers, offered
from unity.search.space.sites import Site, Sites


@dataclass(frozen=True, eq=False)
class Structure:
    """What restrictions speak of: choices, the dimensions that they follow through the graph, samples, weights."""

    search: Search

    @cached_property
    def opened(self) -> Sites:
        return self.search.assembled.opened

    @cached_property
    def found(self) -> Offers:
        """The choices of every site."""
        return offered(self.opened.sites)

    @cached_property
    def rank(self) -> list[tuple[int, ...]]:
        """For every choice, a number of the dimension that it follows: equal ones are the same dimension."""
        return ranks(self.opened.sites, self.found)

    @cached_property
    def dimensions(self) -> Dimensions:
        """The dimensions of the program."""
        return Dimensions(self.opened, self.found, self.rank)

    @property
    def samples(self) -> frozenset[int]:
        """The dimensions of samples."""
        return self.dimensions.samples

    @property
    def data(self) -> frozenset[int]:
        """The dimensions of all arguments that are no weights."""
        return self.dimensions.data

    @property
    def weights(self) -> tuple[bool, ...]:
        """For every site, whether it is made of nothing but weights."""
        return self.dimensions.weights

    @cached_property
    def readers(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For every site, who reads its results: (site, operand)."""
        found: list[list[tuple[int, int]]] = [[] for _ in self.opened.sites]
        for u, site in enumerate(self.opened.sites):
            for p, port in enumerate(site.ports):
                found[port.source].append((u, p))
        return tuple(map(tuple, found))

    def name(self, s: int) -> str:
        """A site for messages: its operator, and the user's source line."""
        site = self.opened.sites[s]
        what = site.node.kind if site.node is not None else site.kind
        source = site.node.source if site.node is not None else ""
        return f"{source}: {what} of {', '.join(map(str, site.results))}" if source else f"{what} of {site.results[0]}"


@dataclass(frozen=True, eq=False)
class Space:
    """The graph with some of its values, and the problem on them: that of `assembled`, with pairs of values forbidden."""

    assembled: Assembled
    problem: Problem

    @cached_property
    def minimizer(self) -> Minimizer:
        return Minimizer(self.problem)

    def at(self, weight: float) -> Point | None:
        """The least time + weight * memory; nothing if no strategy is left."""
        found = self.minimizer.at([weight])
        return found[0] if found else None

    def frontier(self) -> Frontier:
        """The trade-off inside the restriction."""
        return frontier(self.problem, minimizer=self.minimizer)

    def strategy(self, point: Point) -> Point:
        """A point with the variables of the graph alone, where the problem has more."""
        sites, edges = len(self.assembled.domains), len(self.assembled.ports)
        taken = point.alternatives
        return replace(
            point, values=point.values[:sites], alternatives=replace(taken, unary=taken.unary[:sites], edges=taken.edges[:edges])
        )

    def under(self, search: Search, limit: float) -> Candidate | None:
        """The fastest that is found to fit the limit; if none does the leanest; nothing if no strategy is left at all."""
        made: dict[Point, Candidate] = {}

        def candidate(point: Point) -> Candidate:
            if point not in made:
                made[point] = search.candidate(self.assembled, self.strategy(point))
            return made[point]

        fastest, leanest = self.at(0.0), self.at(np.inf)
        if fastest is None or leanest is None:
            return None
        if candidate(fastest).memory <= limit:
            return candidate(fastest)
        found = fastest_fitting(self.minimizer, (0.0, np.inf), lambda p: candidate(p).memory <= limit)
        return candidate(found or leanest)


def restricted(
    structure: Structure, values: Callable[[int, Site], Array], apart: Callable[[int], object] = lambda s: None
) -> Assembled:
    """The search's graph with other values: `values` gives a site's choices along all axes, [values, axes], before they are checked
    for sizes. Sites that are equal to the search share them, if `apart` does not tell them apart.

    Raises:
        InfeasibleError: an operator is left without any value.
    """
    base, axes = structure.search.assembled, structure.search.machine.axes
    shared: dict[tuple, tuple[Domain, SiteCost]] = {}
    domains, costs = list[Domain](), list[SiteCost]()
    for s, site in enumerate(base.opened.sites):
        same = (id(base.domains[s]), apart(s))
        if same not in shared:
            picks = only(structure.found[s], values(s, site), site, axes)
            if not len(picks):
                raise InfeasibleError(f"{structure.name(s)}: no way to split it is left by the restriction on {base.machine.name}")
            near = made(structure.found[s], picks, shapes_of(site), axes)
            shared[same] = near, site_cost(site, near, base.machine, base.training)
        domains.append(shared[same][0])
        costs.append(shared[same][1])
    return replace(base, domains=tuple(domains), costs=tuple(costs), known={}, rerun=False)


def only(choices: Sequence[Choice], picks: Array, site: Site, axes: Sequence[Axis]) -> Array:
    """Those of some values that sizes allow, each once."""
    if not axes:  # one device
        return np.zeros((1, 0), np.int16)
    picks = np.unique(np.asarray(picks, np.int16).reshape(-1, len(axes)), axis=0)
    return picks[fits(choices, shapes_of(site), picks, axes)]


def most_split(choices: Sequence[Choice], wanted: Sequence[int], site: Site, axes: Sequence[Axis]) -> Array:
    """The values that split by one of the wanted choices along as many devices as sizes allow, and leave the other axes unused."""
    whole = next(i for i, c in enumerate(choices) if c.name == "unused")
    picks = np.full((1, len(axes)), whole, np.int16)
    for i in wanted:
        masks = np.array(list(product((False, True), repeat=len(axes))), bool)
        picks = np.concatenate([picks, np.where(masks, i, whole).astype(np.int16)])
    picks = only(choices, picks, site, axes)
    degree = np.prod(np.where(picks == whole, 1, [a.size for a in axes]), axis=1)
    best = picks[degree == degree.max()]
    if len(wanted) != 1 or not axes:
        return best
    return best[np.lexsort((best == whole).T[::-1])[:1]]  # of as many devices, the first axes


def without(problem: Problem, forbidden: Mapping[int, Array]) -> Problem:
    """The problem without some pairs of values: [first's, second's] of an edge, by its number."""
    known, edges = dict[tuple[str, bytes], Cost](), list[Edge]()
    for e, edge in enumerate(problem.edges):
        if e not in forbidden or not forbidden[e].any():
            edges.append(edge)
            continue
        key = edge.cost.key, forbidden[e].tobytes()
        if key not in known:
            known[key] = Cost("", np.where(forbidden[e], np.inf, edge.cost.time), edge.cost.memory)
        edges.append(replace(edge, cost=known[key]))
    return replace(problem, edges=tuple(edges))
