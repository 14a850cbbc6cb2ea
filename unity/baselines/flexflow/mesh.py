"""FlexFlow's search among strategies that are plans: what a mesh's axes can express.

A value of an operator's site takes one of the operator's choices along each axis. Where every choice either leaves the axis unused
or splits one of the operator's dimensions as FlexFlow does (`simulator.pieces`), the value is one of FlexFlow's configurations: a
dimension's degree is the product of the axes on it, and pieces lie on devices in mesh order. Along an axis that is unused all
devices of a plan do the same work; FlexFlow's pieces are each on one device, so they lie on the first along it. Proposals are
drawn from these configurations, and the simulator is the judge, as in the paper.

The operators' values are then fixed, and all that FlexFlow's strategies do not say is chosen at its best by exact minimization: how
arguments are stored, where copies are made, what results have; and the operators inside of scans and remats, which the simulator
does not split. The candidate's time is this project's cost, by which algorithms are compared.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np

from unity.base.errors import InfeasibleError
from unity.baselines.flexflow.mcmc import Configs, Stop, explored
from unity.baselines.flexflow.strategy.configs import ParallelConfig, data_parallel, on_one
from unity.baselines.flexflow.strategy.operators import Operators, operators
from unity.baselines.flexflow.strategy.pieces import reference, split_shape, splits
from unity.machine.machine import Machine
from unity.pcg.ir.graph import Node
from unity.search.cost.assembly import Assembled
from unity.search.memory.backend import CPU, backend_of
from unity.search.published import Asked
from unity.search.session import Candidate, Search
from unity.search.simulator import Topology
from unity.search.solver.minimizer import minimize
from unity.search.solver.problem import Problem
from unity.search.space.configurations import Domain

Options = Mapping[ParallelConfig, int]
"""What an operator may have, and the value of its site that each is; -1 for what no site's value is."""


def flexflow(search: Search, asked: Asked) -> Candidate:
    """The best plan that FlexFlow's search finds. What is asked of memory does not change it.

    Raises InfeasibleError if no types of arguments, copies and results suit what was found.
    """
    machine = search.machine
    o = operators(search.graph, search.differentiated, Topology.uniform(machine))
    may = {k: options(search.assembled, o.nodes[k]) for k in o.numbers}
    drawn = {k: list(may[k]) for k in o.numbers}
    search.say(f"{len(o.numbers)} operators of up to {max(map(len, may.values()), default=0)} configurations: simulating")
    found = explored(
        o,
        starts(search, o, may, random.Random(asked.seed)),
        seed=asked.seed,
        stop=stop_of(asked.budget),
        overlap=backend_of(machine) is not CPU,
        draw=lambda k, rng: rng.choice(drawn[k]),
    )
    problem = fixed(search.assembled, {id(o.nodes[k]): may[k][config] for k, config in found.best.configs.items()})
    best = minimize(problem, [0.0])
    if not best:
        raise InfeasibleError("FlexFlow's search found a strategy that no types of arguments, copies and results suit")
    return search.candidate(search.assembled, best[0])


def stop_of(budget: float | None) -> Stop:
    """A number of proposals (int), or seconds (float), for each initial strategy; None: as published."""
    if budget is None:
        return Stop()
    return Stop(None, budget) if isinstance(budget, int) else Stop(budget)


def starts(search: Search, o: Operators, may: Mapping[int, Options], rng: random.Random) -> dict[str, Configs]:
    """Data parallelism, where there are samples, and a strategy at random."""
    found: dict[str, Configs] = {}
    batch = samples(search)
    if batch:
        found["data parallelism"] = {k: _nearest(may[k], data_parallel(o.nodes[k], batch, o.topology.devices)) for k in o.numbers}
    return found | {"random": {k: rng.choice(list(may[k])) for k in o.numbers}}


def samples(search: Search) -> int:
    """The first dimension of the first argument that is no weight and has one; 0 if there is none."""
    data = [n for k, n in enumerate(search.graph.inputs) if k not in search.differentiated and n.tensors[0].shape]
    return data[0].tensors[0].shape[0] if data else 0


def _nearest(may: Options, wanted: ParallelConfig) -> ParallelConfig:
    """Of configurations that split no other dimensions, the one with most pieces; of equal ones, the first."""
    inside = [c for c in may if all(w % d == 0 for d, w in zip(c.degrees, wanted.degrees, strict=True))]
    return max(inside, key=lambda c: c.pieces)


def options(assembled: Assembled, node: Node) -> Options:
    """The configurations of an operator that are values of its site."""
    site = assembled.opened.of_node.get(id(node))
    if site is None:  # a scan, or a remat
        return {on_one(node): -1}
    domain, found = assembled.domains[site], dict[ParallelConfig, int]()
    for value in range(len(domain)):
        config = config_of(node, domain, value, assembled.machine)
        if config is not None:
            found.setdefault(config, value)
    return found


def config_of(node: Node, domain: Domain, value: int, machine: Machine) -> ParallelConfig | None:
    """A value as a configuration of FlexFlow's; None if it is none."""
    position, known, along = reference(node), splits(node), list[int]()
    for pick in domain.picks[value]:
        choice = domain.choices[pick]
        state = choice.states[position]
        if choice.name == "unused":
            along.append(-1)
        elif state.kind == "P" and state.dim in known and choice.states == known[state.dim].states:
            along.append(state.dim)
        else:
            return None
    sizes = [axis.size for axis in machine.axes]
    degrees = tuple(prod(n for n, a in zip(sizes, along, strict=True) if a == dim) for dim in range(len(split_shape(node))))
    first = np.arange(math.prod(sizes)).reshape(sizes)[tuple(slice(None) if a >= 0 else 0 for a in along)]
    used = [a for a in along if a >= 0]
    devices = np.transpose(first, np.argsort(used, kind="stable")).reshape(-1) if used else np.reshape(first, -1)
    return ParallelConfig(degrees, tuple(map(int, devices)))


def fixed(assembled: Assembled, values: Mapping[int, int]) -> Problem:
    """The problem where operators (by the id of their nodes) have these values; -1: any."""
    problem, unary = assembled.problem, list(assembled.problem.unary)
    for node, value in values.items():
        if value >= 0:
            site = assembled.opened.of_node[node]
            time = np.full_like(unary[site].time, np.inf)
            time[:, value] = unary[site].time[:, value]
            unary[site] = replace(unary[site], key=f"{unary[site].key} {value}", time=time)
    return replace(problem, unary=tuple(unary))
