"""What pipelines gain, where they should and where they should not, and what they cost on virtual devices.

`python -m benchmarks.pipelines` compares, by the machine's costs, the best plan with a pipeline and the best without (nothing is
run), and times a pipeline against the best plan without one on 8 virtual devices. These share the cores: an idle stage costs
nothing, and the ratio is what the pipeline itself costs (its sends, its smaller operators). It compares the memory of compiled
steps by both schedules, with micro-batches of one size. A plan that another case has found already comes from the cache, in no
time. A name runs one part: `plans`, `steps` or `memory`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import unity
from benchmarks.alternate import alternate, ratio
from benchmarks.models import get
from benchmarks.models.model import concrete
from benchmarks.record import record, show

SUMMIT = "summit-32x6"
ROUNDS = 7


@dataclass(frozen=True)
class Case:
    """A model on a machine. `wanted`: whether its plan should have a pipeline; `asked`: the one that it is asked for, if it is."""

    model: str
    sizes: dict[str, Any]
    machine: Callable[[], unity.Machine]
    limit: float | None
    wanted: bool
    asked: tuple[int, int, str] | None = None

    def __str__(self) -> str:
        sizes = " ".join(f"{k}={v}" for k, v in self.sizes.items() if k != "scan")
        more = (f" in {self.limit / 1e9:.3g} GB" if self.limit else "") + (f", {self.asked[2]} asked for" if self.asked else "")
        return f"{self.model} {sizes} on {self.machine().name}{more}"


def summit() -> unity.Machine:
    return unity.Machine.preset(SUMMIT)


def ethernet(gigabits: int) -> unity.Machine:
    """4 nodes of 8 A100 with one card of so many Gbit/s each."""
    machine = unity.Machine.grid(4, 8, "a100", inter=(gigabits * 1e9 / 8 / 8, 3e-5))
    return replace(machine, name=f"{machine.name} over {gigabits} Gbit/s")


def one_node() -> unity.Machine:
    return unity.Machine.grid(1, 8, "a100")


GPT = {"scan": True, "layers": 96, "hidden": 4096, "heads": 32, "seq": 1024, "batch": 384, "remat": True}
CASES = (
    Case("bert_large", {"scan": True, "batch": 192}, summit, None, True),
    Case("bert_large", {"scan": True, "batch": 768}, summit, 4e9, True),
    Case("gpt2", GPT, summit, None, True),
    Case("bert_large", {"scan": True, "batch": 192}, summit, None, True, (2, 2, "2bw")),  # as Unity has it: another semantics
    Case("bert_large", {"scan": True, "batch": 768}, summit, None, True, (2, 2, "2bw")),  # with Unity's samples for each device
    Case("bert_large", {"scan": True, "batch": 256}, partial(ethernet, 100), None, True),
    Case("bert_large", {"scan": True, "batch": 256}, partial(ethernet, 10), None, False),  # only one node's devices are worth it
    Case("gpt2", {"scan": True, "batch": 32}, one_node, None, False),
)


def plan_row(case: Case) -> dict[str, Any]:
    model = get(case.model, **case.sizes)
    found: dict[str, Any] = {"case": str(case), "pipeline wanted": case.wanted}
    asked = None if case.asked is None else unity.PipelineShape(*case.asked)
    ways: dict[str, dict[str, Any]] = {"without": {"pipelines": False}, "with": {"pipeline": asked}}
    for name, options in ways.items():
        started = time.perf_counter()
        try:
            plan = unity.optimize(
                model.loss, model.params, model.batch, machine=case.machine(), search="captured", memory_limit=case.limit,
                progress=False, **options,
            )  # fmt: skip
        except unity.InfeasibleError:
            found |= {name: "infeasible"}
            continue
        found |= {f"{name} ms": plan.time * 1e3, f"{name} GB": plan.memory / 1e9, f"{name} s": time.perf_counter() - started}
        found |= {f"{name}, simulated ms": plan.inspect.simulate().makespan * 1e3}
        found["pipeline"] = str(plan.program.pipelining or "none")
    if "without ms" in found and "with ms" in found:
        found["gain"] = found["without ms"] / found["with ms"]
        found["simulated gain"] = found["without, simulated ms"] / found["with, simulated ms"]
    return found | (written_out(case, found) if case.asked else {})


def written_out(case: Case, found: dict[str, Any]) -> dict[str, Any]:
    """The best without a pipeline if layers are written out: then the simulator overlaps what is sent of a layer's gradient with
    the layers before it, where a scan gives all gradients at its end. A device computes for `computing` of that; a plan that sent
    nothing at all would be `possible gain` times as fast."""
    model = get(case.model, **{**case.sizes, "scan": False})
    plan = unity.optimize(
        model.loss, model.params, model.batch, machine=case.machine(), search="captured", memory_limit=case.limit,
        pipelines=False, progress=False,
    )  # fmt: skip
    simulated = plan.inspect.simulate()
    seconds, computing = simulated.makespan, next(iter(simulated.busy.values()))  # links are named after the device
    gain = seconds * 1e3 / found["with, simulated ms"] if "with, simulated ms" in found else None
    return {
        "without, layers written out, simulated ms": seconds * 1e3,
        "of that computing ms": computing * 1e3,
        "possible gain": seconds / computing,
        "simulated gain over that": gain,
    }


SMALL = {"scan": True, "layers": 8, "hidden": 128, "heads": 4, "vocab": 512, "seq": 64}


def memory_row(stages: int, micro_batches: int, remat: bool) -> dict[str, Any]:
    model = get("gpt2", **SMALL, batch=8 * micro_batches, remat=remat)
    found: dict[str, Any] = {"stages": stages, "micro-batches": micro_batches, "layers computed again": remat}
    for schedule in ("gpipe", "1f1b"):
        plan = unity.optimize(
            model.loss, model.params, model.batch, machine=unity.Machine.grid(2, 4, "a100"), search="captured",
            pipeline=unity.PipelineShape(stages, micro_batches, schedule), progress=False,
        )  # fmt: skip
        checked = plan.check()
        found |= {
            f"{schedule} temporaries MB": checked.memory.temporaries / 1e6,
            f"{schedule} searched / compiled": checked.timeline.step / checked.memory.total,
            f"{schedule} sent, predicted / compiled": checked.total.predicted / checked.total.compiled,
        }
    return found | {"gain": found["gpipe temporaries MB"] / found["1f1b temporaries MB"]}


def step_row(stages: int, micro_batches: int, schedule: str) -> dict[str, Any]:
    model = get("gpt2", **SMALL, batch=64)
    params, batch = concrete(model)
    machine = unity.Machine.local()
    pipeline = unity.PipelineShape(stages, micro_batches, schedule)
    ways: dict[str, dict[str, Any]] = {"without": {"pipelines": False}, "with": {"pipeline": pipeline}}
    plans = {
        name: unity.optimize(
            model.loss, params, batch, machine=machine, search="captured", progress=False, **options
        )
        for name, options in ways.items()
    }  # fmt: skip
    runs = {}
    for name, plan in plans.items():
        step, args = jax.jit(jax.value_and_grad(plan)), plan.shard(params, batch)
        runs[name] = lambda step=step, args=args: step(*args)
    values = {name: run() for name, run in runs.items()}
    gaps = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / jnp.abs(b).max()), values["with"], values["without"])
    times = alternate(runs, ROUNDS)
    checked = plans["with"].check()
    return {
        "stages": stages, "micro-batches": micro_batches, "schedule": schedule, "largest difference": max(jax.tree.leaves(gaps)),
        "without ms": times["without"].median * 1e3, "with ms": times["with"].median * 1e3,
        **ratio(times["with"], times["without"]),
        "bytes sent, predicted / compiled": checked.total.predicted / checked.total.compiled,
        "memory, searched / compiled": checked.timeline.step / checked.memory.total,
    }  # fmt: skip


def main() -> None:
    parts = sys.argv[1:] or ["plans", "steps", "memory"]
    if {"steps", "memory"}.intersection(parts):
        jax.config.update("jax_num_cpu_devices", 8)
    if "steps" in parts:
        rows = [step_row(s, m, kind) for s, m in ((2, 4), (2, 16), (4, 8), (4, 16)) for kind in ("1f1b", "gpipe")]
        show("a step with a pipeline, on 8 virtual devices", rows)
        record("pipeline_steps", rows)
    if "memory" in parts:
        rows = [memory_row(s, m, remat) for s, m in ((2, 8), (2, 16), (4, 8), (4, 16)) for remat in (False, True)]
        show("memory of a step by both schedules, compiled for 8 virtual devices", rows)
        record("pipeline_memory", rows)
    if "plans" in parts:
        rows = []
        for case in CASES:
            rows.append(plan_row(case))
            show(str(case), rows[-1:])
        record("pipelines", rows)


if __name__ == "__main__":
    main()
