"""From a graph and a machine to the optimizer's problem: a domain and a cost for every site, a cost for every port."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from unity.base.lru_cache import Recent
from unity.machine.machine import Machine
from unity.machine.resharding_tables import Types, distinct_changes, stationary_pairs
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.parallel.parallelize import Assignment
from unity.pcg.types.accumulation import growth
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import Type
from unity.search.cost.cost import SiteCost, Training, fraction, site_cost
from unity.search.solver.problem import Cost, Edge, Point, Problem
from unity.search.space.configurations import Domain, Limits, domain, ranks
from unity.search.space.dimensions import Dimensions
from unity.search.space.masks import NOTHING, Restrict, marked
from unity.search.space.offers import offered
from unity.search.space.opening import sites_of
from unity.search.space.sites import Port, Site, Sites

PORTS = 256_000_000  # bytes of the costs of ports that are remembered
NOTHING_AGAIN, INNER, RERUN = range(3)  # of what makes an operand: what is computed again in the backward pass


@dataclass(frozen=True, eq=False)
class Assembled:
    """Everything the search needs, and the way back from a point to an assignment."""

    graph: PCG
    machine: Machine
    training: Training
    opened: Sites
    domains: tuple[Domain, ...]
    costs: tuple[SiteCost, ...]
    ports: tuple[tuple[int, int], ...]  # (site, operand) of every edge
    known: dict[str, Cost] = field(default_factory=dict)  # costs of ports that were computed, also for other domains
    rerun: bool = False  # whether operators may run again in the backward pass, their results not kept (`Site.reader`)

    @cached_property
    def problem(self) -> Problem:
        """The factor graph."""
        unary = tuple(self.site_terms(s, d, c) for s, (d, c) in enumerate(zip(self.domains, self.costs, strict=True)))
        edges = []
        for s, p in self.ports:
            port = self.opened.sites[s].ports[p]
            edges.append(Edge(port.source, s, self.port_cost(s, p, port)))
        return Problem(tuple(len(d) for d in self.domains), unary, tuple(edges))

    def site_terms(self, site: int, own: Domain, cost: SiteCost) -> Cost:
        """What a site costs alone. What may run again with its reader has all alternatives there."""
        time, memory = cost.alternatives
        if self.runs_again(site):
            time, memory = time[:1], memory[:1]
        return Cost(_key(own.key, time.tobytes(), memory.tobytes()), time, memory)

    def port_cost(self, s: int, p: int, port: Port) -> Cost:
        """The change of type between a producer and a user, kept or gathered again."""
        before, first = self.domains[port.source].types[self.position(port)]
        after, second = self.domains[s].types[p]
        text = f"{self.domains[port.source].key} {port.index} {self.domains[s].key} {p} {port.tensor} {port.times} {port.hoisted}"
        node = self.opened.sites[s].node
        product = node is not None and facts_of(node.kind).product
        key = _key(
            text,
            port.gradient,
            port.kept,
            port.sole,
            port.again,
            port.repeats,
            port.passed,
            port.last,
            port.apart,
            product,
            self.training.backward,
        )
        made = self.costs[port.source] if self.runs_again(port.source) else None
        if made is not None:
            key = _key(key, *(part.tobytes() for part in (made.once, made.memory, made.whole, made.saved) if part is not None))
        if key not in self.known:
            time, memory = self.change(before, after, port, product)
            pairs = first[:, None], second
            time, memory = time[:, *pairs], memory[:, *pairs]
            if made is not None:
                once_more = replace(port, gradient=False, kept=0.0, again=False, repeats=0, passed=0, hoisted=1)
                forward, _ = self.change(before, after, once_more, product)
                maker = self.opened.sites[port.source]
                small = sum(p.tensor.nbytes for k, p in enumerate(maker.ports) if not p.kept and k not in maker.instead)
                time, memory = with_reader(made, time, memory, forward[:, *pairs], small * port.kept)
            self.known[key] = Cost(key, time, memory)
        return self.known[key]

    def runs_again(self, site: int) -> bool:
        """Whether a site may run again in the backward pass with its reader."""
        return self.rerun and self.costs[site].whole is not None

    @property
    def whole(self) -> bool:
        """Whether no value was left out."""
        return all(d.whole for d in self.domains)

    @cached_property
    def ends(self) -> tuple[np.ndarray, ...]:
        """For every site, the bytes of its operands and results on one device together, for every value. None of arguments."""
        found: dict[int, np.ndarray] = {}
        for site, d, cost in zip(self.opened.sites, self.domains, self.costs, strict=True):
            if id(cost) not in found:
                tensors = [] if site.kind == "input" else [*(port.tensor for port in site.ports), *site.results]
                parts = (t.nbytes * fraction(d, k, self.machine) for k, t in enumerate(tensors))
                found[id(cost)] = sum(parts, np.zeros(len(d)))
        return tuple(found[id(cost)] for cost in self.costs)

    def without(self, most: Sequence[float]) -> Assembled:
        """The same, but no operator may have more than so many bytes of operands and results at once: a number for every site."""
        made: dict[tuple[int, float], SiteCost] = {}
        for cost, ends, limit in zip(self.costs, self.ends, most, strict=True):
            if (id(cost), limit) not in made:
                made[id(cost), limit] = replace(cost, forward=np.where(ends > limit, np.inf, cost.forward))
        return replace(self, costs=tuple(made[id(cost), limit] for cost, limit in zip(self.costs, most, strict=True)))

    def position(self, port: Port) -> int:
        """Where a port's tensor stands among the ends of the site that makes it."""
        return len(self.opened.sites[port.source].ports) + port.index

    def change(self, before: Types, after: Types, port: Port, product: bool) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and bytes of all changes, [alternatives, before, after].

        Only a product's operand may be gathered again: nothing else of it is computed twice then. A change that would need
        devices that are not there takes infinitely long.
        """
        time, memory = self.priced(before, after, port, product)
        if port.apart:
            over = [k for k, axis in enumerate(self.machine.axes) if axis.name in port.apart]
            time = np.where(stationary_pairs(before, after, self.machine.axes, over), time, np.inf)
        return time, memory

    def priced(self, before: Types, after: Types, port: Port, product: bool) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and bytes of all changes, were all devices there."""
        c, index = distinct_changes(self.machine, before, after, growth(port.tensor.dtype, self.machine.reduce_in))
        n, times, backward = port.tensor.nbytes, port.times, self.training.backward
        runs = 1 / port.hoisted + port.repeats
        time = runs * (c.forward[0] + c.forward[1] * n)
        if port.gradient and backward:
            time = time + c.backward[0] + c.backward[1] * n - (c.merged if port.last else 0.0)
        time = time * times
        if not (port.kept and backward):
            return time[index][None], np.zeros((1, *index.shape))
        unchanged = port.sole * before.parts(self.machine.axes)[:, None]
        held = port.kept * n * c.size[index]
        memory = np.where(held > 0, held, port.kept * n * unchanged)
        if not (product and c.gathered.any()):
            return time[index][None], memory[None]
        # in a remat what is made again is not hoisted (`pcg.hoisting`), and a gradient needs it for its own operator alone
        more = 2 + port.passed - 1 / port.hoisted - port.repeats if port.again else 1.0
        again = np.where(c.gathered, time + more * times * (c.forward[0] + c.forward[1] * n), np.inf)
        without = np.where(c.gathered[index], port.kept * n * unchanged, memory)
        return np.stack([time[index], again[index]]), np.stack([memory, without])

    def assignment(self, point: Point) -> Assignment:
        """The strategy that a point stands for."""
        opened, values = self.opened, point.values
        recomputed = {id(opened.sites[s].node) for s, alternative in enumerate(point.alternatives.unary) if alternative == 1}
        again, rerun = set[tuple[int, int]](), set[int]()
        for (s, p), edge, alternative in zip(self.ports, self.problem.edges, point.alternatives.edges, strict=True):
            gathered, way = self.taken(edge, alternative)
            again |= {(s, p)} if gathered or way == RERUN else set()
            made = id(opened.sites[edge.first].node)
            recomputed |= {made} if way == INNER else set()
            rerun |= {made} if way == RERUN else set()
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
        return Assignment(self.machine.axes, results, operands, outputs, frozenset(marked), frozenset(recomputed), frozenset(rerun))

    def taken(self, edge: Edge, alternative: int) -> tuple[bool, int]:
        """What an alternative of a port means: whether its change of type is made again, and what of the operand's maker."""
        if not self.runs_again(edge.first):
            return alternative == 1, NOTHING_AGAIN
        ways = 1 if self.costs[edge.first].saved is None else 2
        last = len(edge.cost.time) - 1
        if alternative == last:
            return False, RERUN
        way, gathered = divmod(alternative, last // ways)
        return bool(gathered), way

    def result_type(self, values: tuple[int, ...], site: int, k: int) -> Type:
        """The type of a site's result."""
        return self.domains[site].type_of(values[site], len(self.opened.sites[site].ports) + k)


def with_reader(
    made: SiteCost, time: np.ndarray, memory: np.ndarray, forward: np.ndarray, small: float
) -> tuple[np.ndarray, np.ndarray]:
    """The alternatives of a port, [alternatives, maker's values, reader's], with those of what its maker keeps.

    Each as it is, then each with the maker's inner values computed again, if they may be. Then one where the maker runs again as a
    whole, and what its reader takes is made anew: nothing of either is kept. `forward`: seconds of that change of type; `small`:
    bytes of arguments that are kept for it.
    """
    times, bytes_ = [time], [memory]
    once = made.once[:, None]
    if made.saved is not None:
        times.append(np.where(made.saved[:, None] > 0, time + once, np.inf))
        bytes_.append(memory - made.saved[:, None])
    assert made.whole is not None
    allowed = np.isfinite(made.whole)[:, None]
    times.append(np.where(allowed, time[:1] + once + forward[:1], np.inf))
    bytes_.append(np.broadcast_to(np.where(allowed, small - made.whole[:, None], 0.0), time[:1].shape))
    return np.concatenate(times), np.concatenate(bytes_)


def _all_nodes(graph: PCG) -> list[Node]:
    return [node for node, _ in graph.walk()]


def _key(*parts: object) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else repr(part).encode())
    return digest.hexdigest()


def nbytes(cost: Cost) -> int:
    """Bytes of a table of costs."""
    return cost.time.nbytes + cost.memory.nbytes


@dataclass(frozen=True, eq=False)
class Listed:
    """What was listed and priced before for one machine and training, by what it depends on. For graphs that are much the same."""

    domains: dict[tuple, Domain] = field(default_factory=dict)
    costs: dict[tuple, SiteCost] = field(default_factory=dict)
    ports: dict[str, Cost] = field(default_factory=lambda: Recent[str, Cost](PORTS, nbytes))


def assemble(
    graph: PCG,
    differentiated: Collection[int],
    machine: Machine,
    training: Training,
    limits: tuple[Limits, ...] | None = None,
    listed: Listed | None = None,
    restrict: Restrict = marked,
    rerun: bool = False,
) -> Assembled:
    """Opens a serial graph for a machine. Equal sites share one domain and one cost. `limits`: see `configurations.domain`;
    `rerun`: see `Assembled`.

    Raises InfeasibleError where `restrict` leaves a site no value.
    """
    listed = listed or Listed()
    opened = sites_of(graph, differentiated, training.backward)
    found = offered(opened.sites)
    order = ranks(opened.sites, found)
    shared, costs = listed.domains, listed.costs
    domains, terms = [], []
    masks = restrict(Dimensions(opened, found, order), machine)
    for s, (site, cs, rank) in enumerate(zip(opened.sites, found, order, strict=True)):
        mask = masks.get(s, NOTHING)
        same = (*_signature(site, cs, rank), limits, mask)
        if same not in shared:
            shared[same] = domain(site, cs, rank, machine.axes, limits, mask)
            costs[same] = site_cost(site, shared[same], machine, training)
        domains.append(shared[same])
        terms.append(costs[same])
    # A carry that a step hands on unchanged is an operand of its own site: nothing changes on the way, and nothing is to be chosen.
    ports = tuple((s, p) for s, site in enumerate(opened.sites) for p, port in enumerate(site.ports) if port.source != s)
    return Assembled(graph, machine, training, opened, tuple(domains), tuple(terms), ports, listed.ports, rerun)


def _signature(site: Site, cs: tuple, rank: tuple[int, ...]) -> tuple:
    """What a site's domain and cost depend on."""
    order = sorted(set(rank))
    body = site.node.body.key if site.node is not None and site.node.body is not None else ""
    extended = any(c.halos for c in cs)
    ports = tuple((str(p.tensor), p.gradient, extended and p.sole) for p in site.ports)
    relative = tuple(order.index(r) for r in rank)
    flags = (site.kind, site.around, site.hoisted, site.flows, tuple(site.stored), site.inner, site.weight, site.step, site.whole)
    stages = (site.along, site.staged and site.staged.states, site.sends, site.returns)
    again = (site.recomputable, site.reader is not None, site.instead, site.repeats, site.computed)
    return (body, ports, tuple(map(str, site.results)), tuple(c.states for c in cs), relative, flags, stages, again)
