"""Strategies that people choose by hand, as restrictions of the search; exact search decides everything that they leave open.

The axes of a mesh are divided in two: along the first ones (data) every operator splits its samples as far as sizes allow; along
the last ones (tensor) products with weights split the weights. If the division is open, each is tried and the best is taken.

- *data-parallel*: data axes alone; every device stores whole weights.
- *fsdp* (ZeRO-3): data axes alone; weights are stored in pieces as far as sizes allow and gathered for use, and gathered again or
  kept for the backward pass.
- *model-parallel* (Krizhevsky 2014, as OptCNN compares with it, section 6): tensor axes alone; products with weights split these by
  their output dimensions (OptCNN, figure 2b), so that nothing is summed over devices.
- *one-weird-trick* (Krizhevsky 2014): data parallelism up to the first dense layer, model parallelism from there on.
- *megatron* (Shoeybi et al. 2019): data and tensor axes in all mixtures. Along tensor axes products with weights split columns or
  rows; dimensions of arguments (samples, sequence) are never split there, pieces stay where they are until a sum over them is
  reduced, and that takes an all-reduce.
- *expert*: the strategy that the papers compare with by this name. Convolutional networks: one weird trick (FlexFlow, section
  8.1.1). Networks with embedding tables: tables split, everything else data parallel (Naumov et al. 2019; Unity, section 6.2).
  Recurrent networks (Wu et al. 2016): data parallelism between nodes, and in a node each layer on its own device. A mesh on
  which all devices run all layers cannot express that, so it is refused. (`benchmarks/seeds/steps.py` simulates it, as FlexFlow
  did.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement, product

import numpy as np

from unity.base.errors import InfeasibleError
from unity.baselines.restricted import RestrictedSpace, Structure, only, restricted, without
from unity.machine.resharding_tables import Types
from unity.pcg.capture.operator_names import LOOKUPS
from unity.pcg.types.factors import is_convolution
from unity.search.cost.assembly import Assembled
from unity.search.published import Asked
from unity.search.session import Candidate, Search
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Array, Point
from unity.search.space.configurations import IDLE
from unity.search.space.sites import Site


@dataclass(frozen=True)
class Mesh:
    """A mesh whose axes are divided in data and tensor axes.

    Args:
        data: the number of axes that split the samples.
        pieces: whether weights are stored in pieces along the data axes.
        forced: whether products with weights must split the weights along the tensor axes, as far as sizes allow.
        columns: whether they may split them only by the dimensions of their results.
        features: whether the tensor axes split no dimension of an argument, only those of features.
    """

    data: int
    pieces: bool = False
    forced: bool = False
    columns: bool = False
    features: bool = False


KRIZHEVSKY = Mesh(0, forced=True, columns=True)  # model parallelism


def on_mesh(structure: Structure, mesh: Mesh | Callable[[int], Mesh]) -> Assembled:
    """Return the search's graph with the values that a mesh allows; with a mesh for each site, where they differ."""
    of = mesh if callable(mesh) else lambda s: mesh

    def apart(s: int) -> object:
        # sites that are equal to the search may still differ in which of their operands come from weights
        ports = structure.opened.sites[s].ports
        return of(s), structure.weights[s], tuple(structure.weights[p.source] for p in ports)

    return restricted(structure, lambda s, site: picks(structure, s, site, of(s)), apart)


def picks(structure: Structure, s: int, site: Site, mesh: Mesh) -> Array:
    """Return the values of a site on a mesh: split as far as possible along the data axes, and if forced also along the tensor
    axes.
    """
    choices, axes = structure.choices[s], structure.search.machine.axes
    idle = [i for i, c in enumerate(choices) if c.name in IDLE]
    split = [i for i in range(len(choices)) if along_data(structure, s, i, mesh)]
    tensor = [i for i in range(len(choices)) if along_tensor(structure, s, site, i, mesh)]
    first = {(i,) * k + (j,) * (mesh.data - k) for k in range(mesh.data + 1) for i in split or idle for j in idle}
    last = _at_most_two(tensor, len(axes) - mesh.data)
    values = only(choices, np.array([a + b for a, b in product(sorted(first), last)], np.int16), site, axes)
    values = _most(values, split, slice(0, mesh.data), structure)
    if mesh.forced and product_with_weight(structure, s, site):
        values = _most(values, [i for i in tensor if i not in idle], slice(mesh.data, len(axes)), structure)
    return values


def _most(values: Array, wanted: Iterable[int], some: slice, structure: Structure) -> Array:
    """Return the values that take one of the wanted choices on most devices along some axes; if none can, all values."""
    sizes = np.array([a.size for a in structure.search.machine.axes])[some]
    if not len(sizes) or not len(values):
        return values
    degree = np.prod(np.where(np.isin(values[:, some], list(wanted)), sizes, 1), axis=1)
    return values[degree == degree.max()]


def along_data(structure: Structure, s: int, i: int, mesh: Mesh) -> bool:
    """Return whether a choice belongs on the data axes."""
    if structure.weights[s]:
        return mesh.pieces and structure.choices[s][i].name not in IDLE
    return structure.rank[s][i] in structure.samples


def along_tensor(structure: Structure, s: int, site: Site, i: int, mesh: Mesh) -> bool:
    """Return whether a choice may be taken on the tensor axes.

    It must not split samples, and for a product with a weight it must split the weight.
    """
    choice = structure.choices[s][i]
    if choice.name in IDLE:
        return True
    if structure.rank[s][i] in (structure.data if mesh.features and not structure.weights[s] else structure.samples):
        return False
    if structure.weights[s] or not product_with_weight(structure, s, site):
        return True
    if mesh.columns and choice.results[0].kind != "P":
        return False
    return any(choice.operands[p].kind == "P" for p, port in enumerate(site.ports) if structure.weights[port.source])


def product_with_weight(structure: Structure, s: int, site: Site) -> bool:
    """Return whether a site is a matrix product or a convolution with a weight."""
    heavy = site.is_product and not structure.weights[s]
    return heavy and any(structure.weights[p.source] for p in site.ports)


def mixtures(axes: int) -> list[Mesh]:
    """Return data parallelism, FSDP, tensor parallelism and all their mixtures, with nothing forced."""
    return [Mesh(k, pieces) for k in range(axes, -1, -1) for pieces in (False, True) if k or not pieces]


def space_on(structure: Structure, mesh: Mesh | Callable[[int], Mesh]) -> RestrictedSpace:
    """Return the strategies of a mesh."""
    assembled = on_mesh(structure, mesh)
    return RestrictedSpace(assembled, assembled.problem)


def best_of(spaces: Iterable[RestrictedSpace], search: Search, limit: float, name: str) -> Candidate:
    """Return the fastest strategy of some spaces that fits; if none does, the leanest found.

    Raises:
        InfeasibleError: no strategy of these spaces is possible.
    """
    candidates = [c for space in spaces if (c := space.under(search, limit)) is not None]
    if not candidates:
        raise InfeasibleError(f"{name}: no strategy of this kind is possible for this graph on {search.machine.name}")
    fitting = [c for c in candidates if c.memory <= limit]
    return min(fitting, key=lambda c: (c.time, c.memory)) if fitting else min(candidates, key=lambda c: (c.memory, c.time))


def data_parallel(search: Search, asked: Asked) -> Candidate:
    """Return the fastest strategy where samples are split, and every device has all weights."""
    return best_of([space_on(Structure(search), Mesh(len(search.machine.axes)))], search, asked.limit, "data parallelism")


def fsdp(search: Search, asked: Asked) -> Candidate:
    """Return the fastest strategy where samples are split, and weights are stored in pieces."""
    return best_of([space_on(Structure(search), Mesh(len(search.machine.axes), pieces=True))], search, asked.limit, "FSDP")


def model_parallel(search: Search, asked: Asked) -> Candidate:
    """Return the fastest strategy where every product with a weight splits it over all devices."""
    return best_of([space_on(Structure(search), KRIZHEVSKY)], search, asked.limit, "model parallelism")


def megatron(search: Search, asked: Asked) -> Candidate:
    """Return the best mixture of data and Megatron's tensor parallelism."""
    structure = Structure(search)
    every = (megatron_space(structure, k) for k in range(len(search.machine.axes), -1, -1))
    return best_of(every, search, asked.limit, "Megatron")


def megatron_space(structure: Structure, data: int) -> RestrictedSpace:
    """Return Megatron's strategies with `data` data axes."""
    assembled = on_mesh(structure, Mesh(data, forced=True, features=True))
    tensor = range(data, len(structure.search.machine.axes))
    forbidden = dict[int, Array]()
    for e, (s, p) in enumerate(assembled.ports):
        port = assembled.opened.sites[s].ports[p]
        before, first = assembled.domains[port.source].types[assembled.position(port)]
        after, second = assembled.domains[s].types[p]
        forbidden[e] = moved(before, after, tensor)[first[:, None], second]
    return RestrictedSpace(assembled, without(assembled.problem, forbidden))


def moved(before: Types, after: Types, axes: Iterable[int]) -> Array:
    """Return which changes of type move pieces along some of the axes, by a gather, scatter or exchange, [before, after]."""
    moves = np.zeros((len(before), len(after)), bool)
    for k in axes:
        pairs = [[(b.kind == "S" and a.kind == "P") or (b.kind == "P" and a != b) for a in after.states] for b in before.states]
        moves |= np.array(pairs, bool)[before.rows[:, k][:, None], after.rows[:, k]]
    return moves


def one_weird_trick(search: Search, asked: Asked) -> Candidate:
    """Return the fastest strategy with data parallelism for convolutions and model parallelism for dense layers.

    Raises:
        InfeasibleError: the graph has no convolutions.
    """
    structure, axes = Structure(search), len(search.machine.axes)
    kinds = {site.node.kind for site in structure.opened.sites if site.node is not None}
    if not any(map(is_convolution, kinds)):
        raise InfeasibleError("one weird trick is for convolutional networks: there is no convolution in this graph")
    dense = after_dense(structure)
    space = space_on(structure, lambda s: KRIZHEVSKY if dense[s] else Mesh(axes))
    return best_of([space], search, asked.limit, "one weird trick")


def after_dense(structure: Structure) -> list[bool]:
    """Return for every site whether it is a dense layer, comes after one, or is a weight that only such sites read."""
    sites, dense = structure.opened.sites, [False] * len(structure.opened.sites)
    for s, site in enumerate(sites):
        is_dense = site.node is not None and site.node.kind == "dot_general" and product_with_weight(structure, s, site)
        dense[s] = is_dense or any(dense[p.source] for p in site.ports if p.source < s)
    for s in reversed(range(len(sites))):
        if structure.weights[s]:
            dense[s] = bool(structure.users[s]) and all(dense[u] for u, _ in structure.users[s])
    return dense


def expert(search: Search, asked: Asked) -> Candidate:
    """Return the experts' strategy for this kind of network.

    Raises:
        InfeasibleError: the papers have no strategy for this kind of network, or one that cannot be expressed.
    """
    structure = Structure(search)
    kinds = {site.node.kind for site in structure.opened.sites if site.node is not None}
    if any(map(is_convolution, kinds)):
        return one_weird_trick(search, asked)
    if any(site.around.stacked for site in structure.opened.sites):
        raise InfeasibleError(
            "the experts' strategy for recurrent networks (Wu et al. 2016) gives every layer a device of its own in each node; "
            "along one mesh all devices run all layers, so it cannot be expressed"
        )
    tables = looked_up(structure)
    if sum(structure.opened.sites[s].weight for s in tables) < 2:
        raise InfeasibleError("no strategy of experts is published for this kind of network: no convolutions, no embedding tables")
    return best_of([tables_split(structure, tables)], search, asked.limit, "the experts' strategy")


def looked_up(structure: Structure) -> frozenset[int]:
    """Return the lookups in weights, and the weights that they read."""
    sites = structure.opened.sites
    lookups = set[int]()
    for s, site in enumerate(sites):
        table = table_of(structure, site)
        if site.node is not None and site.node.kind in LOOKUPS and table is not None and not structure.weights[s]:
            lookups |= {s, site.ports[table].source}
    return frozenset(lookups)


def table_of(structure: Structure, site: Site) -> int | None:
    """Return which operand of a lookup is a weight."""
    return next((p for p, port in enumerate(site.ports) if structure.weights[port.source]), None)


def tables_split(structure: Structure, tables: frozenset[int]) -> RestrictedSpace:
    """Return the strategies where tables are split over all devices as far as sizes allow, and everything else is data parallel."""
    axes = len(structure.search.machine.axes)

    def values(s: int, site: Site) -> Array:
        if s not in tables:
            return picks(structure, s, site, Mesh(axes))
        choices = structure.choices[s]
        table = table_of(structure, site)
        split = [i for i, c in enumerate(choices) if (c.results[0] if table is None else c.operands[table]).kind == "P"]
        free = [i for i, c in enumerate(choices) if c.name in IDLE or i in split]
        allowed = only(choices, np.array(list(_at_most_two(free, axes)), np.int16), site, structure.search.machine.axes)
        return _most(allowed, split, slice(0, axes), structure)

    assembled = restricted(structure, values, lambda s: (s in tables, structure.weights[s]))
    return RestrictedSpace(assembled, assembled.problem)


def _at_most_two(choices: list[int], axes: int) -> Iterator[tuple[int, ...]]:
    """Return the combinations of choices, one for each axis, with at most two different ones."""
    return (p for p in combinations_with_replacement(choices, axes) if len(set(p)) <= 2)


def usual(assembled: Assembled, data: bool, weights: bool) -> Point | None:
    """Return the fastest strategy whose arguments are stored in a given way where sizes allow it; None if none exists.

    Args:
        assembled: the graph with the search's values and costs.
        data: whether arguments that are not weights are split by samples along all axes, rather than whole.
        weights: whether weights are stored in pieces along all axes, rather than whole.
    """
    costs = []
    for site, domain, cost in zip(assembled.opened.sites, assembled.domains, assembled.costs, strict=True):
        if site.kind == "input":
            types = [domain.type_of(v, 0) for v in range(len(domain))]
            pieces, whole = (np.array([all(s.kind == kind for s in t) for t in types]) for kind in "PU")
            first = np.array([all(s.kind == "P" and s.dim == 0 for s in t) for t in types])
            allowed = (pieces if weights else whole) if site.weight else (first if data else whole)
            allowed = allowed if allowed.any() else whole
            cost = replace(cost, forward=np.where(allowed, cost.forward, np.inf))
        costs.append(cost)
    points = Minimizer(replace(assembled, costs=tuple(costs), port_costs={}).problem).at([0.0])
    return points[0] if points and np.isfinite(points[0].time) else None
