"""The part of plans' communication that XLA hides behind kernels, as it schedules them for GPUs, and the part by the simulation.

`pip install 'jax[cuda13]'` and `python -m benchmarks.schedules [case ...]`, on a machine with or without a GPU: the fastest plans
of networks at the sizes they are used at, planned as captured for eight H200s of one node, with gradients. XLA compiles and
schedules them; nothing is run. Its schedules are timed with a roofline (`benchmarks/hlo_schedule.py`). A plan with
`compiler_options` is compiled with them, too. Rows of other cases stay recorded.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # the devices of this process, which plans are not compiled for
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"  # without devices, nothing is tried out

from collections.abc import Mapping, Sequence
from typing import Any

import jax

import unity
from benchmarks.absent_gpus import CASES, DEVICES, USED, described
from benchmarks.hlo_schedule import scheduled
from benchmarks.record import BESIDE, asked, by_case, in_order, record, results, show
from unity.exec.compiled.hlo import memory
from unity.plan.step import step_of

NAMES = (*USED, "gpt2, 2 layers", "gpt2, 2 layers, bfloat16", "bert_large, 2 layers", "resnet50")
CLOSE = 0.1  # of the communication


def figures(case: str, devices: Sequence[Any]) -> dict[str, Any]:
    """Compile the plan of a case, and time the schedule."""
    model, machine = CASES[case](), unity.Machine.grid(1, DEVICES, "h200")
    plan = unity.optimize(model.loss, model.params, model.batch, machine=machine, progress=False, search="captured")
    simulation, step = plan.inspect.simulate(), step_of(plan.on(devices), plan.program.training(True))
    (computing,) = (s for name, s in simulation.busy.items() if "link" not in name)
    communicating = sum(s for name, s in simulation.busy.items() if "link" in name)
    row: dict[str, Any] = {
        "case": case,
        "predicted communicating ms": communicating * 1e3,
        "predicted hidden": 1 - (simulation.makespan - computing) / communicating if communicating else 1.0,
    }

    def compiled(options: Mapping[str, str | bool], label: str) -> dict[str, Any]:
        program = step.compile(options)
        times = scheduled(program.as_text(), machine)
        return {
            f"step ms{label}": times.now * 1e3,
            f"communicating ms{label}": times.communicating * 1e3,
            f"hidden{label}": times.hidden,
            f"GB{label}": memory(program).total / 1e9,
        }

    try:
        row |= compiled({}, "")
        row |= compiled(options, ", with options") if (options := plan.inspect.compiler_options()) else {}
    except jax.errors.JaxRuntimeError as problem:  # some products XLA compiles only where it can try them out
        row["not compiled"] = str(problem)[:200]
    return row


def main() -> None:
    names, _ = asked(__doc__, NAMES, BESIDE)
    by_name, devices = by_case(results("schedules")["rows"], "case"), described(DEVICES)
    for case in names:
        by_name[case] = [figures(case, devices)]
        rows = in_order(by_name, NAMES)
        compared = [row for row in rows if "hidden" in row]
        close = sum(abs(row["hidden"] - row["predicted hidden"]) <= CLOSE for row in compared)
        show("one step on one device", by_name[case])
        record("schedules", rows, close=close, programs=len(compared), devices=f"{DEVICES} x NVIDIA H200")
        print(f"hidden part within {CLOSE:.0%} of the communication in {close} of {len(compared)}", flush=True)


if __name__ == "__main__":
    main()
