"""Predicted against measured time of a step, with measured operators and without: is the order of strategies kept?

`python -m benchmarks.profile`. Eight virtual CPU devices, which share the host's cores: run it where nothing else runs. Each
model's operators are measured first, as `unity profile` does. Then strategies are drawn: points of the frontier; data parallelism,
weights in pieces, weights in pieces and data whole; and random ones: the best where every operator's cost is drawn anew for each of
its values, near the true one (good strategies) or far from it (anything). No two are predicted within 2.5 % of each other: of
closer ones, the measurements themselves often do not give the same order twice. Sizes are such that a step takes tens of
milliseconds: below that, what the host takes to begin and end it is most of what is measured. Programs are compiled as XLA does by
default, and take turns.

A step's time is without the call, which is the same for all: of a program that gives as many arrays and does nothing else. The C
library is told to keep memory: it would give large arrays back, and every step would spend its time on getting them again.

*Kendall* is the rank correlation of predicted and measured times, *error* the median of |predicted - measured| / measured, and
*chosen* how many times as long the strategy predicted best takes as the measured best. *Own* figures are of the processor time
of this process, for hosts that others use.

How much of an order there is to be kept is said, too: *again* is the rank correlation of what half of the rounds measured with
what the other half did.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import datetime
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from scipy.stats import kendalltau

import unity
from benchmarks.alternate import alternate
from benchmarks.baselines import gpt_block
from benchmarks.models import concrete
from benchmarks.models.alexnet import alexnet
from benchmarks.models.gpt import gpt
from benchmarks.models.model import Model
from benchmarks.models.recommenders import dlrm
from benchmarks.models.recurrent import rnnlm
from benchmarks.record import record, results, show
from unity.baselines.by_hand import usual
from unity.exec.measure.local_machine import where
from unity.machine.machine import Machine
from unity.machine.profiles.store import Store
from unity.plan.plan import Plan
from unity.profiling import profile
from unity.search.cost.assembly import Assembled
from unity.search.cost.prediction import Prediction, predict
from unity.search.session import Candidate
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Point

KENDALL, ERROR, CHOSEN = 0.8, 0.25, 1.05  # targets
APART = 1.025  # the least ratio of two predicted times
STRATEGIES, ENOUGH = 24, 20  # as many as are looked for, and as say something
CALL = "the call alone"
TABLES = (100_000, 50_000, 10_000, 1_000)  # rows
SPREADS = (1.0, 10.0, 100.0)  # of random costs
TRIES = 60  # random strategies drawn at most, for each one wanted

CASES: dict[str, Callable[[], Model]] = {
    "gpt block": lambda: gpt_block(256, 8, 64, 16),
    "gpt": lambda: gpt(layers=2, hidden=256, heads=8, vocab=512, seq=128, batch=16),
    "cnn": lambda: alexnet(image=63, width=256, batch=16, classes=16),
    "dlrm": lambda: dlrm(tables=TABLES, width=64, bottom=(64, 1024, 512, 64), top=(1024, 512, 8), batch=4096),
    "lstm": lambda: rnnlm(layers=2, hidden=128, vocab=1024, steps=32, batch=256),
}


@dataclass(frozen=True)
class Strategy:
    """A plan, what it is, and what it should take with measured operators and without."""

    name: str
    plan: Plan
    profiled: Prediction
    plain: Prediction


def candidates(plan: Plan, count: int) -> Iterator[tuple[str, Plan]]:
    """Different strategies of a plan's program: some on the frontier, the usual ones, then random ones."""
    made, seen = plan.program.family, set()

    def fresh(candidate: Candidate) -> bool:
        key = Plan(made, candidate).program.pcg.key
        return key not in seen and not seen.add(key)

    last = len(plan.frontier) - 1
    for k in sorted({round(i * last / max(1, count // 3 - 1)) for i in range(count // 3)}):
        if fresh(plan.frontier[k].program.candidate):
            yield f"frontier {k}", plan.frontier[k]
    assembled = made.search.assembled
    for name, data, weights in (("data parallel", True, False), ("FSDP", True, True), ("weights in pieces", False, True)):
        found = usual(assembled, data, weights)
        if found is not None and fresh(candidate := made.search.candidate(assembled, found)):
            yield name, Plan(made, candidate)
    rng = np.random.default_rng(0)
    for k in range(TRIES * count):
        spread = SPREADS[k % len(SPREADS)]
        candidate = made.search.candidate(assembled, drawn(assembled, rng, spread))
        if fresh(candidate):
            yield f"random {spread} {k}", Plan(made, candidate)


def strategies(plan: Plan, machine: Machine, count: int) -> list[Strategy]:
    """So many of the candidates, in their order, whose predicted times are apart. If those are too few, the most that are apart."""
    differentiated, plain = plan.program.family.search.differentiated, machine.with_profile(None)
    seen: list[tuple[str, Plan, Prediction]] = []
    found: list[tuple[str, Plan, Prediction]] = []
    for name, candidate in candidates(plan, count):
        seen.append((name, candidate, predict(candidate.program.pcg, machine, differentiated)))
        if all(apart(seen[-1], other) for other in found):
            found.append(seen[-1])
        if len(found) == count:
            break
    else:
        found = []
        for one in sorted(seen, key=lambda one: one[2].time):
            if not found or apart(found[-1], one):
                found.append(one)
    return [
        Strategy(f"{k} {name}", candidate, profiled, predict(candidate.program.pcg, plain, differentiated))
        for k, (name, candidate, profiled) in enumerate(found)
    ]


def apart(one: tuple[str, Plan, Prediction], other: tuple[str, Plan, Prediction]) -> bool:
    """Whether two predicted times are."""
    low, high = sorted((one[2].time, other[2].time))
    return high > APART * low


def drawn(assembled: Assembled, rng: np.random.Generator, spread: float) -> Point:
    """The best strategy where every operator's cost is drawn anew for each of its values: `spread` times the mean of all operators'
    is added, in the mean."""
    mean = float(np.mean([c.forward.min() for c in assembled.costs]))
    costs = tuple(replace(c, forward=c.forward + spread * mean * rng.exponential(1.0, len(c.forward))) for c in assembled.costs)
    return Minimizer(replace(assembled, costs=costs, port_costs={}).problem).at([0.0])[0]


@dataclass(frozen=True)
class Measured:
    """Median seconds of a strategy's step: on the wall, of this process' own processor time, and in each half of the rounds."""

    wall: float
    own: float
    halves: tuple[float, float]


def measured(model: Model, found: list[Strategy], rounds: int) -> dict[str, Measured]:
    """What every strategy's step takes."""
    params, batch = concrete(model)
    runs: dict[str, Callable[[], Any]] = {}
    for s in found:
        args = s.plan.shard(params, batch)
        compiled = jax.jit(jax.value_and_grad(s.plan)).lower(*args).compile()
        runs[s.name] = lambda compiled=compiled, args=args: compiled(*args)
    runs[CALL] = _call(found[0].plan, params, batch)
    times = alternate(runs, rounds)
    call = times.pop(CALL)
    taken = {}
    for name, t in times.items():
        halves = median(t.wall[::2]), median(t.wall[1::2] or t.wall)
        taken[name] = Measured(t.median - call.median, median(t.own) - median(call.own), halves)
    return taken


def _call(plan: Plan, params: Any, batch: Any) -> Callable[[], Any]:
    """A program that takes what a step takes, and gives as many arrays, of one number on each device."""
    args = plan.shard(params, batch)
    spread = NamedSharding(plan.inspect.mesh, PartitionSpec(plan.inspect.mesh.axis_names))
    one = jax.ShapeDtypeStruct((plan.inspect.mesh.size,), np.float32)
    count = 1 + len(jax.tree.leaves(params))
    step = jax.jit(lambda params, batch: [jax.numpy.full(one.shape, k, one.dtype) for k in range(count)], out_shardings=spread)
    compiled = step.lower(*args).compile()
    return lambda: compiled(*args)


def case(name: str, count: int, rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One model's figures, and every strategy's."""
    model, devices, store = CASES[name](), jax.devices(), Store.usual()
    started = time.perf_counter()
    args = (model.params, model.batch)
    operators = sum(step.task is not None for step in profile(model.loss, args, {"search": "captured"}, devices, store))
    seconds = time.perf_counter() - started
    machine = Machine.local(devices).with_profile(store.profile(where(devices)))
    plan = unity.optimize(model.loss, *args, machine=machine, search="captured", progress=False)
    found = strategies(plan, machine, count)
    times = measured(model, found, rounds)
    rows = [
        {
            "model": name,
            "strategy": s.name,
            "measured ms": times[s.name].wall * 1e3,
            "own ms": times[s.name].own * 1e3,
            "profiled ms": s.profiled.time * 1e3,
            "of that, operators": sum(t.forward + t.backward for t in s.profiled.operators) * 1e3,
            "plain ms": s.plain.time * 1e3,
            "known": dict(Counter(t.how for t in s.profiled.operators)),
        }
        for s in found
    ]
    figures: dict[str, Any] = {"model": name, "strategies": len(found), "operators": operators, "profile s": seconds}
    for which in ("profiled", "plain"):
        figures |= {f"{which} {k}": v for k, v in compared(rows, f"{which} ms", "measured ms").items()}
        own = compared(rows, f"{which} ms", "own ms")
        figures |= {f"{which} own Kendall": own["Kendall"], f"{which} own chosen": own["chosen"]}
    first, second = zip(*(t.halves for t in times.values()), strict=True)
    figures |= {"again": float(kendalltau(first, second).statistic)}  # pyright: ignore[reportAttributeAccessIssue]
    good = figures["profiled Kendall"] >= KENDALL and figures["profiled error"] <= ERROR and figures["profiled chosen"] <= CHOSEN
    return figures | {"met": bool(good and len(found) >= ENOUGH)}, rows


def compared(rows: list[dict[str, Any]], predicted: str, actual: str) -> dict[str, float]:
    """Rank correlation, median error, and how good the choice is."""
    p, m = (np.array([row[name] for row in rows]) for name in (predicted, actual))
    return {
        "Kendall": float(kendalltau(p, m).statistic),  # pyright: ignore[reportAttributeAccessIssue]
        "error": float(np.median(np.abs(p - m) / m)),
        "chosen": float(m[p.argmin()] / m.min()),
    }


KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_TOP_PAD_": str(1 << 28)}


def main() -> None:
    if not KEEPING.keys() <= os.environ.keys():  # read when a process starts
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.profile", *sys.argv[1:]], {**os.environ, **KEEPING})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="some of the cases")
    parser.add_argument("--strategies", type=int, default=STRATEGIES)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = os.environ.get("UNITY_BENCHMARK_CACHE", cache)  # the machine as it is today
        for name in options.cases or CASES:
            figures, rows = case(name, options.strategies, options.rounds)
            show(name, [{k: v for k, v in row.items() if k != "model"} for row in rows])
            show("predicted against measured", [figures])
            recorded(figures | {"measured": datetime.date.today().isoformat()}, rows)


def recorded(figures: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Writes a model's figures in the place of what is there of it."""
    old = results("profile")
    kept = {r["model"]: r for r in old["rows"]} | {figures["model"]: figures}
    every = [r for r in old.get("strategies", ()) if r["model"] != figures["model"]] + rows
    ordered = [kept[name] for name in CASES if name in kept]
    record("profile", ordered, strategies=every, targets={"kendall": KENDALL, "error": ERROR, "chosen": CHOSEN})


if __name__ == "__main__":
    main()
