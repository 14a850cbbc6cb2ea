"""Whether compiled programs communicate as predicted: elements by kind of collective, along the frontiers of small models.

`python -m benchmarks.fidelity [case ...]`. Everything is compiled for virtual CPU devices, and nothing is run. Elements are of the
full side on one device, times how often the collective runs; forward alone, and with gradients. Cases are written to
`results/fidelity.json` one by one, as they are done, in the place of what is there of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import unity
from benchmarks.models import tiny
from benchmarks.models.gpt import gpt
from benchmarks.models.model import Model
from benchmarks.record import record, results, show
from unity.exec.compiled.check import Check

TOLERANCE = 0.02


@dataclass(frozen=True)
class Case:
    """A model on a machine. `whole`: every point of its frontier is compiled, else the fastest plan and the leanest."""

    model: Callable[[], Model]
    nodes: int = 1
    per_node: int = 8
    device: str = "a100"
    whole: bool = True

    @property
    def machine(self) -> unity.Machine:
        return unity.Machine.grid(self.nodes, self.per_node, self.device)


def _gpt_of(devices: int) -> Model:
    return gpt(layers=2, hidden=4 * devices, heads=devices // 16, vocab=8 * devices, seq=64, batch=devices)


CASES = {
    "gpt": Case(lambda: tiny("gpt2_padded")),
    "gpt, scan and remat": Case(lambda: tiny("gpt3_6.7b_scan", vocab=64, compute="float32")),
    "gpt, remat": Case(lambda: tiny("gpt2_padded", remat=True)),
    "gpt, 2 nodes": Case(lambda: tiny("gpt2_padded", fused_qkv=False, tied=False), 2, 4, "v100"),
    "lstm": Case(lambda: tiny("rnnlm", vocab=64)),
    "dlrm": Case(lambda: tiny("dlrm")),
    "cnn": Case(lambda: tiny("alexnet")),
    "gpt, 64 devices": Case(lambda: _gpt_of(64), 8, 8, whole=False),
    "gpt, 192 devices": Case(lambda: _gpt_of(192), 32, 6, "v100", whole=False),
}


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    """Compiles and compares."""
    case = CASES[name]
    model = case.model()
    plan = unity.optimize(model.loss, model.params, model.batch, machine=case.machine, progress=False)
    if not case.whole:
        leanest = unity.optimize(model.loss, model.params, model.batch, machine=case.machine, objective="memory", progress=False)
        chosen = {"fastest": plan, "leanest": leanest}
    else:
        last = len(plan.frontier) - 1
        chosen = {f"{k} of {last}": point for k, point in enumerate(plan.frontier)}
    for point, plan in chosen.items():
        for gradient in (False, True):
            start = time.perf_counter()
            found = plan.check(gradient=gradient)
            yield {"model": name, "devices": plan.inspect.machine.devices, "point": point, **_figures(found, gradient)} | {
                "compile s": time.perf_counter() - start
            }


def _figures(found: Check, gradient: bool) -> dict[str, Any]:
    total = found.total
    size = max(total.predicted, total.compiled, 1)
    worst = max(found.lines, key=lambda line: abs(line.compiled - line.predicted), default=total)
    return {
        "step": "gradient" if gradient else "forward",
        "predicted": total.predicted,
        "compiled": total.compiled,
        "difference": (total.compiled - total.predicted) / size,
        "worst kind": worst.kind if worst.predicted != worst.compiled else "",
        "its difference": (worst.compiled - worst.predicted) / size,
        "within 2 %": found.agrees(TOLERANCE),
        "kinds": {line.kind: [line.predicted, line.compiled] for line in found.lines},
    }


def alone(name: str) -> list[dict[str, Any]]:
    """One case in a process of its own, which has as many virtual devices, and a cache of plans of its own."""
    devices = CASES[name].machine.devices
    with tempfile.TemporaryDirectory() as cache:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": cache}
        command = [sys.executable, "-m", "benchmarks.fidelity", "--measure", name]
        run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def main(names: list[str]) -> None:
    """Compiles the named cases, or all of them. What was recorded of other cases stays."""
    rows = results("fidelity")["rows"]
    for name in names or CASES:
        found = alone(name)
        rows = [*(row for row in rows if row["model"] != name and row["model"] in CASES), *found]
        rows.sort(key=lambda row: list(CASES).index(row["model"]))
        show("elements on one device", [{k: v for k, v in row.items() if k != "kinds"} for row in found])
        agree = sum(row["within 2 %"] for row in rows)
        record("fidelity", rows, agree=agree, programs=len(rows), tolerance=TOLERANCE)
        print(f"{agree} of {len(rows)} programs communicate as predicted, within 2 % of the total in total and by kind", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(list(rows_of(sys.argv[2]))))
    else:
        main(sys.argv[1:])
