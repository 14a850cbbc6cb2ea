"""Assembly of the optimization problem of a graph on a machine: a domain and a cost for every site, and a cost for every port."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property

import numpy as np

from unity.base.lru_cache import LRUCache
from unity.machine.machine import Machine
from unity.machine.resharding_tables import Types, contributing_pairs, distinct_changes, stationary_pairs
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.parallel.parallelize import Assignment
from unity.pcg.types.accumulation import growth
from unity.pcg.types.parallel_type import Type
from unity.search.cost.cost import SiteCost, Training, fraction, site_cost, slots_of
from unity.search.cost.exposure import FULL, Exposure
from unity.search.solver.problem import Cost, Edge, Point, Problem
from unity.search.space.configurations import Domain, Limits, domain, ranks
from unity.search.space.dimensions import ProgramDimensions, from_weights
from unity.search.space.masks import NOTHING, Restrict, marked
from unity.search.space.offers import offered
from unity.search.space.opening import sites_of
from unity.search.space.sites import Port, Site, Sites

PORTS = 256_000_000  # bytes of the cache of port costs


class Recomputed(IntEnum):
    """The part of an operand's producer that the backward pass recomputes."""

    NOTHING = 0
    INNER_VALUES = 1
    OPERATOR = 2


@dataclass(frozen=True, eq=False)
class Assembled:
    """The problem of a graph on a machine, with the translation of its points back into assignments.

    Args:
        opened: The sites: the variables of the problem.
        domains: The values of every site.
        costs: The costs of every site's values.
        ports: The edges of the problem, as (site, operand).
        port_costs: A cache of the costs of ports, shared with problems that have other domains.
        rerun: Whether the backward pass may rerun operators instead of keeping their results (`Site.reader`).
        exposure: The parts of the seconds of communication that count.
    """

    graph: PCG
    machine: Machine
    training: Training
    opened: Sites
    domains: tuple[Domain, ...]
    costs: tuple[SiteCost, ...]
    ports: tuple[tuple[int, int], ...]
    port_costs: dict[str, Cost] = field(default_factory=dict)
    rerun: bool = False
    exposure: Exposure = FULL

    @cached_property
    def unary(self) -> tuple[Cost, ...]:
        """The cost of every site alone, which bounds a program without the prices of its changes of type."""
        return tuple(self.site_terms(s, d, c) for s, (d, c) in enumerate(zip(self.domains, self.costs, strict=True)))

    @cached_property
    def problem(self) -> Problem:
        """The factor graph."""
        edges = []
        for s, p in self.ports:
            port = self.opened.sites[s].ports[p]
            edges.append(Edge(port.source, s, self.port_cost(s, p, port)))
        return Problem(tuple(len(d) for d in self.domains), self.unary, tuple(edges))

    def site_terms(self, site: int, own: Domain, cost: SiteCost) -> Cost:
        """Return the cost of a site alone; the alternatives of a site that may rerun are on the edge to its user."""
        time, memory = self.exposure.of_site(cost).alternatives
        if self.runs_again(site):
            time, memory = time[:1], memory[:1]
        return Cost(_key(own.key, time.tobytes(), memory.tobytes()), time, memory)

    def port_cost(self, s: int, p: int, port: Port) -> Cost:
        """Return the cost of the change of type between a producer and a user, with its alternatives."""
        before, first = self.domains[port.source].types[self.position(port)]
        after, second = self.domains[s].types[p]
        product = self.opened.sites[s].is_product
        ends = self.domains[port.source].key, self.domains[s].key, p
        key = _key(*ends, port.as_priced, product, self.training.backward)
        if self.exposure is not FULL:
            key = _key(key, self.exposure, self.weights[port.source])
        producer = self.costs[port.source] if self.runs_again(port.source) else None
        if producer is not None:
            key = _key(
                key,
                *(part.tobytes() for part in (producer.once, producer.memory, producer.whole, producer.saved) if part is not None),
            )
        if key not in self.port_costs:
            time, memory = self.change(before, after, port, product)
            pairs = first[:, None], second
            time, memory = time[:, *pairs], memory[:, *pairs]
            if producer is not None:
                once_more = replace(port, gradient=False, kept=0.0, again=False, repeats=0, passed=0, hoisted=1)
                forward, _ = self.change(before, after, once_more, product)
                site = self.opened.sites[port.source]
                small = sum(p.tensor.nbytes for k, p in enumerate(site.ports) if not p.kept and k not in site.instead)
                time, memory = _with_producer(producer, time, memory, forward[:, *pairs], small * port.kept)
            self.port_costs[key] = Cost(key, time, memory)
        return self.port_costs[key]

    def runs_again(self, site: int) -> bool:
        """Return whether the backward pass may rerun a site with its user."""
        return self.rerun and self.costs[site].whole is not None

    @cached_property
    def weights(self) -> tuple[bool, ...]:
        """For every site, whether it depends on weights alone."""
        return from_weights(self.opened)

    @property
    def whole(self) -> bool:
        """Whether the domains have all values, so that the optimum of the problem is the optimum of the graph."""
        return all(d.whole for d in self.domains)

    @cached_property
    def working_sets(self) -> tuple[np.ndarray, ...]:
        """For every site, the bytes on one device of its operands and results, an entry for each value; 0 for arguments."""
        totals: dict[int, np.ndarray] = {}
        for site, d, cost in zip(self.opened.sites, self.domains, self.costs, strict=True):
            if id(cost) not in totals:
                tensors = [] if site.kind == "input" else [*(port.tensor for port in site.ports), *site.results]
                parts = (t.nbytes * fraction(d, k, self.machine) for k, t in enumerate(tensors))
                totals[id(cost)] = sum(parts, np.zeros(len(d)))
        return tuple(totals[id(cost)] for cost in self.costs)

    def limited(self, limits: Sequence[float]) -> Assembled:
        """Return the problem where each site's working set has a limit in bytes; larger ones take infinitely long."""
        limited: dict[tuple[int, float], SiteCost] = {}
        for cost, nbytes, limit in zip(self.costs, self.working_sets, limits, strict=True):
            if (id(cost), limit) not in limited:
                limited[id(cost), limit] = replace(cost, forward=np.where(nbytes > limit, np.inf, cost.forward))
        return replace(self, costs=tuple(limited[id(cost), limit] for cost, limit in zip(self.costs, limits, strict=True)))

    def position(self, port: Port) -> int:
        """Return the position of a port's tensor among the operands and results of its producer."""
        return len(self.opened.sites[port.source].ports) + port.index

    def change(self, before: Types, after: Types, port: Port, product: bool) -> tuple[np.ndarray, np.ndarray]:
        """Price all changes of type: seconds and bytes, [alternatives, before, after].

        The first alternative keeps the changed operand; the second gathers it again in the backward pass, and is offered for
        operands of products only. A change along axes whose devices do not run the port together takes infinitely long, as does a
        contribution that is ruled out.
        """
        time, memory = self._change(before, after, port, product)
        if port.apart:
            over = [k for k, axis in enumerate(self.machine.axes) if axis.name in port.apart]
            time = np.where(stationary_pairs(before, after, self.machine.axes, over), time, np.inf)
        if not port.contributes:
            time = np.where(contributing_pairs(before, after), np.inf, time)
        return time, memory

    def _change(self, before: Types, after: Types, port: Port, product: bool) -> tuple[np.ndarray, np.ndarray]:
        """Price all changes of type as if all devices ran the port together."""
        n = port.tensor.nbytes
        c, index = distinct_changes(self.machine, before, after, n, growth(port.tensor.dtype, self.machine.reduce_in))
        if self.exposure is not FULL:
            c = self.exposure.of_changes(c, self.weights[port.source])
        times, backward = port.times, self.training.backward
        runs = 0.0 if port.dead else 1 / port.hoisted + port.repeats
        time = runs * c.forward
        if port.gradient and backward:
            time = time + c.backward - (c.merged if port.last else 0.0)
        time = time * times
        if not (port.kept and backward):
            return time[index][None], np.zeros((1, *index.shape))
        unchanged = port.sole * before.parts(self.machine.axes)[:, None]
        residual = port.kept * n * c.size[index]
        memory = np.where(residual > 0, residual, port.kept * n * unchanged)
        if not (product and c.gathered.any()):
            return time[index][None], memory[None]
        # A remat does not hoist what it recomputes (`pcg.analysis.hoisting`), and a gradient needs it for its own operator alone.
        more = 2 + port.passed - 1 / port.hoisted - port.repeats if port.again else 1.0
        again = np.where(c.gathered, time + more * times * c.forward, np.inf)
        without = np.where(c.gathered[index], port.kept * n * unchanged, memory)
        return np.stack([time[index], again[index]]), np.stack([memory, without])

    def assignment(self, point: Point) -> Assignment:
        """Return the strategy that a point encodes."""
        opened, values = self.opened, point.values
        second = [opened.sites[s] for s, alternative in enumerate(point.alternatives.unary) if alternative == 1]
        hosted = frozenset(id(site.node) for site in second if site.kind == "input")
        recomputed = {id(site.node) for site in second if site.kind != "input"}
        again, rerun = set[tuple[int, int]](), set[int]()
        for (s, p), edge, alternative in zip(self.ports, self.problem.edges, point.alternatives.edges, strict=True):
            gathered, part = self.alternative_of(edge, alternative)
            again |= {(s, p)} if gathered or part == Recomputed.OPERATOR else set()
            producer = id(opened.sites[edge.first].node)
            recomputed |= {producer} if part == Recomputed.INNER_VALUES else set()
            rerun |= {producer} if part == Recomputed.OPERATOR else set()
        results: dict[int, tuple[Type, ...]] = {}
        operands: dict[tuple[int, int], tuple[Type, ...]] = {}
        marked: set[tuple[int, int]] = set()
        for node in _all_nodes(self.graph):
            site = opened.of_node.get(id(node))
            if id(node) in opened.results:
                results[id(node)] = tuple(self.result_type(values, s, k) for s, k in opened.results[id(node)])
            elif site is not None:
                results[id(node)] = tuple(self.result_type(values, site, k) for k in range(len(node.tensors)))
            for p in range(len(node.operands)):
                free = opened.operands.get((id(node), p), ())
                through = [self.domains[f].type_of(values[f], 0) for f in free]
                if site is not None and node.inside is None:
                    through.append(self.domains[site].type_of(values[site], p))
                    if (site, p) in again:
                        marked.add((id(node), p))
                operands[id(node), p] = tuple(through)
        outputs = {
            key: tuple(self.domains[f].type_of(values[f], opened.sites[f].end) for f in free)
            for key, free in opened.outputs.items()
        }
        again = frozenset(marked), frozenset(recomputed), frozenset(rerun)
        return Assignment(self.machine.axes, results, operands, outputs, *again, hosted)

    def alternative_of(self, edge: Edge, alternative: int) -> tuple[bool, Recomputed]:
        """Return whether an alternative of a port repeats the change of type, and the part of the producer that it recomputes."""
        if not self.runs_again(edge.first):
            return alternative == 1, Recomputed.NOTHING
        parts = 1 if self.costs[edge.first].saved is None else 2
        last = len(edge.cost.time) - 1
        if alternative == last:
            return False, Recomputed.OPERATOR
        part, gathered = divmod(alternative, last // parts)
        return bool(gathered), Recomputed(part)

    def result_type(self, values: tuple[int, ...], site: int, k: int) -> Type:
        """Return the type of result `k` of a site."""
        return self.domains[site].type_of(values[site], len(self.opened.sites[site].ports) + k)


def _with_producer(
    producer: SiteCost, time: np.ndarray, memory: np.ndarray, forward: np.ndarray, small: float
) -> tuple[np.ndarray, np.ndarray]:
    """Combine the alternatives of a port with those of its producer: seconds and bytes, [alternatives, producer, user].

    The result has each alternative of the port unchanged, then, if the producer allows it, each with its inner values recomputed,
    and at last one where the backward pass reruns the producer and repeats the change of type, so that neither is kept.

    Args:
        producer: The costs of the producer's values.
        time: Seconds of the port's own alternatives.
        memory: Bytes of the port's own alternatives.
        forward: Seconds of one more change of type.
        small: Bytes of the producer's arguments that are kept for the rerun.
    """
    times, memories = [time], [memory]
    once = producer.once[:, None]
    if producer.saved is not None:
        times.append(np.where(producer.saved[:, None] > 0, time + once, np.inf))
        memories.append(memory - producer.saved[:, None])
    assert producer.whole is not None
    allowed = np.isfinite(producer.whole)[:, None]
    times.append(np.where(allowed, time[:1] + once + forward[:1], np.inf))
    memories.append(np.broadcast_to(np.where(allowed, small - producer.whole[:, None], 0.0), time[:1].shape))
    return np.concatenate(times), np.concatenate(memories)


def _all_nodes(graph: PCG) -> list[Node]:
    return [node for node, _ in graph.walk()]


def _key(*parts: object) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
    return digest.hexdigest()


def _nbytes(cost: Cost) -> int:
    """Return the bytes of a table of costs."""
    return cost.time.nbytes + cost.memory.nbytes


@dataclass(frozen=True, eq=False)
class Listed:
    """Caches of domains and costs for one machine and training, shared by searches of similar graphs."""

    domains: dict[tuple, Domain] = field(default_factory=dict)
    costs: dict[tuple, SiteCost] = field(default_factory=dict)
    ports: dict[str, Cost] = field(default_factory=lambda: LRUCache[str, Cost](PORTS, _nbytes))


def assemble(
    graph: PCG,
    differentiated: Collection[int],
    machine: Machine,
    training: Training,
    limits: tuple[Limits, ...] | None = None,
    listed: Listed | None = None,
    restrict: Restrict = marked,
    rerun: bool = False,
    buffered: bool = False,
) -> Assembled:
    """Assemble the problem of a serial graph on a machine; equal sites share one domain and one cost.

    Args:
        graph: The serial graph.
        differentiated: The inputs, by number, whose gradients are wanted.
        machine: The devices.
        training: Whether there is a backward pass, and the sizes of the optimizer's state.
        limits: The limits of the domains (see `configurations.domain`); None takes the widest affordable ones.
        listed: Caches shared with other searches.
        restrict: The user's constraints.
        rerun: Whether the backward pass may rerun operators.
        buffered: Whether reductions read what they reduce from memory, as on a CPU, so that it is a residual.

    Raises:
        InfeasibleError: `restrict` leaves a site no value, or the axes of a pipeline's stages divide none.
    """
    listed = listed or Listed()
    opened = sites_of(graph, differentiated, training.backward, buffered)
    offers = offered(opened.sites)
    order = ranks(opened.sites, offers)
    shared, costs = listed.domains, listed.costs
    domains, terms = [], []
    masks = restrict(ProgramDimensions(opened, offers, order), machine)
    for s, (site, cs, rank) in enumerate(zip(opened.sites, offers, order, strict=True)):
        mask = masks.get(s, NOTHING)
        key = (*_signature(site, cs, rank), slots_of(site, training), limits, mask)
        if key not in shared:
            shared[key] = domain(site, cs, rank, machine.axes, limits, mask)
            costs[key] = site_cost(site, shared[key], machine, training)
        domains.append(shared[key])
        terms.append(costs[key])
    # A carry that a step forwards unchanged is an operand of its own site: its type cannot change, so it needs no edge.
    ports = tuple((s, p) for s, site in enumerate(opened.sites) for p, port in enumerate(site.ports) if port.source != s)
    return Assembled(graph, machine, training, opened, tuple(domains), tuple(terms), ports, listed.ports, rerun)


def _signature(site: Site, cs: tuple, rank: tuple[int, ...]) -> tuple:
    """Return a key of all that a site's domain and cost depend on."""
    order = sorted(set(rank))
    inside = site.body
    body = (inside.key, inside.numbering) if inside is not None else ""  # choices name variables inside of an operator
    extended = any(c.halos for c in cs)
    ports = tuple((str(p.tensor), p.gradient, extended and p.sole) for p in site.ports)
    relative = tuple(order.index(r) for r in rank)
    flags = (site.kind, site.around, site.hoisted, site.flows, tuple(site.stored), site.weight, site.step, site.whole)
    stages = (site.along, site.staged and site.staged.states, site.sends, site.returns)
    again = (site.recomputable, site.reader is not None, site.instead, site.repeats, site.computed)
    inner = (site.inner, site.saved, site.offloaded, site.stacking)
    return (body, ports, inner, tuple(map(str, site.results)), tuple(c.states for c in cs), relative, flags, stages, again)
