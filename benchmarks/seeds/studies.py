"""FlexFlow's case studies (section 8.4, figures 12 and 13): how a strategy treats the layers of NMT and Inception-v3 on 4 P100.

A layer is a matrix of weights. Of the devices along which its operator works, some have other samples (and must synchronize the
gradient), some other parameters; what is left does the same work again, or none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.seeds import published as paper
from benchmarks.seeds.results import Result, Results, Table, ratio, times, usable
from unity.machine.machine import Machine
from unity.pcg.ir.graph import PARALLELIZATION, PCG, UNCHANGED, Node
from unity.search.cost.prediction import Prediction
from unity.search.simulator.topology import bytes_sent

PART, DEVICES, STUDIED = "flexflow6 p100", 4, ("nmt", "inception_v3")
ALGORITHMS = ("data-parallel", "flexflow", "unity")
STEPS = "flexsteps p100"  # the part of networks step by step, and what of it is beside figure 13
ANY_GPUS = {"figure 13 by hand, on any GPUs": "simulated figure 13", "flexflow, on any GPUs": "simulated flexflow"}
MOST = 3  # kinds of treatment that are listed


@dataclass(frozen=True)
class Layer:
    """Over how many devices a matrix of weights has other samples, other parameters, and nothing else to do."""

    name: str
    samples: int
    parameters: int
    idle: int


def treated(graph: PCG, differentiated: Collection[int]) -> Iterator[Layer]:
    """How every matrix of weights is treated where it is used first."""
    for k in sorted(differentiated):
        node = graph.inputs[k]
        matrix = node.tensors[0].ndim > 1
        user = next(((n, p) for n, p in _reached(graph, node) if n.kind not in UNCHANGED), None) if matrix else None
        if user is not None:
            yield _layer(node.name, *user, graph)


def synchronized(graph: PCG, differentiated: Collection[int], machine: Machine, prediction: Prediction) -> float:
    """Bytes that all devices send in a step to gather weights and to add up their gradients."""
    steps = {id(n) for k in differentiated for n, _ in _reached(graph, graph.inputs[k]) if n.kind in PARALLELIZATION}
    of_weights = [t.collective for t in prediction.collectives if id(t.collective.node) in steps]
    return sum(
        bytes_sent(c.kind, math.prod(machine.axes[a].size for a in c.axes), c.nbytes) * c.count * machine.devices
        for c in of_weights
    )


def _reached(graph: PCG, node: Node) -> Iterator[tuple[Node, int]]:
    """The nodes that use a value, through changes of its type and into scans, and as which operand."""
    for user, position in graph.users[id(node)]:
        if user.inside is not None:
            yield from _reached(user.inside, user.inside.inputs[position])
            continue
        yield user, position
        if user.kind in UNCHANGED:
            yield from _reached(graph, user)


def _layer(name: str, user: Node, position: int, graph: PCG) -> Layer:
    degrees = Counter[str]()
    for axis, weight, result in zip(graph.axes, user.operands[position].type, user.types[0], strict=True):
        who = "parameters" if weight.kind == "P" else "samples" if result.kind != "R" else "idle"
        degrees[who] += round(math.log2(axis.size))
    return Layer(name, 2 ** degrees["samples"], 2 ** degrees["parameters"], 2 ** degrees["idle"])


def studied(graph: PCG, differentiated: Collection[int], machine: Machine, prediction: Prediction) -> dict[str, Any]:
    """What is kept of a strategy for the tables below."""
    layers = [[x.name, x.samples, x.parameters, x.idle] for x in treated(graph, differentiated)]
    return {"treated": layers, "synchronized": synchronized(graph, differentiated, machine, prediction)}


def tables(results: Results) -> Iterator[Table]:
    """Figures 12 and 13 in words, the paper's beside ours."""
    columns = ("what", "paper", *ALGORITHMS)
    at = {a: results.one(PART, model="inception_v3", devices=DEVICES, algorithm=a) for a in ALGORITHMS}
    rows = [
        *((s.what, str(s), *_shares(at, key)) for key, s in paper.FLEXFLOW_INCEPTION.items()),
        ("convolutions", "some in samples, some in parameters, branches side by side", *(_kinds(r, "") for r in at.values())),
    ]
    notes = (*_room(at["data-parallel"]), BRANCHES)
    yield Table("FlexFlow, figure 12: Inception-v3 on 4 P100", columns, tuple(rows), notes)
    yield nmt(results)


def nmt(results: Results) -> Table:
    """Figure 13: as plans, of the scanned network; and on any GPUs, of the network step by step."""
    at = {a: results.one(PART, model="nmt", devices=DEVICES, algorithm=a) for a in ALGORITHMS}
    apart = {name: results.one(STEPS, model="nmt_unrolled", devices=DEVICES, algorithm=a) for name, a in ANY_GPUS.items()}
    data = results.one(STEPS, model="nmt_unrolled", devices=DEVICES, algorithm="simulated data-parallel")
    rows = [
        (layer, said, *(_kinds(r, layer) for r in at.values()), *(_placed(r, layer) for r in apart.values()))
        for layer, said in paper.FLEXFLOW_LAYERS.items()
    ]
    seconds = [times(ratio(r, at["data-parallel"])) for r in at.values()]
    seconds += [times(ratio(r, data, "simulated")) for r in apart.values()]
    rows.append(("seconds of a step, of data parallelism's", "", *(s or "not run" for s in seconds)))
    columns = ("what", "paper", *ALGORITHMS, *ANY_GPUS)
    return Table("FlexFlow, figure 13: NMT on 4 P100", columns, tuple(rows), (*_findings(at), *_apart(apart), FIGURE_13))


FIGURE_13 = (
    "The first columns are plans of the scanned network, by the price list; the others are simulated, step by step, where every "
    "operator of every step may be on any GPUs (`benchmarks/seeds/steps.py`), and count operators. A plan of one mesh runs every "
    "operator on all GPUs, so none can have a table on one GPU, or layers at the same time on different ones: a table is split in "
    "its parameters instead, which synchronizes nothing either and leaves no GPU idle. FlexFlow's search on any GPUs begins with "
    "data parallelism and with what figure 13 shows, and goes on from there."
)


def _apart(apart: Mapping[str, Result | None]) -> Iterator[str]:
    """Whether layers run at the same time on GPUs of their own, where they may."""
    for name, r in apart.items():
        every = r["placed"] if r is not None and "placed" in r else []
        rows = [row for row in every if "layers" in row[0] or "attention" in row[0]]
        if rows:
            count, part = sum(row[-1] for row in rows), sum(row[-1] for row in rows if len(row[3]) < DEVICES)
            yield f"{name}: {part} of {count} products of LSTM and attention layers are on some of the GPUs alone."


def _placed(result: Result | None, layer: str) -> str:
    """How the operators that read the matrices with a word in their names are split, most frequent first."""
    if result is None or "placed" not in result:
        return "not run"
    found = Counter[str]()
    for name, samples, parameters, gpus, n in result["placed"]:
        if layer in name:
            where = f", on {len(gpus)} GPU{'s' * (len(gpus) > 1)}" if len(gpus) < DEVICES else ""
            found[f"samples {samples}, parameters {parameters}{where}"] += n
    rest = sum(n for _, n in found.most_common()[MOST:])
    return "; ".join([f"{n} x {kind}" for kind, n in found.most_common(MOST)] + [f"{rest} otherwise"] * (rest > 0))


def _room(data: Result | None) -> Iterator[str]:
    """How much there is to be gained by sending less."""
    if data is not None and "compute" in data:
        yield (
            f"Communication is {1 - data['compute'] / data['time']:.1%} of data parallelism's step here, so to synchronize less "
            f"gains no more than that; in the paper the step is {1 - paper.FLEXFLOW_INCEPTION['time'].low:.0%} shorter."
        )


BRANCHES = (
    "Operators on a part of the devices are not among FlexFlow's strategies here, which must be plans. unity looks for branches "
    "side by side as well (docs/branches.md), and takes none with so many samples for each GPU; with fewer they are "
    "faster (`python -m benchmarks.branches plans`)."
)


def _shares(at: dict[str, Result | None], what: str) -> list[str]:
    data = at["data-parallel"]
    return [times(ratio(r, data, what)) if r is not None and what in r else "not run" for r in at.values()]


def _kinds(result: Result | None, layer: str) -> str:
    """How the layers with a word in their names are treated, equal ones counted."""
    if result is None or "treated" not in result:
        return "not run"
    found = Counter(tuple(rest) for name, *rest in result["treated"] if layer in name)
    parts = {kind: f"samples {kind[0]}, parameters {kind[1]}" + (f", idle {kind[2]}" if kind[2] > 1 else "") for kind in found}
    return "; ".join(f"{n} x {parts[kind]}" for kind, n in found.most_common())


def _findings(at: dict[str, Result | None]) -> Iterator[str]:
    """Whether what the paper says of embeddings and softmax holds for our strategy."""
    ours = at["unity"]
    if not usable(ours) or ours is None or "treated" not in ours:
        return
    embeds, softmax = ([row for row in ours["treated"] if word in row[0]] for word in ("table", "softmax"))
    synchronized, split = any(row[1] > 1 for row in embeds), all(row[2] > 1 for row in softmax)
    if embeds:
        yield f"unity: embeddings are not synchronized (the paper: so): {_holds(not synchronized)}."
    if softmax:
        yield f"unity: the softmax layer is split in its parameters (the paper: so): {_holds(split)}."


def _holds(found: bool) -> str:
    return "holds" if found else "does not hold"
