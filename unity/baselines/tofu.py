"""ToFu and Mesh-TensorFlow, as TensorOpt simulates them on one cost model (section 5.1).

*ToFu*: every tensor is split over all devices as far as sizes allow, and none stays replicated: results of operators, weights and
arguments are stored in pieces; an operand that is needed whole is gathered, and gathered again for the backward pass. The result is
the fastest such strategy.

*Mesh-TensorFlow*: there is one mesh for the whole graph, and a logical dimension that is split along one of the mesh's dimensions
is split along it everywhere. Logical dimensions are those that can be followed through the graph (`configurations.ranks`); the
samples are split along the mesh's first dimension, any set of others along its second. So meshes have one or two dimensions here,
of any sizes. Arguments that are not weights arrive split by samples, as in TensorOpt. A logical dimension is a variable with two
values, and exact search chooses their values together with everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from unity.base.errors import InfeasibleError
from unity.baselines.by_hand import best_of
from unity.baselines.restricted import RestrictedSpace, Structure, restricted
from unity.baselines.tensoropt.space import configurable, loaded
from unity.search.cost.assembly import Assembled
from unity.search.published import Asked
from unity.search.session import Candidate, Search
from unity.search.solver.frontier import ParetoFrontier
from unity.search.solver.problem import Array, Cost, Edge, Problem
from unity.search.space.configurations import IDLE, domain
from unity.search.space.sites import Site


def tofu(search: Search, asked: Asked) -> Candidate:
    """Return the fastest strategy where all tensors are split over all devices."""
    return best_of([tofu_space(Structure(search))], search, asked.limit, "ToFu")


def tofu_space(structure: Structure) -> RestrictedSpace:
    """Return the strategies where all tensors are split over all devices."""
    assembled = restricted(structure, lambda s, site: split(structure, s, site), lambda s: structure.weights[s])
    assembled = replace(assembled, costs=tuple(replace(c, saved=None) for c in assembled.costs))
    return RestrictedSpace(assembled, gathered_again(assembled.problem))


def split(structure: Structure, s: int, site: Site) -> Array:
    """Return the values of a site that cut its results into the most pieces."""
    choices, axes = structure.choices[s], structure.search.machine.axes
    allowed = [i for i, c in enumerate(choices) if configurable(site, c)]
    listed = domain(site, tuple(choices[i] for i in allowed), tuple(structure.rank[s][i] for i in allowed), axes)
    number = {id(c): i for i, c in enumerate(choices)}
    picks = np.array([number[id(c)] for c in listed.choices], np.int16)[listed.picks]
    pieces = np.ones(len(picks))
    for k in range(len(site.results)):
        parted = np.array([c.results[k].kind in "PS" for c in choices])
        pieces = pieces * np.prod(np.where(parted[picks], [a.size for a in axes], 1), axis=1)
    return picks[pieces == pieces.max()]


def gathered_again(problem: Problem) -> Problem:
    """Return the problem in which a tensor that can be gathered again is not a residual in its gathered form."""
    cost_of, edges = dict[str, Cost](), list[Edge]()
    for edge in problem.edges:
        cost = edge.cost
        if cost.key not in cost_of:
            time = cost.time.copy()
            if len(time) > 1:
                time[0] = np.where(np.isfinite(time[1]), np.inf, time[0])
            cost_of[cost.key] = Cost(f"{cost.key} again", time, cost.memory)
        edges.append(replace(edge, cost=cost_of[cost.key]))
    return replace(problem, edges=tuple(edges))


def mesh_tensorflow(search: Search, asked: Asked) -> Candidate:
    """Return the fastest layout of Mesh-TensorFlow that fits."""
    return best_of(mesh_spaces(Structure(search)), search, asked.limit, "Mesh-TensorFlow")


def mesh_frontier(search: Search) -> tuple[tuple[RestrictedSpace, ParetoFrontier], ...]:
    """Return the frontier of every mesh."""
    return tuple((space, space.frontier()) for space in mesh_spaces(Structure(search)))


def mesh_spaces(structure: Structure) -> Iterator[RestrictedSpace]:
    """Yield the layouts on a mesh whose first dimension is the machine's first axes, for every number of these that sizes allow."""
    for data in range(len(structure.search.machine.axes), -1, -1):
        try:
            yield mesh_space(structure, data)
        except InfeasibleError:
            continue


def mesh_space(structure: Structure, data: int) -> RestrictedSpace:
    """Return the layouts on a mesh with `data` axes for samples, and all others for a set of logical dimensions.

    Raises:
        InfeasibleError: the samples cannot be split along that many axes.
    """
    assembled = restricted(
        structure,
        lambda s, site: layouts(structure, s, site, data),
        lambda s: (structure.weights[s], structure.rank[s]),
    )
    assembled = replace(assembled, costs=tuple(replace(c, saved=None) for c in assembled.costs))
    return RestrictedSpace(assembled, consistent(structure, assembled, data))


def layouts(structure: Structure, s: int, site: Site, data: int) -> Array:
    """Return the values of a site: samples along the first axes if it has any, and one choice along all the others."""
    if site.kind == "input" and not site.weight:
        return loaded(structure, s, site)
    choices, axes = structure.choices[s], len(structure.search.machine.axes)
    idle = [i for i, c in enumerate(choices) if c.name in IDLE and configurable(site, c)]
    samples = [i for i, c in enumerate(choices) if structure.rank[s][i] in structure.samples and configurable(site, c)]
    others = [i for i, c in enumerate(choices) if i not in samples and configurable(site, c)]
    pairs = product(samples or idle, others if data < axes else idle[:1])
    return np.array([(i,) * data + (j,) * (axes - data) for i, j in pairs], np.int16)


def consistent(structure: Structure, assembled: Assembled, data: int) -> Problem:
    """Return the problem with a variable for every logical dimension: 1 if it is split along the mesh's second dimension."""
    problem = assembled.problem
    if data == len(structure.search.machine.axes):
        return problem
    sizes, unary, edges = list(problem.sizes), list(problem.unary), list(problem.edges)
    variable_of: dict[int, int] = {}
    for s, site in enumerate(assembled.opened.sites):
        if site.kind == "input" and not site.weight:
            continue
        domain_ = assembled.domains[s]
        rank = {c.states: structure.rank[s][i] for i, c in enumerate(structure.choices[s])}
        named = {c.states: c.name for c in structure.choices[s]}
        ranks = [-1 if named[c.states] in IDLE else rank[c.states] for c in domain_.choices]
        own = np.array(ranks)[domain_.picks[:, data]]
        dims = {rank[c.states] for c in structure.choices[s] if c.name not in IDLE and configurable(site, c)}
        for dim in sorted(dims - structure.samples):
            if dim not in variable_of:
                variable_of[dim] = len(sizes)
                sizes.append(2)
                unary.append(FREE)
            agree = np.stack([own != dim, own == dim], axis=1)
            edges.append(Edge(s, variable_of[dim], Cost("", np.where(agree, 0.0, np.inf)[None], np.zeros((1, *agree.shape)))))
    return Problem(tuple(sizes), tuple(unary), tuple(edges))


FREE = Cost("a logical dimension", np.zeros((1, 2)), np.zeros((1, 2)))
