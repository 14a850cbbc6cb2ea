"""Whether plans chosen by overlap are faster as XLA schedules them for GPUs, too, and not in the simulation alone.

`pip install 'jax[cuda13]'` and `python -m benchmarks.overlap_schedules [case ...]`, on a machine with or without a GPU: networks of
`benchmarks.schedules`, planned as captured for eight H200s of one node, with and without `overlap=True`. Where the simulated step
of the latter is shorter, both are compiled, each with its `compiler_options`, and their schedules are timed as there. Rows of other
cases stay recorded.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # the devices of this process, which plans are not compiled for
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"  # without devices, nothing is tried out

from collections.abc import Sequence
from typing import Any

import jax

import unity
from benchmarks.absent_gpus import CASES, DEVICES, described
from benchmarks.hlo_schedule import scheduled
from benchmarks.record import BESIDE, asked, by_case, in_order, record, results, show
from benchmarks.schedules import NAMES
from unity.plan.plan import Plan
from unity.plan.step import step_of

LEAST = 1e-3  # of a step: a gain that is worth compiling


def figures(case: str, devices: Sequence[Any]) -> dict[str, Any]:
    """Return the steps of a case's two plans in milliseconds: by the sum, simulated, and as XLA schedules them."""
    model, machine = CASES[case](), unity.Machine.grid(1, DEVICES, "h200")
    options: dict[str, Any] = {"machine": machine, "search": "captured", "progress": False}
    plans = {
        label: unity.optimize(model.loss, model.params, model.batch, overlap=overlap, **options)
        for label, overlap in (("", False), (", overlap", True))
    }
    row: dict[str, Any] = {"case": case}
    for label, plan in plans.items():
        row[f"sum{label}"], row[f"simulated{label}"] = plan.time * 1e3, plan.inspect.simulate().makespan * 1e3
    row["gain, simulated"] = row["simulated"] / row["simulated, overlap"] - 1
    if row["gain, simulated"] < LEAST:
        return row
    try:
        row |= {f"XLA's{label}": step_seconds(plan, machine, devices) * 1e3 for label, plan in plans.items()}
        row["gain, XLA's"] = row["XLA's"] / row["XLA's, overlap"] - 1
    except jax.errors.JaxRuntimeError as problem:  # some products XLA compiles only where it can try them out
        row["not compiled"] = str(problem)[:200]
    return row


def step_seconds(plan: Plan, machine: unity.Machine, devices: Sequence[Any]) -> float:
    """Return the seconds of a plan's step as XLA schedules it, with the compiler options that the plan asks for."""
    program = step_of(plan.on(devices), plan.program.training(True)).compile(plan.inspect.compiler_options())
    return scheduled(program.as_text(), machine).now


def main() -> None:
    names, _ = asked(__doc__, NAMES, BESIDE)
    by_name, devices = by_case(results("overlap_schedules")["rows"], "case"), described(DEVICES)
    for case in names:
        by_name[case] = [figures(case, devices)]
        rows = in_order(by_name, NAMES)
        gains = [row["gain, XLA's"] for row in rows if "gain, XLA's" in row]
        show("one step", by_name[case])
        record("overlap_schedules", rows, faster=sum(g > 0 for g in gains), compiled=len(gains))
        print(f"plans chosen by overlap are faster in XLA's schedules in {sum(g > 0 for g in gains)} of {len(gains)}", flush=True)


if __name__ == "__main__":
    main()
