"""The losses of 50 steps of training with pipelines and with branches, beside those of one device that has no plan.

`python -m benchmarks.training`; a case's name runs it alone, and records nothing. 16 virtual devices, each case in a
process of its own. Pipelines: a GPT of scanned layers in 2 and 4 stages, with 4, 8 and 16 micro-batches, by both schedules, on four
devices for each stage: a micro-batch has two samples, so that samples alone do not divide a stage, and `inside` says what does.
Branches: two towers, an Inception block, and a DLRM's tables on two and four groups of devices, as they are and packed; the fastest
plan that these devices can run. `both`: branches and a pipeline in one plan. Several processes are in `benchmarks.hosts`.

Steps take four batches in turn. `float32` and `float64` are the largest relative differences of a loss from one device's in the
same precision; `rounding` is that of one device's own losses in float32 from those in float64.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import unity
from benchmarks import forked_layers
from benchmarks.descent import step_of
from benchmarks.models import get
from benchmarks.models.gpt import gpt
from benchmarks.models.model import Model, concrete
from benchmarks.numerics import cast
from benchmarks.record import asked, record, show
from unity.pcg.ir.graph import PIPELINE
from unity.pcg.parallel.stages import samples_of
from unity.plan.step import can_run

STEPS, BATCHES, DEVICES = 50, 4, 16
DEVICE = unity.Device("processor", {"float32": 1e9, "float64": 1e9}, 2**32, 1e9, 1.0, 1e-6)  # slow: it pays to split a small model
# Largest relative differences: in float64, where sums are added in another order; in float32, in times of one device's rounding.
EXACT, ROUNDED = 1e-9, 10.0


@dataclass(frozen=True)
class Task:
    """A loss, weights, and a few batches."""

    loss: Callable[..., Any]
    params: Any
    batches: list[Any]


@dataclass(frozen=True)
class Case:
    """What is trained, in a precision; on which machine; what is asked of the plan; and the rate of descent."""

    task: Callable[[str], Task]
    machine: unity.Machine
    ways: dict[str, Any]
    rate: float = 0.1


def grid(nodes: int, devices: int) -> unity.Machine:
    return unity.Machine.grid(nodes, devices, DEVICE, intra=(1e9, 1e-6), inter=(1e7, 1e-5))


def drawn(build: Callable[[str], Model]) -> Callable[[str], Task]:
    """A model's task: the same numbers in every precision."""

    def task(precision: str) -> Task:
        model = build(precision)
        found = [cast(concrete(model, seed), precision) for seed in range(BATCHES)]
        return Task(model.loss, found[0][0], [batch for _, batch in found])

    return task


def layers(micro_batches: int) -> Callable[[str], Task]:
    batch = 2 * micro_batches
    return drawn(lambda p: gpt(layers=4, hidden=128, heads=4, vocab=96, seq=4, batch=batch, scan=True, compute=p))


def towers_and_layers(precision: str) -> Task:
    dtype = np.dtype(precision)
    batches = [forked_layers.batch(seed, dtype) for seed in range(BATCHES)]
    return Task(forked_layers.loss, forked_layers.weights(dtype), batches)


def forked(name: str, **sizes: Any) -> Callable[[str], Task]:
    return drawn(lambda precision: get(name, **sizes))


PIPELINES = {
    f"{stages} stages, {count} micro-batches, {schedule}": Case(
        layers(count), grid(stages, 4), {"pipeline": unity.PipelineShape(stages, count, schedule), "branches": False}
    )
    for stages in (2, 4)
    for count in (4, 8, 16)
    for schedule in ("1f1b", "gpipe")
}
FORKED = {
    "two towers": (forked("mlp_unity", layers=3, width=512, inputs=256, batch=64), (2,), 0.1),
    "inception": (forked("inception_v3", image=75, batch=8, blocks=2, classes=10), (2, 4), 0.01),
    "dlrm": (forked("dlrm", tables=(4000, 700, 3300, 1000), width=64, batch=512), (2, 4), 0.1),
}
BRANCHES = {
    f"{name} on {groups} groups" + (", packed" if pack else ""): Case(
        task, grid(2, 4), {"branch_groups": groups, "pack": pack, "pipelines": False}, rate
    )
    for name, (task, counts, rate) in FORKED.items()
    for groups in counts
    for pack in (False, True)
}
BOTH = {"both": Case(towers_and_layers, grid(2, 4), {"branch_groups": 2, "pipeline": unity.PipelineShape(2, 8), "pack": True})}
CASES = PIPELINES | BRANCHES | BOTH


def losses(fn: Callable[..., Any], rate: float, params: Any, samples: list[Any]) -> np.ndarray:
    """The losses of gradient descent."""
    step, found = step_of(fn, rate), []
    for k in range(STEPS):
        params, value = step(params, samples[k % BATCHES])
        found.append(float(value))
    return np.array(found)


def inside(plan: unity.Plan) -> str:
    """What divides a stage: its samples, their other dimensions, its weights."""
    assert plan.program.pipelining is not None
    (node,) = (n for n in plan.program.pcg.nodes if n.kind == PIPELINE)
    along, samples, found = set(plan.program.pipelining.along), samples_of(node), set()
    for position, operand in enumerate(node.operands):
        for axis, state in zip(plan.inspect.machine.axes, operand.type, strict=True):
            if axis in along or state.kind != "P":
                continue
            if position in samples:
                found.add("data" if state.dim == samples[position] + 1 else "sequence")
            elif state.dim:
                found.add("tensor")
    return " x ".join(sorted(found))


def trained(case: Case, precision: str) -> tuple[unity.Plan, np.ndarray, np.ndarray]:
    """The plan, its losses, and those of one device without it."""
    task = case.task(precision)
    args, options = (task.params, task.batches[0]), {"search": "captured", "progress": False, **case.ways}
    fastest = unity.optimize(task.loss, *args, machine=case.machine, **options)
    plan = next((p for p in (fastest, *fastest.frontier) if can_run(p)), fastest)
    placed = [plan.shard(task.params, batch)[1] for batch in task.batches]
    found = losses(plan, case.rate, plan.shard(task.params), placed)
    return plan, found, losses(task.loss, case.rate, task.params, task.batches)


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found / wanted - 1).max())


def row(name: str) -> dict[str, Any]:
    plan, single, alone = trained(CASES[name], "float32")
    with jax.enable_x64(True):
        _, double, exact = trained(CASES[name], "float64")
    return {
        "case": name,
        "plan": str(plan.program.pipelining or plan.program.branching),
        "inside": inside(plan) if plan.program.pipelining and not plan.program.branching else "",
        "first loss": float(exact[0]),
        "last loss": float(exact[-1]),
        "float32": off(single, alone),
        "float64": off(double, exact),
        "rounding": off(alone, exact),
        "met": off(double, exact) <= EXACT and off(single, alone) <= ROUNDED * max(off(alone, exact), np.finfo(np.float32).eps),
    }


def apart(name: str) -> dict[str, Any]:
    """A case in a process of its own: what ends it does not end the others."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.training", name], capture_output=True, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["nothing was said"]
    return {"case": name, "ended": f"code {done.returncode}: {said[-1][:300]}", "met": False}


def main() -> None:
    cases, whole = asked(__doc__, CASES)
    if whole:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            rows = list(pool.map(apart, cases))
        show(f"losses of {STEPS} steps", rows)
        record("training", rows)
        return
    jax.config.update("jax_num_cpu_devices", DEVICES)
    for name in cases:
        try:
            print(json.dumps(row(name)))
        except unity.PlanError as error:  # of a plan that these devices cannot run, in one of the precisions
            print(json.dumps({"case": name, "ended": str(error), "met": False}))


if __name__ == "__main__":
    main()
