"""Restrictions of the search: the strategies of published systems, or of people, as subsets of its values.

A restriction allows every operator some of its values, and forbids some pairs of values along edges. Exact search decides the rest,
so the result is the best strategy of its kind. Everything else, costs included, is the same as in the search that it
restricts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from unity.base.errors import InfeasibleError
from unity.pcg.propagation.choice import Choice
from unity.pcg.types.axis import Axis
from unity.search.cost.assembly import Assembled
from unity.search.cost.cost import SiteCost, site_cost
from unity.search.session import Candidate, Search
from unity.search.solver.frontier import ParetoFrontier, fastest_fitting, frontier
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Array, Cost, Edge, Point, Problem
from unity.search.space.configurations import Domain, domain_of_picks, fits, ranks, shapes_of
from unity.search.space.dimensions import ProgramDimensions
from unity.search.space.offers import Offers, offered
from unity.search.space.sites import Site, Sites


@dataclass(frozen=True, eq=False)
class Structure:
    """The facts about a graph that restrictions refer to: choices, the dimensions that these follow, samples, and weights."""

    search: Search

    @cached_property
    def opened(self) -> Sites:
        return self.search.assembled.opened

    @cached_property
    def choices(self) -> Offers:
        """The choices of every site. No published system moves a value inside of an operator."""
        return [tuple(c for c in choices if not c.moves) for choices in offered(self.opened.sites)]

    @cached_property
    def rank(self) -> list[tuple[int, ...]]:
        """For every choice the number of the dimension that it follows; equal numbers mean the same dimension."""
        return ranks(self.opened.sites, self.choices)

    @cached_property
    def dimensions(self) -> ProgramDimensions:
        """The dimensions of the program."""
        return ProgramDimensions(self.opened, self.choices, self.rank)

    @property
    def samples(self) -> frozenset[int]:
        """The dimensions of samples."""
        return self.dimensions.samples

    @property
    def data(self) -> frozenset[int]:
        """The dimensions of all arguments that are not weights."""
        return self.dimensions.data

    @property
    def weights(self) -> tuple[bool, ...]:
        """For every site, whether it is computed from weights alone."""
        return self.dimensions.weights

    @cached_property
    def users(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For every site, the users of its results: (site, operand)."""
        users: list[list[tuple[int, int]]] = [[] for _ in self.opened.sites]
        for u, site in enumerate(self.opened.sites):
            for p, port in enumerate(site.ports):
                users[port.source].append((u, p))
        return tuple(map(tuple, users))

    def name(self, s: int) -> str:
        """Return a site's name for messages: its operator, and the user's source line."""
        site = self.opened.sites[s]
        what = site.node.kind if site.node is not None else site.kind
        source = site.node.source if site.node is not None else ""
        return f"{source}: {what} of {', '.join(map(str, site.results))}" if source else f"{what} of {site.results[0]}"


@dataclass(frozen=True, eq=False)
class RestrictedSpace:
    """The graph with some of its values, and the problem on them: that of `assembled`, with pairs of values forbidden."""

    assembled: Assembled
    problem: Problem

    @cached_property
    def minimizer(self) -> Minimizer:
        return Minimizer(self.problem)

    def at(self, weight: float) -> Point | None:
        """Return the minimum of time + weight * memory; None if no strategy is left."""
        points = self.minimizer.at([weight])
        return points[0] if points else None

    def frontier(self) -> ParetoFrontier:
        """Return the trade-off between time and memory inside the restriction."""
        return frontier(self.problem, minimizer=self.minimizer)

    def strategy(self, point: Point) -> Point:
        """Return a point with the variables of the graph alone, if the problem has more."""
        sites, edges = len(self.assembled.domains), len(self.assembled.ports)
        alternatives = point.alternatives
        own = replace(alternatives, unary=alternatives.unary[:sites], edges=alternatives.edges[:edges])
        return replace(point, values=point.values[:sites], alternatives=own)

    def under(self, search: Search, limit: float) -> Candidate | None:
        """Return the fastest strategy found that fits the limit; if none does, the leanest; None if no strategy is left at all."""
        candidates: dict[Point, Candidate] = {}

        def candidate(point: Point) -> Candidate:
            if point not in candidates:
                candidates[point] = search.candidate(self.assembled, self.strategy(point))
            return candidates[point]

        fastest, leanest = self.at(0.0), self.at(np.inf)
        if fastest is None or leanest is None:
            return None
        if candidate(fastest).memory <= limit:
            return candidate(fastest)
        fitting = fastest_fitting(self.minimizer, (0.0, np.inf), lambda p: candidate(p).memory <= limit)
        return candidate(fitting or leanest)


def restricted(
    structure: Structure, values: Callable[[int, Site], Array], distinguish: Callable[[int], object] = lambda s: None
) -> Assembled:
    """Return the search's graph with other values for its sites.

    Args:
        structure: the structure of the graph.
        values: returns a site's choices along all axes, [values, axes]; they are then checked against sizes.
        distinguish: tells sites apart that are equal to the search. Of those, sites with equal results share their values.

    Raises:
        InfeasibleError: an operator is left without any value.
    """
    base, axes = structure.search.assembled, structure.search.machine.axes
    shared: dict[tuple, tuple[Domain, SiteCost]] = {}
    domains, costs = list[Domain](), list[SiteCost]()
    for s, site in enumerate(base.opened.sites):
        same = (id(base.domains[s]), distinguish(s))
        if same not in shared:
            picks = only(structure.choices[s], values(s, site), site, axes)
            if not len(picks):
                raise InfeasibleError(f"{structure.name(s)}: no way to split it is left by the restriction on {base.machine.name}")
            near = domain_of_picks(structure.choices[s], picks, shapes_of(site), axes)
            shared[same] = near, site_cost(site, near, base.machine, base.training)
        domains.append(shared[same][0])
        costs.append(shared[same][1])
    return replace(base, domains=tuple(domains), costs=tuple(costs), port_costs={}, rerun=False)


def only(choices: Sequence[Choice], picks: Array, site: Site, axes: Sequence[Axis]) -> Array:
    """Return the values that sizes allow, each once."""
    if not axes:  # one device
        return np.zeros((1, 0), np.int16)
    picks = np.unique(np.asarray(picks, np.int16).reshape(-1, len(axes)), axis=0)
    return picks[fits(choices, shapes_of(site), picks, axes)]


def most_split(choices: Sequence[Choice], wanted: Sequence[int], site: Site, axes: Sequence[Axis]) -> Array:
    """Return the values that split by one of the wanted choices over as many devices as sizes allow, with other axes unused."""
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
    return best[np.lexsort((best == whole).T[::-1])[:1]]  # the one that uses the first axes


def without(problem: Problem, forbidden: Mapping[int, Array]) -> Problem:
    """Return the problem without some pairs of values: [first's, second's] of an edge, by its number."""
    restricted_costs, edges = dict[tuple[str, bytes], Cost](), list[Edge]()
    for e, edge in enumerate(problem.edges):
        if e not in forbidden or not forbidden[e].any():
            edges.append(edge)
            continue
        key = edge.cost.key, forbidden[e].tobytes()
        if key not in restricted_costs:
            restricted_costs[key] = Cost("", np.where(forbidden[e], np.inf, edge.cost.time), edge.cost.memory)
        edges.append(replace(edge, cost=restricted_costs[key]))
    return replace(problem, edges=tuple(edges))
