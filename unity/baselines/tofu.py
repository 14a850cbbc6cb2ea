"""ToFu and Mesh-TensorFlow as TensorOpt simulates them on one cost model (section 5.1).

*ToFu*: every tensor is split among all devices, as far as sizes allow, and none is kept replicated: results of operators, weights
and arguments lie in pieces; what an operator needs whole is gathered for it, and for the backward pass again. The fastest of these.

*Mesh-TensorFlow*: one mesh for the whole graph, and a logical dimension that is split along one of the mesh's dimensions is split
along it wherever it is. Logical dimensions are those that can be followed through the graph (`configurations.ranks`); the samples
are split along the mesh's first dimension, any set of others along its second. So meshes have one or two dimensions here, of any
sizes. Arguments that are no weights arrive split by samples, as TensorOpt has it. A logical dimension is a variable of its own with
two values, and exact search chooses among them together with the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from unity.base.errors import InfeasibleError
from unity.baselines.by_hand import best_of
from unity.baselines.restricted import Space, Structure, restricted
from unity.baselines.tensoropt.space import configurable, loaded
from unity.search.cost.assembly import Assembled
from unity.search.published import Asked
from unity.search.session import Candidate, Search
from unity.search.solver.frontier import Frontier
from unity.search.solver.problem import Array, Cost, Edge, Problem
from unity.search.space.configurations import IDLE, domain
from unity.search.space.sites import Site


def tofu(search: Search, asked: Asked) -> Candidate:
    """The fastest where all tensors are split among all devices."""
    return best_of([tofu_space(Structure(search))], search, asked.limit, "ToFu")


def tofu_space(structure: Structure) -> Space:
    """The strategies where all tensors are split among all devices."""
    assembled = restricted(structure, lambda s, site: split(structure, s, site), lambda s: structure.weights[s])
    assembled = replace(assembled, costs=tuple(replace(c, saved=None) for c in assembled.costs))
    return Space(assembled, gathered_again(assembled.problem))


def split(structure: Structure, s: int, site: Site) -> Array:
    """The values of a site whose results lie in most pieces."""
    found, axes = structure.found[s], structure.search.machine.axes
    kept = [i for i, c in enumerate(found) if configurable(site, c)]
    listed = domain(site, tuple(found[i] for i in kept), tuple(structure.rank[s][i] for i in kept), axes)
    number = {id(c): i for i, c in enumerate(found)}
    picks = np.array([number[id(c)] for c in listed.choices], np.int16)[listed.picks]
    pieces = np.ones(len(picks))
    for k in range(len(site.results)):
        parted = np.array([c.results[k].kind in "PS" for c in found])
        pieces = pieces * np.prod(np.where(parted[picks], [a.size for a in axes], 1), axis=1)
    return picks[pieces == pieces.max()]


def gathered_again(problem: Problem) -> Problem:
    """The problem where nothing that was gathered is kept, if it can be gathered again."""
    known, edges = dict[str, Cost](), list[Edge]()
    for edge in problem.edges:
        cost = edge.cost
        if cost.key not in known:
            time = cost.time.copy()
            if len(time) > 1:
                time[0] = np.where(np.isfinite(time[1]), np.inf, time[0])
            known[cost.key] = Cost(f"{cost.key} again", time, cost.memory)
        edges.append(replace(edge, cost=known[cost.key]))
    return replace(problem, edges=tuple(edges))


def mesh_tensorflow(search: Search, asked: Asked) -> Candidate:
    """The fastest layout of Mesh-TensorFlow that fits."""
    return best_of(mesh_spaces(Structure(search)), search, asked.limit, "Mesh-TensorFlow")


def mesh_frontier(search: Search) -> tuple[tuple[Space, Frontier], ...]:
    """The frontier of every mesh."""
    return tuple((space, space.frontier()) for space in mesh_spaces(Structure(search)))


def mesh_spaces(structure: Structure) -> Iterator[Space]:
    """The layouts on a mesh whose first dimension is the machine's first axes, for every number of these; where sizes allow it."""
    for data in range(len(structure.search.machine.axes), -1, -1):
        try:
            yield mesh_space(structure, data)
        except InfeasibleError:
            continue


def mesh_space(structure: Structure, data: int) -> Space:
    """The layouts on a mesh with so many axes for samples, and all others for a set of logical dimensions.

    Raises:
        InfeasibleError: the samples cannot be split along so many.
    """
    assembled = restricted(
        structure,
        lambda s, site: layouts(structure, s, site, data),
        lambda s: (structure.weights[s], structure.rank[s]),
    )
    assembled = replace(assembled, costs=tuple(replace(c, saved=None) for c in assembled.costs))
    return Space(assembled, consistent(structure, assembled, data))


def layouts(structure: Structure, s: int, site: Site, data: int) -> Array:
    """The values of a site: samples along the first axes if it has any, and one choice along all the others."""
    if site.kind == "input" and not site.weight:
        return loaded(structure, s, site)
    found, axes = structure.found[s], len(structure.search.machine.axes)
    idle = [i for i, c in enumerate(found) if c.name in IDLE and configurable(site, c)]
    samples = [i for i, c in enumerate(found) if structure.rank[s][i] in structure.samples and configurable(site, c)]
    others = [i for i, c in enumerate(found) if i not in samples and configurable(site, c)]
    pairs = product(samples or idle, others if data < axes else idle[:1])
    return np.array([(i,) * data + (j,) * (axes - data) for i, j in pairs], np.int16)


def consistent(structure: Structure, assembled: Assembled, data: int) -> Problem:
    """The problem with a variable for every logical dimension: 1 where it is split along the mesh's second dimension."""
    problem = assembled.problem
    if data == len(structure.search.machine.axes):
        return problem
    sizes, unary, edges = list(problem.sizes), list(problem.unary), list(problem.edges)
    of: dict[int, int] = {}
    for s, site in enumerate(assembled.opened.sites):
        domain_ = assembled.domains[s]
        rank = {c.states: structure.rank[s][i] for i, c in enumerate(structure.found[s])}
        named = {c.states: c.name for c in structure.found[s]}
        taken = [-1 if named[c.states] in IDLE else rank[c.states] for c in domain_.choices]
        own = np.array(taken)[domain_.picks[:, data]]
        if site.kind == "input" and not site.weight:
            continue
        dims = {rank[c.states] for c in structure.found[s] if c.name not in IDLE and configurable(site, c)}
        for dim in sorted(dims - structure.samples):
            if dim not in of:
                of[dim] = len(sizes)
                sizes.append(2)
                unary.append(FREE)
            agree = np.stack([own != dim, own == dim], axis=1)
            edges.append(Edge(s, of[dim], Cost("", np.where(agree, 0.0, np.inf)[None], np.zeros((1, *agree.shape)))))
    return Problem(tuple(sizes), tuple(unary), tuple(edges))


FREE = Cost("a logical dimension", np.zeros((1, 2)), np.zeros((1, 2)))
