"""FlexFlow's search against the global optimum of small executions, and published searches against the exact one (section 8.3).

`python -m benchmarks.optimal`. The paper's two networks: LeNet, and an RNNLM of 2 unrolling steps, on P100 GPUs of one node.

"any", "mesh": the optimum in the simulator, by depth-first search with A* pruning, as in the paper. "any" is FlexFlow's own space:
all degrees of every dimension of every operator, and all placements of the pieces on different devices. "mesh" is what a mesh of
the devices can express (`published.flexflow.mesh`): pieces in powers of two, in mesh order. `flexflow` draws from the same space,
and stops as published. A node of the depth-first search is pruned where a lower bound is not below the best that is known, which at
first is what FlexFlow found: the bound is of the longest chain of operators, forward and then backward, and of the gradients of
their weights, or of all work on all devices. With `NODES` nodes it is given up, and `optimal` is the least bound of what was not
looked at: the optimum is between it and `best`, and `whole` is false. The paper's, on 4 GPUs, took 0.8 and 18 hours.

"costs": the optimum by this project's costs on 4 GPUs, of all its strategies, by exact search (`whole`: of every value that there
is), against `optcnn`, in its own strategies, and `flexflow`, which looks for the best by simulation and is judged by the costs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np

from benchmarks.models import get
from benchmarks.models.model import Model
from benchmarks.models.unrolled import rnnlm_unrolled
from benchmarks.record import asked, record, show
from benchmarks.simulator import Clock
from unity.pcg.capture import capture
from unity.pcg.errors import UnityError
from unity.search.cost import Training
from unity.search.machine import Machine
from unity.search.published import Asked, algorithm
from unity.search.published.flexflow import explored, initial
from unity.search.published.flexflow.mesh import options, starts
from unity.search.session import Search
from unity.search.simulator import Operators, ParallelConfig, Strategy, Topology, every_config, makespan, on_one, operators
from unity.search.simulator.operators import Edge
from unity.search.simulator.pieces import overlap, slices
from unity.search.simulator.regions import shared
from unity.search.simulator.ticks import in_ticks
from unity.uncollected import uncollected

NODES = 20_000
SAMPLES = 64  # for each device
NETWORKS: dict[str, Callable[..., Model]] = {
    "lenet5": lambda batch: get("lenet5", batch=batch),
    "rnnlm": lambda batch: rnnlm_unrolled(steps=2, batch=batch),
}
SIMULATED = (("lenet5", 2, "any"), ("lenet5", 4, "mesh"), ("rnnlm", 2, "mesh"), ("rnnlm", 4, "mesh"))
May = Mapping[int, list[ParallelConfig]]  # by operator


@dataclass(eq=False)
class Bound:
    """Lower bounds of a step's time, from what is certain of the first and of the last of an operator's pieces to end.

    Matrices [..., 2, 2] in (max, +): from when the first and the last piece of one operator end at the earliest to the same of
    another. A piece waits for transfers from all pieces that it reads, and what one sends goes over one link, one after the other.
    """

    o: Operators
    may: May
    strategy: Strategy = field(init=False)

    def __post_init__(self) -> None:
        self.strategy = Strategy(self.o, {k: on_one(self.o.nodes[k]) for k in self.o.numbers})

    @cached_property
    def path(self) -> tuple[int, ...]:
        """The longest chain of operators that ends where the backward pass begins, each reading the one before."""
        before: dict[int, tuple[int, ...]] = {}
        for k in self.o.numbers:
            makers = [before[e.maker] for e in self.o.incoming[k]]
            before[k] = (*max(makers, key=len, default=()), k)
        return max((before[k] for k in self.o.ends), key=len)

    @cached_property
    def computing(self) -> list[tuple[Array, Array]]:
        """Of each operator's configurations along the path, tasks forward, with what pieces sum up, and backward: [C, 2, 2]."""
        found = []
        for k in self.path:
            ways = [self._computed(k, c) for c in self.may[k]]
            found.append(tuple(np.array(each) for each in zip(*ways, strict=True)))
        return found

    def _computed(self, k: int, config: ParallelConfig) -> tuple[Array, Array]:
        forward, backward = (in_ticks(seconds) * ONE + APART * (1 - ONE) for seconds in self.o.seconds(k, config.degrees))
        for r in self.o.reductions(k, config.degrees):
            ring = self.o.topology.collective_seconds("all-reduce", config.devices, r.nbytes)
            if prod(config.degrees[dim] for dim in r.dims) == config.pieces:
                forward = joined(forward, np.array([[ring, ring], [ring, ring]]))
        return forward, backward

    @cached_property
    def between(self) -> list[tuple[Array, Array]]:
        """Of every two neighbours on the path, what is sent, forward and backward: [C of the maker, C of the reader, 2, 2]."""
        found = []
        for maker, reader in zip(self.path, self.path[1:], strict=False):
            edge = next(e for e in self.o.incoming[reader] if e.maker == maker)
            rows = [[self._sent(edge, a, b) for b in self.may[reader]] for a in self.may[maker]]
            found.append(tuple(np.array([[pair[way] for pair in row] for row in rows]) for way in range(2)))
        return found

    def _sent(self, edge: Edge, maker: ParallelConfig, reader: ParallelConfig) -> tuple[Array, Array]:
        self.strategy.change(edge.maker, maker)
        self.strategy.change(edge.reader, reader)
        node = self.o.nodes[edge.maker]
        made = slices(node, maker.degrees, len(node.operands) + edge.result)
        read = overlap(made, slices(self.o.nodes[edge.reader], reader.degrees, edge.position))
        assert len(set(read.first)) == maker.pieces, "a piece that this reader leaves out may begin its backward pass earlier"
        forward, backward = dict[tuple[int, int], float](), dict[tuple[int, int], float]()
        for name, task in self.strategy.of_edge(edge).items():
            i, j = name >> 16 & 0xFFFF, name & 0xFFFF
            way = forward if (name >> 32 & 0xFFFF) % 2 == 0 else backward
            way[(i, j) if way is forward else (j, i)] = task.seconds
        every = len(read.first) == maker.pieces * reader.pieces
        return (
            _first_and_last(forward, maker.pieces, reader.pieces, every, certain=not made.copied),
            _first_and_last(backward, reader.pieces, maker.pieces, every, certain=True),
        )

    @cached_property
    def synchronizing(self) -> list[Array]:
        """Of each operator's configurations along the path, for how long gradients of its weights keep each link: [C, links].

        A weight that others on the path read too counts for the first of them; whoever else reads it only makes it more.
        """
        wiring, counted, found = self.strategy.wiring, set[tuple[int, int]](), []
        for k in self.path:
            own = [w for w in self.o.reads[k] if w not in counted]
            counted.update(own)
            loads = np.zeros((len(self.may[k]), len(wiring.resources)))
            for (node, result), (c, config) in product(own, enumerate(self.may[k])):
                position = next(p for reader, p in self.o.weights[node, result] if reader == k)
                cut = slices(self.o.nodes[k], config.degrees, position)
                for devices, elements in shared(((cut, config.devices),)):
                    nbytes = elements * self.o.nodes[node].tensors[result].itemsize
                    for task in wiring.all_reduce(0, 1, (), devices, nbytes).values():
                        loads[c, task.device] += task.seconds
            found.append(loads)
        return found

    @cached_property
    def working(self) -> dict[int, list[float]]:
        """Of every operator's configurations, the seconds of all its pieces together, for each device there is."""
        n = self.o.topology.devices
        return {k: [c.pieces * sum(self.o.seconds(k, c.degrees)) / n for c in self.may[k]] for k in self.o.numbers}

    @cached_property
    def least_work(self) -> dict[int, float]:
        """Of every operator, the least of these."""
        return {k: min(found) for k, found in self.working.items()}

    @cached_property
    def around(self) -> list[Array]:
        """Along the path, from the end of an operator's tasks forward to that of its own backward, whatever follows: [C, 2, 2]."""
        found = [self.computing[-1][1]]
        for at in range(len(self.path) - 2, -1, -1):
            there, back = self.between[at]
            there = joined(there, self.computing[at + 1][0][None])
            least = joined(joined(there, found[0][None]), back).min(axis=1)
            found.insert(0, joined(least, self.computing[at][1]))
        return found


ONE, APART = np.eye(2), -1e9  # what is not certain counts as long ago
Array = np.ndarray


def joined(a: Array, b: Array) -> Array:
    """The product of matrices in (max, +), [..., 2, 2]."""
    return (a[..., :, :, None] + b[..., None, :, :]).max(axis=-2)


def _first_and_last(sends: dict[tuple[int, int], float], senders: int, receivers: int, every: bool, certain: bool) -> Array:
    """`sends`: seconds by sender and receiver. `every`: all receivers wait for all senders; `certain`: none is left out."""
    waits = [max((s for (_, to), s in sends.items() if to == j), default=0.0) for j in range(receivers)]
    loads = [sum(s for (of, _), s in sends.items() if of == i) for i in range(senders)]
    soonest = min((sends.get((i, j), 0.0) for i in range(senders) for j in range(receivers)), default=0.0)
    return np.array([[min(waits), max(loads)], [soonest if every and certain else APART, min(loads) if certain else APART]])


@dataclass(eq=False)
class DepthFirst:
    """Depth-first search with A* pruning. The operators of the path come first, in its order, and then the others."""

    bound: Bound
    best: float
    configs: dict[int, ParallelConfig]
    nodes: int = 0
    left: float = math.inf  # the least bound of what was not looked at

    def run(self) -> None:
        """Looks at every strategy that may be better than the best known."""
        self._path([], np.zeros(2))

    def _path(self, chosen: list[int], ended: Array) -> None:
        """`chosen`: configurations along the path, by number. `ended`: when the first and the last piece of the last one end."""
        b, at = self.bound, len(chosen)
        if at == len(b.path):
            self._others({k: b.may[k][c] for k, c in zip(b.path, chosen, strict=True)}, self.least(chosen, ended))
            return
        ways = list[tuple[float, int, Array]]()
        for c in range(len(b.may[b.path[at]])):
            sent = b.between[at - 1][0][chosen[-1], c] if at else ONE - ONE
            ends = joined(joined(ended[None], sent), b.computing[at][0][c])[0]
            ways.append((self.least([*chosen, c], ends), c, ends))
        for total, c, ends in sorted(ways, key=lambda way: way[:2]):
            if self.pruned(total):
                break
            self._path([*chosen, c], ends)

    def least(self, chosen: list[int], ended: Array) -> float:
        """A bound for all strategies with these configurations of the first operators on the path."""
        b, at = self.bound, len(chosen) - 1
        work = sum(b.working[k][c] - b.least_work[k] for k, c in zip(b.path, chosen, strict=False))
        loads = np.cumsum([b.synchronizing[i][c] for i, c in enumerate(chosen)], axis=0).max(axis=1)
        back, found = joined(ended[None], b.around[at][chosen[at]]), sum(b.least_work.values()) + work
        while True:
            # gradients of all operators up to this one are summed after its own backward pass has begun to end
            found = max(found, back[0, 1], back[0, 0] + loads[at])
            if not at:
                return float(found)
            at -= 1
            back = joined(joined(back, b.between[at][1][chosen[at], chosen[at + 1]]), b.computing[at][1][chosen[at]])

    def pruned(self, total: float) -> bool:
        """Whether what has this bound is not looked at."""
        if total >= self.best:
            return True
        if self.nodes >= NODES:
            self.left = min(self.left, total)
            return True
        self.nodes += 1
        return False

    def _others(self, configs: dict[int, ParallelConfig], total: float) -> None:
        b = self.bound
        open_ = [k for k in b.o.numbers if k not in configs]
        if open_:
            done = sum(b.working[k][b.may[k].index(config)] for k, config in configs.items()) + sum(b.least_work[k] for k in open_)
            for c, config in enumerate(b.may[open_[0]]):
                least = max(total, done + b.working[open_[0]][c] - b.least_work[open_[0]])
                if not self.pruned(least):
                    self._others({**configs, open_[0]: config}, least)
            return
        seconds = makespan(Strategy(self.bound.o, configs).graph)
        assert seconds >= total * (1 - 1e-9), "the bound is wrong"
        if seconds < self.best:
            self.best, self.configs = seconds, configs


def searched(name: str, devices: int) -> Search:
    model = NETWORKS[name](SAMPLES * devices)
    captured = capture(model.loss, model.params, model.batch)
    return Search(captured.graph, captured.differentiated, Machine.grid(1, devices, "p100"), Training())


def simulated(name: str, devices: int, space: str) -> dict[str, Any]:
    """The optimum in the simulator."""
    search, rng = searched(name, devices), random.Random(0)
    o = operators(search.graph, search.differentiated, Topology.uniform(search.machine))
    if space == "any":
        may = {k: list(every_config(o.nodes[k], devices)) for k in o.numbers}
        begun = initial(o, SAMPLES * devices)
    else:
        values = {k: options(search.assembled, o.nodes[k]) for k in o.numbers}
        may, begun = {k: list(found) for k, found in values.items()}, starts(search, o, values, rng)
    clock = Clock()
    found = explored(o, begun, draw=lambda k, rng: rng.choice(may[k]))
    row: dict[str, Any] = {"model": name, "devices": devices, "space": space, "operators": len(o.numbers)}
    row |= {"strategies": float(math.prod(map(len, may.values()))), "flexflow_seconds": clock(), "proposals": found.proposals}
    exact = DepthFirst(Bound(o, may), found.best.best, dict(found.best.configs))
    with uncollected():
        exact.run()
    optimal = min(exact.left, exact.best)
    row |= {"seconds": clock(), "nodes": exact.nodes, "whole": exact.left >= exact.best, "path": len(exact.bound.path)}
    row |= {"optimal_ms": optimal * 1e3, "best_ms": exact.best * 1e3, "flexflow_ms": found.best.best * 1e3}
    return row | {"flexflow / optimal": found.best.best / optimal, "met": found.best.best <= optimal}


def costed(name: str, devices: int) -> dict[str, Any]:
    """The optimum by this project's costs."""
    search = searched(name, devices)
    row: dict[str, Any] = {"model": name, "devices": devices, "space": "costs", "operators": len(search.graph)}
    row |= {"optimal_ms": search.fastest.time * 1e3, "whole": search.assembled.whole}
    for which in ("optcnn", "flexflow"):
        try:
            found = algorithm(which)(search, Asked(math.inf))
            row |= {f"{which}_ms": found.time * 1e3, f"{which} / optimal": found.time / search.fastest.time}
        except UnityError as problem:
            row |= {f"{which}_ms": None, f"no {which}": str(problem)}
    return row


def main() -> None:
    cases = {f"{name}, {devices}, {space}": (name, devices, space) for name, devices, space in SIMULATED}
    cases |= {f"{name}, 4, costs": (name, 4, "costs") for name in NETWORKS}
    chosen, every = asked(__doc__, cases)
    rows = []
    for case in chosen:
        name, devices, space = cases[case]
        rows.append(costed(name, devices) if space == "costs" else simulated(name, devices, space))
        print(case, {k: round(v, 6) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    show("Against the optimum", rows)
    if every:
        record("optimal", rows, most_nodes=NODES, samples_per_device=SAMPLES)


if __name__ == "__main__":
    main()
