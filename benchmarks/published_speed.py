"""How long the published algorithms search, against the seconds that they published.

`python -m benchmarks.published_speed`. Seconds are of this process alone; others on the cores do not count.

OptCNN (table 3): 4 GPUs, 32 samples each. `search` is algorithm 1: eliminations, enumeration and undoing, with costs known before,
as the paper has it. `capture` and `assemble` (all strategies and their costs, and which of them are OptCNN's) come before it and
have no counterpart there, where operators are measured. `nodes` are the layers of the graph, `final` those of the final graph: K.

TensorOpt (table 2, FT-LDP): 16 GPUs, at the sizes of its table 1. `assemble` lists configurations and their costs, which the paper
measures before; `search` is frontier tracking. Published are seconds of 48 cores.

FlexFlow (table 5, delta simulation): its six networks on its two clusters, from a strategy at random, as there. What is configured
are layers, as there (`flexflow.layers`): a convolution with its bias and activation, a step of an LSTM layer. `costs` is how long
it takes to know what a piece of each operator takes under each of its degrees: the paper measures and keeps them, and 0.04 s for
AlexNet's search have no room for measuring convolutions. How many proposals the paper's searches made is not published, and its
rule ends a chain when it has found nothing better for half of its time: a chain that still finds something goes on. So here it is
a number of proposals for each operator, `TURNS`. A chain that has not made them all in `MOST` seconds is ended, and `search` is
what all of them would take at the same pace (`whole` is false). `each_ms` is what one proposal takes. `random_ms` is the step that
was found, `data_ms` data parallelism, both simulated.
"""

from __future__ import annotations

from typing import Any

from benchmarks.models import get
from benchmarks.record import asked, record, show
from benchmarks.seeds.cases import AS_TABLE_1
from benchmarks.seeds.published import FLEXFLOW_SECONDS, OPTCNN_SECONDS, TRACKING, TRACKING_TARGETS
from benchmarks.simulator import MACHINES, NETWORKS, Clock, loaded, price
from unity.base.gc_pause import uncollected
from unity.baselines.flexflow import Stop, explored, initial, layers
from unity.baselines.flexflow.delta.simulation import makespan
from unity.baselines.flexflow.strategy.operators import operators
from unity.baselines.flexflow.strategy.strategy import Strategy
from unity.baselines.optcnn import optimal
from unity.baselines.optcnn_space import layerwise, light
from unity.baselines.tensoropt import TensorOpt
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.search.cost.assembly import assemble
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.search.simulator import Topology

SAMPLES = 32  # of OptCNN's, for each GPU
TURNS, MOST = 10, 60.0
SLOWER = {"optcnn": 2.0, "flexflow": 1.0}  # targets: times the published seconds, at most
DEVICES = (4, 64)  # of FlexFlow's table


def optcnn(name: str, devices: int) -> dict[str, Any]:
    model, machine, clock = get(name, batch=SAMPLES * devices), Machine.preset(MACHINES[devices]), Clock()
    captured = capture(model.loss, model.params, model.batch)
    row: dict[str, Any] = {"model": name, "algorithm": "optcnn", "devices": devices, "capture": clock()}
    assembled = assemble(captured.graph, captured.differentiated, machine, Training())
    problem, rim = layerwise(assembled), light(assembled.opened)
    row["assemble"] = clock()
    with uncollected():
        found = optimal(problem, rim)
    row |= {"search": clock(), "published": OPTCNN_SECONDS[name], "nodes": found.nodes, "final": found.final}
    row |= {"node_eliminations": found.node_eliminations, "edge_eliminations": found.edge_eliminations}
    row["step_ms"] = found.seconds * 1e3
    return row | {"met": row["search"] <= SLOWER["optcnn"] * row["published"]}


def tensoropt(name: str, devices: int) -> dict[str, Any]:
    model, clock = get(name, **AS_TABLE_1[name]), Clock()
    captured = capture(model.loss, model.params, model.batch)
    row: dict[str, Any] = {"model": name, "algorithm": "tensoropt", "devices": devices, "capture": clock()}
    search = Search(captured.graph, captured.differentiated, Machine.preset("tensoropt-v100"), Training())
    found = TensorOpt(search)
    row |= {"nodes": len(found.space.problem.sizes), "assemble": clock()}
    row |= {"points": len(found.tracked.points), "search": clock(), "published": TRACKING[name]["ldp"]}
    return row | {"target": TRACKING_TARGETS[name], "met": row["search"] <= TRACKING_TARGETS[name]}


def flexflow(name: str, devices: int) -> dict[str, Any]:
    network = NETWORKS[name]
    batch = network.samples * devices
    model, clock = network.build(batch=batch), Clock()
    captured = capture(model.loss, model.params, model.batch, clustering=layers)
    row: dict[str, Any] = {"model": name, "algorithm": "flexflow", "devices": devices, "capture": clock()}
    o = operators(captured.graph, captured.differentiated, Topology.uniform(Machine.preset(MACHINES[devices])))
    begun = initial(o, batch)
    data = makespan(Strategy(o, begun["data parallelism"]).graph)
    clock()
    price(o)
    row["costs"] = clock()
    wanted = TURNS * len(o.numbers)
    (chain,) = explored(o, {"random": begun["random"]}, stop=Stop(MOST, wanted, early=False)).chains
    each = clock() / chain.proposals
    row |= {"search": each * wanted, "published": FLEXFLOW_SECONDS[name][devices], "whole": chain.proposals == wanted}
    row |= {"operators": len(o.numbers), "proposals": chain.proposals, "accepted": chain.accepted, "each_ms": each * 1e3}
    row |= {"data_ms": data * 1e3, "first_ms": chain.first * 1e3, "random_ms": chain.best * 1e3}
    return row | {"met": row["search"] <= SLOWER["flexflow"] * row["published"]}


def main() -> None:
    cases = {f"{name}, optcnn, 4": (optcnn, name, 4) for name in OPTCNN_SECONDS}
    cases |= {f"{name}, tensoropt, 16": (tensoropt, name, 16) for name in TRACKING}
    cases |= {f"{name}, flexflow, {n}": (flexflow, name, n) for n in DEVICES for name in FLEXFLOW_SECONDS}
    chosen, every = asked(__doc__, cases)
    loaded()
    rows = []
    for case in chosen:
        measured, name, devices = cases[case]
        rows.append(measured(name, devices))
        print(case, {k: round(v, 5) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    for which in ("optcnn", "tensoropt", "flexflow"):
        show(f"{which}: seconds of a search", [row for row in rows if row["algorithm"] == which])
    if every:
        record("published_speed", rows, targets=SLOWER, configured="layer", proposals_per_operator=TURNS, seconds_at_most=MOST)


if __name__ == "__main__":
    main()
