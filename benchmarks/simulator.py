"""Delta simulation against full simulation, and the simulator at 192 devices.

`python -m benchmarks.simulator`. As in FlexFlow (sections 5.2, 5.3 and table 5): strategies are changed at one operator drawn at
random, to a configuration drawn at random, beginning with data parallelism. Full is to build the task graph of the new strategy
and to simulate it; delta is to change the tasks of that operator and around it, and to simulate what follows. Each walks on its own
through the same strategies, as a search does, timed in seconds of this process. All changes are kept: the strategy walks away from
data parallelism. `ratio` is the median of changes' ratios, `of_sums` that of the two walks, as FlexFlow compares.

Where networks are long a change makes few tasks anew, and what is left is to simulate what follows it (`again`: the part of all
tasks whose times are found again). AlexNet has but 20 operators: on 64 devices a change takes away or puts a seventh of all tasks,
and more than half are simulated again, while to build them takes little. `bound` is all tasks in those that a change puts.

At 192 devices a plan of unity's own search is simulated with one device standing for all. A change is one operator's other
parallelization (with the changes of type around it); `rebuilt` is the time to find the changed tasks by building all of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.models import get
from benchmarks.models.model import Model
from benchmarks.models.unrolled import nmt_unrolled, rnnlm_unrolled, rnntc_unrolled
from benchmarks.record import asked, record, show
from unity.base.compiled_loops import load
from unity.base.gc_pause import uncollected
from unity.baselines.flexflow.delta.simulation import Change, DeltaSimulation, makespan
from unity.baselines.flexflow.strategy import encoding
from unity.baselines.flexflow.strategy.configs import ParallelConfig, data_parallel, drawn, on_one, possible
from unity.baselines.flexflow.strategy.operators import Operators, operators
from unity.baselines.flexflow.strategy.strategy import Strategy
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.parallelize import parallelize
from unity.search.cost.assembly import Assembled, assemble
from unity.search.cost.cost import Training
from unity.search.simulator import TaskGraph, Topology, simulate
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.minplus import product
from unity.search.solver.problem import Alternatives, Point

PROPOSALS = {4: 100, 64: 20}
LEAST = {4: 3.0, 64: 7.0}  # targets: times as fast as full
MOST_FULL, MOST_DELTA = 0.5, 0.02  # targets at 192 devices: seconds
CHANGES = 30
MACHINES = {4: "flexflow-p100-1x4", 64: "flexflow-k80-16x4"}  # FlexFlow, section 8.1


@dataclass(frozen=True)
class Network:
    """A network of FlexFlow's, and its samples per device (section 8)."""

    build: Callable[..., Model]
    samples: int = 64


NETWORKS = {
    "alexnet": Network(lambda **sizes: get("alexnet", **sizes), 256),
    "inception_v3": Network(lambda **sizes: get("inception_v3", **sizes)),
    "resnet101": Network(lambda **sizes: get("resnet101", **sizes)),
    "rnntc": Network(rnntc_unrolled),
    "rnnlm": Network(rnnlm_unrolled),
    "nmt": Network(nmt_unrolled),
}
LARGE = ("bert_large", "inception_v3")


class Clock:
    """Seconds of this process since the last look: others on the cores do not count."""

    def __init__(self) -> None:
        self.then = time.process_time()

    def __call__(self) -> float:
        before, self.then = self.then, time.process_time()
        return self.then - before


def loaded() -> None:
    """Has loops read from disk, or compiled, which is when they are called first: not while something is timed."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        y = x @ w
        return jnp.sum((y - y.mean(0)) ** 2)

    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4), (16, 8)))
    captured = capture(loss, w, x)
    o = operators(captured.graph, captured.differentiated, Topology.uniform(Machine.grid(1, 2, "p100")))
    strategy = Strategy(o, {k: data_parallel(o.nodes[k], 16, 2) for k in o.numbers})
    delta = DeltaSimulation(strategy.graph)
    for k in o.numbers:
        delta.change(strategy.change(k, on_one(o.nodes[k])))
        delta.back()
        strategy.back()
    if load():
        one = np.ones((1, 2, 2))
        product(one, one[:, 0], one)


def price(o: Operators) -> None:
    """Finds out what a piece of each operator takes under each of its degrees: FlexFlow measures that before, and keeps it."""
    for k in o.numbers:
        for degrees in possible(o.nodes[k], o.topology.devices):
            o.seconds(k, degrees)


def proposals(o: Operators, batch: int, devices: int) -> Iterator[tuple[Strategy, int, ParallelConfig]]:
    """Data parallelism, and an operator's other configuration drawn at random, again and again: the same ones for each walk."""
    for cache in (encoding.operand_block, encoding.weight_block):  # whoever walks finds out himself what pieces have in common
        cache.cache_clear()
    rng = random.Random(0)
    strategy = Strategy(o, {k: data_parallel(o.nodes[k], batch, devices) for k in o.numbers})
    for _ in range(PROPOSALS[devices]):
        k = rng.choice(o.numbers)
        yield strategy, k, drawn(o.nodes[k], devices, rng)


def with_delta(o: Operators, batch: int, devices: int) -> Iterator[dict[str, float]]:
    """A walk with delta simulation: seconds of each change, and the step it leads to."""
    delta: DeltaSimulation | None = None
    for strategy, k, config in proposals(o, batch, devices):
        delta = delta or DeltaSimulation(strategy.graph)
        clock = Clock()
        change = strategy.change(k, config)
        changed = clock()
        delta.change(change)
        seconds = {"change": changed, "delta": clock()}
        tasks = len(delta.graph.tasks)
        put = sum(task is not None for task in change.values())
        yield seconds | {
            "tasks": tasks,
            "changed": len(change),
            "put": put,
            "again": delta.simulated / tasks,
            "step": delta.makespan,
        }


def with_full(o: Operators, batch: int, devices: int) -> Iterator[dict[str, float]]:
    """The same walk with full simulation."""
    configs: dict[int, ParallelConfig] = {}
    for strategy, k, config in proposals(o, batch, devices):
        configs = (configs or strategy.configs) | {k: config}
        clock = Clock()
        graph = Strategy(o, configs).graph
        built = clock()
        found = makespan(graph)
        yield {"build": built, "full": clock(), "step": found}


def against_full(name: str, devices: int) -> dict:
    """How much faster delta simulation is."""
    network = NETWORKS[name]
    batch = network.samples * devices
    model = network.build(batch=batch)
    captured = capture(model.loss, model.params, model.batch)
    topology = Topology.uniform(Machine.preset(MACHINES[devices]))
    o, again = (operators(captured.graph, captured.differentiated, topology) for _ in range(2))
    price(o)
    price(again)
    with uncollected():
        parts, wholes = list(with_delta(o, batch, devices)), list(with_full(again, batch, devices))
    assert [row["step"] for row in parts] == [row["step"] for row in wholes]
    part = [row["change"] + row["delta"] for row in parts]
    whole = [row["build"] + row["full"] for row in wholes]
    each = {key: median(row[key] for row in rows) for rows in (parts, wholes) for key in rows[0] if key != "step"}
    ratio = median(w / p for w, p in zip(whole, part, strict=True))
    found = {"model": name, "devices": devices, "operators": len(o.numbers)} | each
    found["bound"] = median(row["tasks"] / row["put"] for row in parts if row["put"])
    return found | {"ratio": ratio, "of_sums": sum(whole) / sum(part), "met": ratio >= LEAST[devices]}


def at_192(name: str) -> dict:
    """A plan on 192 devices: simulated in full, and changed at one operator."""
    model, machine = get(name), Machine.grid(32, 6, "v100")
    captured = capture(model.loss, model.params, model.batch)
    assembled = assemble(captured.graph, captured.differentiated, machine, Training())
    (point,) = Minimizer(assembled.problem).at([0.0])

    def tasks(p: Point) -> TaskGraph:
        graph = parallelize(captured.graph, assembled.assignment(p))
        return simulate(graph, machine, captured.differentiated).timeline.graph

    with uncollected():
        graph = parallelize(captured.graph, assembled.assignment(point))
        found, times, rebuilt, deltas = simulate(graph, machine, captured.differentiated), [], [], []
        for _ in range(5):
            clock = Clock()
            found = simulate(graph, machine, captured.differentiated)
            times.append(clock())
        delta = DeltaSimulation(found.timeline.graph)
        for other in others(assembled, point):
            clock = Clock()
            change = difference(found.timeline.graph, tasks(other))
            rebuilt.append(clock())
            undo = delta.change(change)
            deltas.append(clock())
            delta.change(undo)
    row = {"model": name, "devices": machine.devices, "operators": len(captured.graph), "tasks": len(found.timeline.graph.tasks)}
    row |= {"full": median(times), "delta": median(deltas), "slowest_delta": max(deltas), "rebuilt": median(rebuilt)}
    row |= {"step_ms": found.makespan * 1e3, "serial_ms": point.time * 1e3}
    return row | {"met": row["full"] <= MOST_FULL and row["slowest_delta"] <= MOST_DELTA}


def others(assembled: Assembled, point: Point) -> Iterator[Point]:
    """Plans that are a plan but for one site's value."""
    problem, rng = assembled.problem, np.random.default_rng(0)
    sites = rng.permutation(len(problem.sizes)).tolist()
    found = 0
    for site in sites:
        values = list(point.values)
        values[site] = int(rng.integers(problem.sizes[site]))
        alone = [c.time[:, v] for c, v in zip(problem.unary, values, strict=True)]
        joined = [e.cost.time[:, values[e.first], values[e.second]] for e in problem.edges]
        if values[site] == point.values[site] or not all(np.isfinite(t).any() for t in (*alone, *joined)):
            continue
        unary, edges = (tuple(int(np.argmin(t)) for t in times) for times in (alone, joined))
        yield replace(point, values=tuple(values), alternatives=Alternatives(unary, edges))
        found += 1
        if found == CHANGES:
            return


def difference(before: TaskGraph, after: TaskGraph) -> Change:
    """The change from one task graph to another."""
    gone = dict.fromkeys(before.tasks.keys() - after.tasks.keys())
    return gone | {n: t for n, t in after.tasks.items() if before.tasks.get(n) != t}


def main() -> None:
    cases = [f"{name}, {n}" for n in MACHINES for name in NETWORKS] + [f"{name}, 192" for name in LARGE]
    chosen, every = asked(__doc__, cases)
    small, large = [], []
    loaded()
    for case in chosen:
        name, n = case.split(", ")
        row = at_192(name) if n == "192" else against_full(name, int(n))
        (large if n == "192" else small).append(row)
        print(case, {k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    show("Delta simulation against full simulation: seconds", small)
    show("192 devices, one standing for all: seconds", large)
    if every:
        record("simulator", [*small, *large], targets={"ratio": LEAST, "full": MOST_FULL, "delta": MOST_DELTA})


if __name__ == "__main__":
    main()
