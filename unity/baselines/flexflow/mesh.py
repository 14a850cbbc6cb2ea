"""FlexFlow's search restricted to plans: strategies that the axes of a mesh can express.

A value of an operator's site takes one of the operator's choices along each axis. Where every choice either leaves the axis unused
or splits one of the operator's dimensions as FlexFlow does (see `strategy.pieces`), the value is one of FlexFlow's configurations:
a dimension's degree is the product of the axes on it, and pieces lie on devices in mesh order. Along an unused axis all devices of
a plan do the same work; FlexFlow's pieces are each on one device, so they lie on the first along it. Proposals are drawn from these
configurations, and the simulator is the judge, as in the paper.

The operators' values are then fixed, and everything that FlexFlow's strategies leave open is chosen by exact minimization: the
storage of arguments, the placement of copies and results, and the operators inside of scans and remats, which the simulator does
not split. The candidate's time is this project's cost, by which algorithms are compared.
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
"""The possible configurations of an operator, and for each the equivalent value of its site; -1 if there is none."""


def flexflow(search: Search, asked: Asked) -> Candidate:
    """Return the best plan that FlexFlow's search finds. A memory limit does not change it.

    Raises:
        InfeasibleError: no types of arguments, copies and results suit the strategy.
    """
    machine = search.machine
    o = operators(search.graph, search.differentiated, Topology.uniform(machine))
    may = {k: options(search.assembled, o.nodes[k]) for k in o.numbers}
    drawn = {k: list(may[k]) for k in o.numbers}
    search.say(f"{len(o.numbers)} operators of up to {max(map(len, may.values()), default=0)} configurations: simulating")
    result = explored(
        o,
        starts(search, o, may, random.Random(asked.seed)),
        seed=asked.seed,
        stop=stop_of(asked.budget),
        overlap=backend_of(machine) is not CPU,
        draw=lambda k, rng: rng.choice(drawn[k]),
    )
    problem = fixed(search.assembled, {id(o.nodes[k]): may[k][config] for k, config in result.best.configs.items()})
    best = minimize(problem, [0.0])
    if not best:
        raise InfeasibleError("FlexFlow's search found a strategy that no types of arguments, copies and results suit")
    return search.candidate(search.assembled, best[0])


def stop_of(budget: float | None) -> Stop:
    """Return the end of a chain for a budget of proposals (int) or seconds (float); None: as published."""
    if budget is None:
        return Stop()
    return Stop(None, budget) if isinstance(budget, int) else Stop(budget)


def starts(search: Search, o: Operators, may: Mapping[int, Options], rng: random.Random) -> dict[str, Configs]:
    """Return the initial strategies: data parallelism, where there are samples, and a random one."""
    strategies: dict[str, Configs] = {}
    batch = samples(search)
    if batch:
        strategies["data parallelism"] = {
            k: _nearest(may[k], data_parallel(o.nodes[k], batch, o.topology.devices)) for k in o.numbers
        }
    return strategies | {"random": {k: rng.choice(list(may[k])) for k in o.numbers}}


def samples(search: Search) -> int:
    """Return the first dimension of the first argument that is not a weight and has dimensions; 0 if no argument has."""
    data = [n for k, n in enumerate(search.graph.inputs) if k not in search.differentiated and n.tensors[0].shape]
    return data[0].tensors[0].shape[0] if data else 0


def _nearest(may: Options, wanted: ParallelConfig) -> ParallelConfig:
    """Return the configuration with most pieces among those whose degrees divide the wanted ones; of equal ones, the first."""
    inside = [c for c in may if all(w % d == 0 for d, w in zip(c.degrees, wanted.degrees, strict=True))]
    return max(inside, key=lambda c: c.pieces)


def options(assembled: Assembled, node: Node) -> Options:
    """Return the configurations of an operator that are values of its site."""
    site = assembled.opened.of_node.get(id(node))
    if site is None:  # a scan, or a remat
        return {on_one(node): -1}
    domain, value_of = assembled.domains[site], dict[ParallelConfig, int]()
    for value in range(len(domain)):
        config = config_of(node, domain, value, assembled.machine)
        if config is not None:
            value_of.setdefault(config, value)
    return value_of


def config_of(node: Node, domain: Domain, value: int, machine: Machine) -> ParallelConfig | None:
    """Return a value as a FlexFlow configuration; None if it is not one."""
    position, choice_of, along = reference(node), splits(node), list[int]()
    for pick in domain.picks[value]:
        choice = domain.choices[pick]
        state = choice.states[position]
        if choice.name == "unused":
            along.append(-1)
        elif state.kind == "P" and state.dim in choice_of and choice.states == choice_of[state.dim].states:
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
    """Return the problem where operators (by the id of their nodes) have these values; -1 leaves them open."""
    problem, unary = assembled.problem, list(assembled.problem.unary)
    for node, value in values.items():
        if value >= 0:
            site = assembled.opened.of_node[node]
            time = np.full_like(unary[site].time, np.inf)
            time[:, value] = unary[site].time[:, value]
            unary[site] = replace(unary[site], key=f"{unary[site].key} {value}", time=time)
    return replace(problem, unary=tuple(unary))
