"""Parallelization by substitution alone (Unity, section 5) against the exact search of the same graph, under the same costs.

`python -m benchmarks.unity_rules`. The models are those of Unity's table 1, and a GPT. "exact" is `search="captured"`, "rules" is
`search="unity-rules"` with its usual budget. Seconds are predicted ones of a step; searches start cold, and count everything from
capture to the plan.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from typing import Any

import unity
from benchmarks.joint import BATCH, MACHINES, model_for
from benchmarks.models.model import Model
from benchmarks.record import asked, record, show
from unity.machine.machine import Machine
from unity.plan.plan import Plan
from unity.search.substitution.fitting import CANDIDATES

CASES = {f"{name} at {n}": (name, n) for n in (8, 96) for name in BATCH if n == 8 or name != "gpt2_padded"}


def planned(model: Model, machine: Machine, **options: Any) -> tuple[Plan, float]:
    """A plan, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        started = time.perf_counter()
        plan = unity.optimize(model.loss, model.params, model.batch, machine=machine, progress=False, **options)
        return plan, time.perf_counter() - started


def measured(case: str) -> dict[str, Any]:
    name, devices = CASES[case]
    machine = MACHINES.get(devices) or Machine.grid(1, devices, "v100")
    machine = replace(machine, device=replace(machine.device, memory=10**15))  # memory is not what is compared
    model = model_for(name, devices)
    exact, seconds = planned(model, machine, search="captured")
    rules, found = planned(model, machine, search="unity-rules")
    return {
        "case": case,
        "operators": len(exact.program.serial),
        "exact ms": exact.time * 1e3,
        "rules ms": rules.time * 1e3,
        "rules / exact": rules.time / exact.time,
        "exact search s": seconds,
        "rules search s": found,
        "candidates": CANDIDATES,
        "rules applied": len(rules.program.applications),
    }


def main() -> None:
    cases, whole = asked(__doc__, CASES)
    rows = []
    for case in cases:
        rows.append(measured(case))
        show("parallelization by substitution alone", rows[-1:])
    if whole:
        record("unity_rules", rows)


if __name__ == "__main__":
    main()
