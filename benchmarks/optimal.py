"""FlexFlow's search against the global optimum of small executions, and published searches against the exact one (section 8.3).

`python -m benchmarks.optimal`. The paper's two networks: LeNet, and an RNNLM of 2 unrolling steps, on P100 GPUs of one node.

"any", "mesh": the optimum in the simulator. "any" is FlexFlow's own space: all degrees of every dimension of every operator, and
all placements of the pieces on different devices. "mesh" is what a mesh of the devices can express (`published.flexflow.mesh`):
pieces in powers of two, in mesh order. What is configured are layers, as there (`flexflow.layers`). `flexflow` draws from the same
space, and stops as published. All that may be better than the best known is looked at (`optimum`): the best known, at first, is
what FlexFlow's chains of a few seeds found, and for "any" the optimum of "mesh". LeNet is a chain, and looked at operator by
operator, with at most `WIDTH` strategies at a time; the RNNLM by depth-first search with A* pruning, as in the paper, whose took
0.8 and 18 hours: on 2 GPUs of all nodes (some minutes), on 4 of `NODES`, as 20 times as many raised no bound. Where there is more
than that, `optimal` is the least bound of what was not looked at: the optimum is between it and `best`, and `whole` is false.

"costs": the optimum by this project's costs on 4 GPUs, of all its strategies, by exact search (`whole`: of every value that there
is), against every published algorithm and baseline; `flexflow` looks for the best by simulation and is judged by the costs.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.models import get
from benchmarks.models.model import Model
from benchmarks.models.unrolled import rnnlm_unrolled
from benchmarks.optimum.bound import Bound, May
from benchmarks.optimum.depth_first import NODES, DepthFirst
from benchmarks.optimum.layers import WIDTH, Layers
from benchmarks.record import asked, record, show
from benchmarks.simulator import Clock
from unity.base.errors import UnityError
from unity.base.gc_pause import uncollected
from unity.baselines.flexflow import explored, initial, layers
from unity.baselines.flexflow.mcmc import Configs, McmcResult
from unity.baselines.flexflow.mesh import options, starts
from unity.baselines.flexflow.strategy.configs import every_config
from unity.baselines.flexflow.strategy.operators import Operators, operators
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Clustering, capture
from unity.pcg.capture.clustering import clusters
from unity.search.cost.cost import Training
from unity.search.published import Asked, algorithm, names
from unity.search.session import Search
from unity.search.simulator import Topology

SAMPLES = 64  # for each device
NETWORKS: dict[str, Callable[..., Model]] = {
    "lenet5": lambda batch: get("lenet5", batch=batch),
    "rnnlm": lambda batch: rnnlm_unrolled(steps=2, batch=batch),
}
SIMULATED = (("lenet5", 2, "any"), ("lenet5", 4, "mesh"), ("lenet5", 4, "any"), ("rnnlm", 2, "mesh"), ("rnnlm", 4, "mesh"))
ALL = {("rnnlm", 2)}  # of which all nodes are looked at
SEEDS = 4  # of FlexFlow's chains that the search for the optimum begins with


def searched(name: str, devices: int, clustering: Clustering = clusters) -> Search:
    model = NETWORKS[name](SAMPLES * devices)
    captured = capture(model.loss, model.params, model.batch, clustering=clustering)
    return Search(captured.graph, captured.differentiated, Machine.grid(1, devices, "p100"), Training())


@dataclass(frozen=True, eq=False)
class Space:
    """The configurations that operators may have, and the strategies that FlexFlow's chains begin with."""

    o: Operators
    may: May
    begun: dict[str, Configs]
    any_device: bool
    most: int = NODES  # nodes of a depth-first search

    def found(self, seed: int) -> McmcResult:
        """What FlexFlow finds."""
        return explored(self.o, self.begun, seed=seed, draw=lambda k, rng: rng.choice(self.may[k]))

    def exact(self, best: float, configs: Configs) -> Layers | DepthFirst:
        """All that may be better than the best known was looked at, as far as that goes."""
        bound = Bound(self.o, self.may)
        if set(bound.path) == set(self.o.numbers):
            exact = Layers(bound, best, dict(configs), self.any_device)
        else:
            exact = DepthFirst(bound, best, dict(configs), self.most)
        with uncollected():
            exact.run()
        return exact


def spaces(search: Search) -> dict[str, Space]:
    """By name, in the order in which each contains the one before."""
    o = operators(search.graph, search.differentiated, Topology.uniform(search.machine))
    values = {k: options(search.assembled, o.nodes[k]) for k in o.numbers}
    mesh = Space(o, {k: list(found) for k, found in values.items()}, starts(search, o, values, random.Random(0)), False)
    n = o.topology.devices
    return {"mesh": mesh, "any": Space(o, {k: list(every_config(o.nodes[k], n)) for k in o.numbers}, initial(o, SAMPLES * n), True)}


def simulated(name: str, devices: int, which: str) -> dict[str, Any]:
    """The optimum in the simulator."""
    every = spaces(searched(name, devices, layers))
    space = replace(every[which], most=sys.maxsize if (name, devices) in ALL else NODES)
    clock = Clock()
    found = space.found(0)
    row: dict[str, Any] = {"model": name, "devices": devices, "space": which, "operators": len(space.o.numbers)}
    row |= {"strategies": float(math.prod(map(len, space.may.values()))), "flexflow_seconds": clock(), "proposals": found.proposals}
    chains = [found.best, *(space.found(seed).best for seed in range(1, SEEDS))]
    known = min(((chain.best, chain.configs) for chain in chains), key=lambda pair: pair[0])
    if which == "any":
        inside = every["mesh"].exact(*known)
        known = inside.best, inside.configs
    exact = space.exact(*known)
    optimal = min(exact.left, exact.best)
    row |= {"seconds": clock(), "nodes": exact.nodes, "simulated": exact.simulated, "path": len(exact.bound.path)}
    row |= {"whole": exact.left >= exact.best, "optimal_ms": optimal * 1e3, "best_ms": exact.best * 1e3}
    row |= {"flexflow_ms": found.best.best * 1e3}
    return row | {"flexflow / optimal": found.best.best / optimal, "met": found.best.best <= optimal}


def costed(name: str, devices: int) -> dict[str, Any]:
    """The optimum by this project's costs."""
    search = searched(name, devices)
    row: dict[str, Any] = {"model": name, "devices": devices, "space": "costs", "operators": len(search.graph)}
    row |= {"optimal_ms": search.fastest.time * 1e3, "whole": search.assembled.whole}
    for which in names():
        try:
            found = algorithm(which)(search, Asked(math.inf))
            row |= {f"{which}_ms": found.time * 1e3, f"{which} / optimal": found.time / search.fastest.time}
        except UnityError as problem:
            row |= {f"{which}_ms": None, f"no {which}": str(problem)}
    return row


def _against(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A line for each algorithm."""
    yield {"model": row["model"], "algorithm": "the optimum", "ms": row["optimal_ms"], "/ optimum": 1.0}
    for which in names():
        line = {"model": row["model"], "algorithm": which, "ms": row[f"{which}_ms"]}
        yield line | {"/ optimum": row.get(f"{which} / optimal"), "": row.get(f"no {which}")}


def main() -> None:
    cases = {f"{name}, {devices}, {space}": (name, devices, space) for name, devices, space in SIMULATED}
    cases |= {f"{name}, 4, costs": (name, 4, "costs") for name in NETWORKS}
    chosen, every = asked(__doc__, cases)
    rows = []
    for case in chosen:
        name, devices, space = cases[case]
        rows.append(costed(name, devices) if space == "costs" else simulated(name, devices, space))
        print(case, {k: round(v, 6) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    show("Against the optimum, simulated", [row for row in rows if row["space"] != "costs"])
    show("Against the optimum, by costs", [line for row in rows if row["space"] == "costs" for line in _against(row)])
    if every:
        record("optimal", rows, most_nodes=NODES, width=WIDTH, seeds=SEEDS, samples_per_device=SAMPLES)


if __name__ == "__main__":
    main()
