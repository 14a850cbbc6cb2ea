"""FlexFlow's recurrent networks in its own world: step by step, every operator on any devices, judged by its simulator.

A strategy gives every operator degrees and a device for each piece (`simulator.ParallelConfig`). So an operator may be on some of
the devices alone, as no plan of one mesh can say; these strategies are simulated, and not run.

- *data-parallel*: every operator splits its samples over all devices.
- *expert*: Wu et al. (2016), as FlexFlow has it (section 8.1.1): the samples are split over the nodes, and in a node operators of
  the same depth are on the same GPU: an LSTM layer with all its steps, of encoder and decoder alike. Where there are more depths
  than GPUs, neighbours share one, so that the busiest GPU has the least to do.
- *figure 13*: what the paper's search found for NMT on 4 GPUs, as far as its text and figure say it, in every node: each embedding
  on one GPU, the softmax layer split in its parameters, all else in samples, which the nodes share.
- *flexflow*: its search, beginning with data parallelism and with the strategy of figure 13. Proposals have any degrees, on devices
  in a row, as the released implementation draws them: among placements at random hardly any is better on 64 devices.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from math import prod
from typing import Any

from unity.baselines.flexflow import Stop, explored
from unity.baselines.flexflow.delta.simulation import makespan
from unity.baselines.flexflow.mcmc import Configs
from unity.baselines.flexflow.strategy.configs import ParallelConfig, data_parallel, possible
from unity.baselines.flexflow.strategy.operators import Operators, operators
from unity.baselines.flexflow.strategy.pieces import largest_degree, slices, split_shape
from unity.baselines.flexflow.strategy.strategy import Strategy
from unity.machine.machine import Machine
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.graph import Node
from unity.search.simulator import Topology

IN_A_NODE = 4  # GPUs, on both of FlexFlow's clusters
SEARCH = "simulated flexflow"


def simulated(captured: Captured, machine: Machine, algorithm: str, batch: int, budget: int | None) -> dict[str, Any]:
    """Seconds of a step by the simulator, of computing on all devices together, and bytes that all devices send."""
    o = operators(captured.graph, captured.differentiated, Topology.uniform(machine))
    more: dict[str, Any] = {}
    if algorithm == SEARCH:
        starts = {name.removeprefix("simulated "): make(o, batch) for name, make in BEGUN.items()}
        found = explored(o, starts, stop=Stop(None, budget), draw=lambda k, rng: in_a_row(o.nodes[k], o.topology.devices, rng))
        configs = found.best.configs
        more = {"proposals": found.proposals, "found": {chain.start: chain.best for chain in found.chains}}
    else:
        configs = BY_HAND[algorithm](o, batch)
    graph = Strategy(o, configs).graph
    tasks = graph.tasks.values()
    if o.topology.devices == IN_A_NODE:
        more["placed"] = placed(o, configs)
    return more | {
        "operators": len(o.numbers),
        "simulated": makespan(graph),
        "compute": sum(task.seconds for task in tasks if task.device < o.topology.devices),
        "sent": sum(task.nbytes for task in tasks),
    }


def placed(o: Operators, configs: Configs) -> list[list[Any]]:
    """How the operators are split that read a matrix of weights: its name, over how many GPUs samples and parameters are split, on
    which GPUs; and how many operators so (steps have operators of their own)."""
    found = Counter[tuple[str, int, int, tuple[int, ...]]]()
    for (node, result), readers in o.weights.items():
        weight = o.nodes[node]
        if weight.kind == "input" and weight.tensors[result].ndim > 1:
            for k, position in readers:
                config = configs[k]
                cut = {dim for cuts in slices(o.nodes[k], config.degrees, position).cuts for _, _, dim in cuts}
                parameters = prod(config.degrees[dim] for dim in cut)
                found[name_of(weight), config.pieces // parameters, parameters, tuple(sorted(set(config.devices)))] += 1
    return [[name, samples, parameters, list(gpus), n] for (name, samples, parameters, gpus), n in found.items()]


def in_samples(o: Operators, batch: int) -> Configs:
    """Data parallelism on all devices."""
    return {k: data_parallel(o.nodes[k], batch, o.topology.devices) for k in o.numbers}


def expert(o: Operators, batch: int) -> Configs:
    """Nodes have other samples, the GPUs of a node other depths."""
    depths = depths_of(o)
    work = [sum(sum(o.whole[k]) for k in o.numbers if depths[k] == d) for d in range(1 + max(depths.values()))]
    gpu = shared_out(work, in_a_node(o))
    return {k: in_every_node(o, k, batch, gpu[depths[k]]) for k in o.numbers}


def in_a_node(o: Operators) -> int:
    """How many GPUs a node has."""
    return min(IN_A_NODE, o.topology.devices)


def in_every_node(o: Operators, k: int, batch: int, gpu: int) -> ParallelConfig:
    """An operator with other samples in every node, on one GPU there."""
    config = data_parallel(o.nodes[k], batch, o.topology.devices // in_a_node(o))
    return ParallelConfig(config.degrees, tuple(in_a_node(o) * node + gpu for node in config.devices))


def figure_13(o: Operators, batch: int) -> Configs:
    """In every node each embedding is on a GPU, and the softmax layer with its loss is split in parameters; all else in samples."""
    found, depths, gpus = dict(in_samples(o, batch)), depths_of(o), in_a_node(o)
    inputs = [(w, node) for w, node in ((w, o.nodes[w[0]]) for w in o.weights) if node.kind == "input"]
    tables = {w: k % gpus for k, w in enumerate(w for w, node in inputs if TABLE in name_of(node))}
    classes = max(node.tensors[0].shape[-1] for _, node in inputs if SOFTMAX in name_of(node))
    for k in o.numbers:
        node, shape = o.nodes[k], split_shape(o.nodes[k])
        if of := [tables[w] for w in o.reads[k] if w in tables]:
            found[k] = in_every_node(o, k, batch, of[0])
        elif depths[k] == max(depths.values()) and len(shape) > 1 and shape[-1] == classes:
            degree = max(d for d in range(1, gpus + 1) if largest_degree(node, len(shape) - 1) % d == 0)
            nodes = in_every_node(o, k, batch, 0)
            devices = tuple(first + gpu for first in nodes.devices for gpu in range(degree))
            found[k] = ParallelConfig((*nodes.degrees[:-1], degree), devices)
    return found


Make = Callable[[Operators, int], Configs]
BY_HAND: dict[str, Make] = {
    "simulated data-parallel": in_samples,
    "simulated expert": expert,
    "simulated figure 13": figure_13,
}
BEGUN = {name: BY_HAND[name] for name in ("simulated data-parallel", "simulated figure 13")}
SIMULATED = (*BY_HAND, SEARCH)


def in_a_row(node: Node, devices: int, rng: random.Random) -> ParallelConfig:
    """A configuration at random: any degrees, on devices that follow each other."""
    degrees = rng.choice(possible(node, devices))
    first = rng.randrange(devices - prod(degrees) + 1)
    return ParallelConfig(degrees, tuple(range(first, first + prod(degrees))))


def depths_of(o: Operators) -> dict[int, int]:
    """How deep every operator is in the network: as the deepest of its weights, and of what it reads.

    What is made of tokens and labels alone is where it is read.
    """
    weights = [o.graph.inputs[k] for k in sorted(o.differentiated)]
    lstms = len({found[1] for found in map(LAYER.search, map(name_of, weights)) if found})
    deep = {id(node): depth_of(name_of(node), lstms) for node in weights}
    for node in o.nodes:
        below = [deep[id(v.node)] for v in node.operands if id(v.node) in deep]
        if below:
            deep[id(node)] = max(below)
    known = set(deep)
    for k in reversed(o.numbers):
        own = deep.get(id(o.nodes[k]), 0)
        for made in (id(o.nodes[e.producer]) for e in o.incoming[k]):
            if made not in known:
                deep[made] = min(deep.get(made, own), own)
    return {k: deep.get(id(o.nodes[k]), 0) for k in o.numbers}


TABLE, SOFTMAX = "['token']", "['softmax']"
LAYER = re.compile(r"\['layers'\]\[(\d+)\]")


def name_of(node: Node) -> str:
    """A weight's name, as `benchmarks.models.recurrent` has it."""
    return node.name


def depth_of(name: str, lstms: int) -> int:
    """How deep a weight is: embeddings, so many LSTM layers, attention, softmax."""
    if TABLE in name:
        return 0
    if found := LAYER.search(name):
        return 1 + int(found[1])
    return lstms + 2 if SOFTMAX in name else lstms + 1


def shared_out(work: Sequence[float], gpus: int) -> list[int]:
    """A GPU for every depth, one after the other, so that the busiest has the least work."""
    cuts = combinations(range(1, len(work)), min(gpus, len(work)) - 1)
    parts = (list(pairwise((0, *cut, len(work)))) for cut in cuts)
    best = min(parts, key=lambda some: max(sum(work[first:end]) for first, end in some))
    return [gpu for gpu, (first, end) in enumerate(best) for _ in range(first, end)]
