"""Algebra and parallelization together, one after the other, and parallelization alone (Unity, section 6.4), under the same cost.

`python -m benchmarks.joint`. The models are those of Unity's table 1, and a GPT. "captured" parallelizes the program as it is.
"sequential" rewrites it for one device first, with the same rules and budget, and parallelizes what comes out, by the same exact
search. "fused" is that where operators that an algebraic optimizer has fused stay one, as in the paper (`benchmarks.fused`).
"joint" is `unity.optimize`. Seconds are predicted ones of a step; those of searches count everything from capture to the plan.
Searches find nothing on disk, but those of a case share a process: the later ones know already what operators allow.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from dataclasses import replace
from typing import Any

import unity
from benchmarks.fused import Restricted, algebra_first
from benchmarks.models import get
from benchmarks.models.model import Model
from benchmarks.record import asked, record, show
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.search.cost.cost import Training

BATCH = {  # samples for each device (Unity, section 6.1)
    "candle_uno": 256,
    "mlp_unity": 256,
    "resnext50_unity": 64,
    "inception_v3_unity": 64,
    "bert_unity": 4,
    "bert_large": 4,
    "xdl": 1024,
    "dlrm_summit": 1024,
    "gpt2_padded": 4,
}
MACHINES = {96: Machine.grid(16, 6, "v100"), 192: Machine.grid(32, 6, "v100")}
LARGE = itertools.product(MACHINES, list(BATCH)[:-1])
CASES = {f"{name} at {n}": (name, n) for n, name in LARGE} | {"gpt at 8": ("gpt2_padded", 8)}


def model_for(name: str, devices: int) -> Model:
    return get(name, batch=BATCH[name] * devices)


def measured(case: str) -> dict[str, Any]:
    name, devices = CASES[case]
    # memory is not what is compared
    machine = MACHINES.get(devices) or Machine.grid(1, devices, "a100")
    machine = replace(machine, device=replace(machine.device, memory=10**15))
    model = model_for(name, devices)
    seconds = {}
    times = {}
    for search in ("captured", "sequential", "unity"):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["XDG_CACHE_HOME"] = folder
            started = time.perf_counter()
            options = {"machine": machine, "search": search, "pipelines": False, "progress": False}
            plan = unity.optimize(model.loss, model.params, model.batch, **options)
            seconds[search], times[search] = time.perf_counter() - started, plan.time
    after = algebra_first(capture(model.loss, model.params, model.batch), machine, Training())
    fused = Restricted(after, machine, Training())
    times["fused"] = fused.search.fastest.time
    applied = [f"{times} × {way}" for way, times in plan.program.rewriting.applied]
    return {
        "case": case,
        "captured ms": times["captured"] * 1e3,
        "sequential ms": times["sequential"] * 1e3,
        "fused ms": times["fused"] * 1e3,
        "joint ms": times["unity"] * 1e3,
        "captured / joint": times["captured"] / times["unity"],
        "sequential / joint": times["sequential"] / times["unity"],
        "fused / joint": times["fused"] / times["unity"],
        "operators fused": fused.operators,
        "captured search s": seconds["captured"],
        "joint search s": seconds["unity"],
        "applied": ", ".join(applied),
    }


def main() -> None:
    cases, whole = asked(__doc__, CASES)
    rows = []
    for case in cases:
        rows.append(measured(case))
        show("algebra and parallelization", rows[-1:])
    if whole:
        record("joint", rows)


if __name__ == "__main__":
    main()
