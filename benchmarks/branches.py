"""What branches on disjoint devices gain, and what packing their weights does, by the machine's costs; and compiled, on 8 devices.

`python -m benchmarks.branches`. `plans`: the best plan without branches, with them where they are better, and with their weights
packed; nothing is run. Inception-v3 and models of Unity's table 1 that fork. `steps`: two towers, an Inception block and embedding
tables on 8 virtual devices, with branches asked for: the gradient step against that of the best plan without (values; time, which
devices that share the host's cores say little of; bytes sent and memory against the compiled program's). A name runs one part.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import unity
from benchmarks.alternate import alternate, ratio
from benchmarks.models import get
from benchmarks.models.model import concrete
from benchmarks.record import record, show
from unity.plan.step import can_run

ROUNDS = 7
WAYS: dict[str, dict[str, Any]] = {
    "without": {"branches": False},
    "with": {"branches": True},
    "packed": {"branches": True, "pack": True},
}


@dataclass(frozen=True)
class Case:
    """A model on a machine."""

    model: str
    sizes: dict[str, Any]
    machine: Callable[[], unity.Machine]

    def __str__(self) -> str:
        sizes = " ".join(f"{k}={v}" for k, v in self.sizes.items() if not isinstance(v, tuple))
        return f"{self.model} {sizes} on {self.machine().name}"


def summit() -> unity.Machine:
    return unity.Machine.preset("summit-32x6")


def one_node() -> unity.Machine:
    return unity.Machine.grid(1, 8, "a100")


CASES = (
    Case("inception_v3", {"batch": 192}, summit),
    Case("inception_v3", {"batch": 64}, one_node),
    Case("candle_uno", {"batch": 192}, summit),
    Case("mlp_unity", {"batch": 192}, summit),
    Case("dlrm_kaggle", {"batch": 2048}, one_node),
)


def plan_row(case: Case) -> dict[str, Any]:
    model = get(case.model, **case.sizes)
    found: dict[str, Any] = {"case": str(case)}
    for name, options in WAYS.items():
        started = time.perf_counter()
        plan = unity.optimize(
            model.loss, model.params, model.batch, machine=case.machine(), search="captured", pipelines=False,
            progress=False, **options,
        )  # fmt: skip
        found |= {f"{name} ms": plan.time * 1e3, f"{name} GB": plan.memory / 1e9, f"{name} s": time.perf_counter() - started}
        found[f"{name} branches"] = str(plan.program.branching or "none")
    return found | {"gain": found["without ms"] / found["with ms"], "gain, packed": found["without ms"] / found["packed ms"]}


SMALL = {
    "mlp_unity": {"layers": 3, "width": 512, "inputs": 256, "batch": 64},
    "inception_v3": {"image": 75, "batch": 8, "blocks": 2, "classes": 10},
    "dlrm": {"tables": (4000, 700, 3300, 1000), "width": 64, "batch": 512},
}


def step_row(name: str, groups: int) -> dict[str, Any]:
    model = get(name, **SMALL[name])
    params, batch = concrete(model)
    ways = {"without": {"branches": False}, "with": {"branch_groups": groups}, "packed": {"branch_groups": groups, "pack": True}}
    plans = {
        way: unity.optimize(
            model.loss, params, batch, search="captured", pipelines=False, progress=False, **options
        )
        for way, options in ways.items()
    }  # fmt: skip
    runs, found = {}, {}
    row: dict[str, Any] = {"model": name, "groups": groups}
    for way, plan in plans.items():
        if not can_run(plan):
            row[f"{way}: time / without"] = "not on CPU devices"
            continue
        step, args = jax.jit(jax.value_and_grad(plan)), plan.shard(params, batch)
        runs[way] = lambda step=step, args=args: step(*args)
        value, gradients = runs[way]()
        found[way] = value, plan.shard.unpack(gradients)
    times = alternate(runs, ROUNDS)
    for way in [way for way in runs if way != "without"]:
        gaps = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max() / (jnp.abs(b).max() or 1)), found[way], found["without"])
        checked = plans[way].check()
        row |= {
            f"{way}: largest difference": max(jax.tree.leaves(gaps)),
            f"{way}: time / without": ratio(times[way], times["without"])["ratio"],
            f"{way}: bytes sent, predicted / compiled": checked.total.predicted / checked.total.compiled,
            f"{way}: memory, searched / compiled": checked.timeline.step / checked.memory.total,
        }
    return row


def main() -> None:
    parts = sys.argv[1:] or ["plans", "steps"]
    if "steps" in parts:
        jax.config.update("jax_num_cpu_devices", 8)
        rows = [step_row(name, groups) for name in SMALL for groups in (2, 4) if (name, groups) != ("mlp_unity", 4)]
        show("a step with branches, on 8 virtual devices", rows)
        record("branch_steps", rows)
    if "plans" in parts:
        rows = []
        for case in CASES:
            rows.append(plan_row(case))
            show(str(case), rows[-1:])
        record("branches", rows)


if __name__ == "__main__":
    main()
