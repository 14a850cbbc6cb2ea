"""A lower bound on the time of every strategy of a serial graph under a memory limit.

A first search leaves values out (`unity.search.space.configurations`), and refinement considers only those around its result. The
bound covers every legal value of every site. Each of its three steps relaxes the problem, so none excludes a strategy that fits and
is faster than a known one:

1. *Classes.* Values that differ only in the order of their choices on interchangeable axes form a class. In a problem over
   classes, each class and each pair of classes costs the least of all its members.
2. *Memory.* Arguments, gradients and optimizer slots are live together at the end of a step, so a strategy that fits has room for
   them at least. Their bytes are a sum over the arguments, which a Lagrangian relaxation bounds (`solver.lagrangian`). Residuals
   and working sets are not counted.
3. *Members.* Of the classes that a strategy faster than the known one may use, all members are put into a problem with exact costs.
   Its minimum, or the known time if that is less, is the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, product

import numpy as np

from unity.pcg.types.axis import Axis
from unity.search.cost.assembly import Assembled
from unity.search.cost.cost import SiteCost, site_cost
from unity.search.solver.bounds import ABOVE
from unity.search.solver.lagrangian import Lagrangian
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Array, Cost, Edge, Problem
from unity.search.space.configurations import Domain, domain_of_picks, legal, shapes_of
from unity.search.space.masks import allowed

# The most values of a site, and pairs of types of a tensor, that are priced: three axes of choices, and most tensors on four.
VALUES, PAIRS = 50_000, 2_000_000
# The most entries of tables over members: solving them takes some seconds.
ENTRIES = 10_000_000


def least_time(assembled: Assembled, known: float, limit: float) -> float | None:
    """Return seconds that no strategy within a memory limit goes below, at most `known`.

    Args:
        assembled: The problem of the graph, with any of its values.
        known: The seconds of some strategy.
        limit: Bytes on one device; infinite without a limit.

    Returns:
        The bound; None if the machine has too many axes to consider every value.
    """
    if (whole := _whole(assembled)) is None:
        return None
    classes = _Relaxation(whole, _classes)
    coarse = Lagrangian(Minimizer(classes.problem), limit)
    if coarse.least >= known * (1 - 2 * ABOVE):  # reduced by as much, in case its sums are rounded
        return min(known, coarse.least)
    members = classes.members(coarse.left(known))
    if _entries(members) > ENTRIES:
        return coarse.least
    fine = Lagrangian(Minimizer(_Relaxation(members, _singletons).problem), limit)
    return min(known, max(coarse.least, fine.least))


def _entries(assembled: Assembled) -> int:
    """Return the entries of all tables on two sites."""
    sites, sizes = assembled.opened.sites, [len(d) for d in assembled.domains]
    return sum(sizes[sites[s].ports[p].source] * sizes[s] for s, p in assembled.ports)


def _whole(assembled: Assembled) -> Assembled | None:
    """Return the problem with every legal value of every site; None if it is too large."""
    axes = assembled.machine.axes

    def legal_picks(site: int, old: Domain) -> Array:
        every = [*product(range(len(old.choices)), repeat=len(axes))]
        picks = np.array(every, np.int16).reshape(len(every), len(axes))
        picks = picks[legal(assembled.opened.sites[site], old.choices, picks, axes)]
        return allowed(old.mask, old.choices, picks, axes)

    if any(len(d.choices) ** len(axes) > VALUES for d in assembled.domains):
        return None
    whole = _with_picks(assembled, legal_picks)
    for s, p in whole.ports:
        port = whole.opened.sites[s].ports[p]
        if len(whole.domains[port.source].types[whole.position(port)][0]) * len(whole.domains[s].types[p][0]) > PAIRS:
            return None
    return whole


def _with_picks(assembled: Assembled, picks_of: Callable[[int, Domain], Array]) -> Assembled:
    """Return the problem with other values of every site; sites with equal domains and values share one domain."""
    shared: dict[tuple[int, bytes], tuple[Domain, SiteCost]] = {}
    domains, costs = list[Domain](), list[SiteCost]()
    axes = assembled.machine.axes
    for s, old in enumerate(assembled.domains):
        picks = picks_of(s, old)
        key = id(old), picks.tobytes()
        if key not in shared:
            site = assembled.opened.sites[s]
            own = domain_of_picks(old.choices, picks, shapes_of(site), axes, mask=old.mask)
            shared[key] = own, site_cost(site, own, assembled.machine, assembled.training)
        domains.append(shared[key][0])
        costs.append(shared[key][1])
    return replace(assembled, domains=tuple(domains), costs=tuple(costs), port_costs={})


@dataclass(frozen=True, eq=False)
class _Partition:
    """A partition of rows of an array: a member of every class, and the class of every row."""

    first: Array
    of: Array

    def least(self, table: Array, axis: int) -> Array:
        """Return the least entries of every class along an axis."""
        order = np.argsort(self.of, kind="stable")
        starts = np.flatnonzero(np.diff(self.of[order], prepend=-1))
        return np.minimum.reduceat(np.take(table, order, axis), starts, axis=axis)


Partitioning = Callable[[Array, Sequence[Axis]], _Partition]


def _classes(rows: Array, axes: Sequence[Axis]) -> _Partition:
    """Partition rows [rows, axes] into those that are equal but for the order on interchangeable axes."""
    ordered = rows.copy()
    for _, same in groupby(range(len(axes)), key=lambda k: axes[k].extent):
        group = list(same)
        ordered[:, group] = np.sort(rows[:, group], axis=1)
    _, first, of = np.unique(ordered, axis=0, return_index=True, return_inverse=True)
    return _Partition(first, of.reshape(-1))


def _singletons(rows: Array, axes: Sequence[Axis]) -> _Partition:
    """Partition rows into classes of one."""
    return _Partition(np.arange(len(rows)), np.arange(len(rows)))


@dataclass(frozen=True, eq=False)
class _Relaxation:
    """A problem over classes of values whose costs are the least of their members'; its memory is that of arguments alone.

    No operator recomputes or reruns, which only takes more time.
    """

    assembled: Assembled
    partitioning: Partitioning

    @cached_property
    def classes(self) -> dict[int, _Partition]:
        """The classes of the values of every domain, by its id."""
        axes = self.assembled.machine.axes
        return {id(d): self.partitioning(d.picks, axes) for d in {id(d): d for d in self.assembled.domains}.values()}

    @cached_property
    def problem(self) -> Problem:
        """The relaxed problem."""
        sites, domains = self.assembled.opened.sites, self.assembled.domains
        alone: dict[tuple, Cost] = {}
        for d, cost, site in zip(domains, self.assembled.costs, sites, strict=True):
            if (id(d), site.kind) not in alone:
                alone[id(d), site.kind] = self._alone(self.classes[id(d)], cost, site.kind == "input")
        pairs: dict[tuple, Cost] = {}
        edges = list[Edge]()
        for s, p in self.assembled.ports:
            port, is_product = sites[s].ports[p], sites[s].is_product
            key = id(domains[port.source]), id(domains[s]), p, port.as_priced, is_product
            if key not in pairs:
                pairs[key] = self._pair(s, p, is_product)
            edges.append(Edge(port.source, s, pairs[key]))
        sizes = tuple(len(self.classes[id(d)].first) for d in domains)
        return Problem(sizes, tuple(alone[id(d), site.kind] for d, site in zip(domains, sites, strict=True)), tuple(edges))

    def members(self, left: Sequence[Array]) -> Assembled:
        """Return the problem of all members of some classes of every site."""
        return _with_picks(self.assembled, lambda site, d: d.picks[np.isin(self.classes[id(d)].of, left[site])])

    def _alone(self, classes: _Partition, cost: SiteCost, is_argument: bool) -> Cost:
        """Return the cost of a site alone."""
        if not is_argument:
            time = classes.least(cost.time, 0)[None]
            return Cost("", time, np.zeros_like(time))
        time, memory = (classes.least(table, 1) for table in cost.alternatives)  # an optimizer's state may be on the host
        return Cost("", time, memory)

    def _pair(self, site: int, operand: int, is_product: bool) -> Cost:
        """Return the cost of the change of type between a producer and a user, of its fastest alternative."""
        assembled, axes = self.assembled, self.assembled.machine.axes
        port = assembled.opened.sites[site].ports[operand]
        producer, user = assembled.domains[port.source], assembled.domains[site]
        before, first = producer.types[assembled.position(port)]
        after, second = user.types[operand]
        old, new = self.partitioning(before.rows, axes), self.partitioning(after.rows, axes)
        time, _ = assembled.change(before, after, port, is_product)
        least = new.least(old.least(time.min(0), 0), 1)
        rows, columns = old.of[first[self.classes[id(producer)].first]], new.of[second[self.classes[id(user)].first]]
        pairs = least[np.ix_(rows, columns)]
        return Cost("", pairs[None], np.zeros((1, *pairs.shape)))
