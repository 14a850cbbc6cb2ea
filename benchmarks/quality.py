"""Predicted time of the plan against data parallelism, FSDP, tensor parallelism and all their mixes, under the same cost.

`python -m benchmarks.quality`. A baseline is a mesh cut in two: on the first axes (data) every operator splits its samples as
far as they go; on the last ones (tensor) every product with a weight splits that weight, as Megatron's do, and everything
else but the samples is free. Weights are stored whole along the data axes, or in pieces ("fsdp"). What a baseline leaves open
is chosen by exact search, so it is the best of its kind.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.models import get
from benchmarks.models.model import Model
from benchmarks.record import record, show
from unity.baselines.by_hand import Mesh, on_mesh
from unity.baselines.by_hand import mixtures as baselines
from unity.baselines.restricted import Structure
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.search.cost.assembly import Assembled
from unity.search.cost.cost import Training
from unity.search.session import Search
from unity.search.solver.minimizer import Minimizer
from unity.search.solver.problem import Point

MACHINES = {8: Machine.grid(1, 8, "a100"), 64: Machine.grid(8, 8, "a100"), 192: Machine.grid(32, 6, "v100")}
MODELS: dict[str, dict[str, Any]] = {  # sizes, and samples for each device
    "gpt2_padded": {"batch": 4},
    "bert_large": {"batch": 4},
    "vgg16": {"batch": 16},
    "inception_v3": {"batch": 16},
    "resnext50": {"batch": 16},
    "dlrm_summit": {"batch": 64},
    "rnnlm": {"batch": 16},
    "mlp": {"batch": 16},
    "candle_uno": {"batch": 16},
}


def name(mesh: Mesh, axes: int) -> str:
    """What a mixture of baselines is called."""
    tensor, kind = axes - mesh.data, "fsdp" if mesh.pieces else "data"
    return kind if not tensor else "tensor" if not mesh.data else f"{kind} {mesh.data} x tensor {tensor}"


@dataclass(frozen=True)
class Restricted:
    """A search's graph, with the values that a baseline allows."""

    search: Search

    def on(self, mesh: Mesh) -> Assembled:
        return on_mesh(self.structure, mesh)

    @cached_property
    def structure(self) -> Structure:
        return Structure(self.search)


def fastest(assembled: Assembled, weight: float = 0.0) -> Point | None:
    found = Minimizer(assembled.problem).at([weight])
    return found[0] if found else None


def compare(model_name: str, devices: int, with_memory: bool) -> dict[str, Any]:
    """One model on one machine: the plan and every baseline, without and with too little memory for the fastest."""
    machine, sizes = MACHINES[devices], MODELS[model_name]
    model: Model = get(model_name, **{**sizes, "batch": sizes["batch"] * devices})
    captured = capture(model.loss, model.params, model.batch)
    search = Search(captured.graph, captured.differentiated, machine, Training())
    clock = time.process_time()
    plan = search.fastest
    seconds = time.process_time() - clock
    restricted = Restricted(search)
    times: dict[str, float | None] = {}
    least, leanest = math.inf, ""
    for mesh in baselines(len(machine.axes)):
        assembled = restricted.on(mesh)
        point, key = fastest(assembled), name(mesh, len(machine.axes))
        times[key] = None if point is None else point.time * 1e3
        if with_memory and point is not None:
            lean = fastest(assembled, math.inf)
            memory = search.candidate(assembled, lean).memory if lean else math.inf
            least, leanest = min((least, leanest), (memory, key))
    known = {k: t for k, t in times.items() if t is not None}
    best = min(known, key=lambda k: known[k])
    row = {
        "model": model_name,
        "devices": devices,
        "plan_ms": plan.time * 1e3,
        "best": best,
        "best_ms": known[best],
        "gain": known[best] / (plan.time * 1e3) - 1,
        "over_data": known["data"] / (plan.time * 1e3) - 1,
        "over_fsdp": known["fsdp"] / (plan.time * 1e3) - 1,
        "over_tensor": None if times["tensor"] is None else known["tensor"] / (plan.time * 1e3) - 1,
        "search_process_seconds": seconds,
        "baselines_ms": times,
    }
    if with_memory:
        found = search.under(least)
        row |= {"leanest_baseline": leanest, "leanest_baseline_GB": least / 1e9, "leanest_plan_GB": search.leanest.memory / 1e9}
        row |= {"fits_where_a_baseline_does": found is not None and found.memory <= least}
        row |= {"none_below_the_leanest": search.under(search.leanest.memory * 0.999) is None}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--devices", nargs="*", type=int, default=list(MACHINES))
    options = parser.parse_args()
    rows = []
    for devices in options.devices:
        for model in options.models:
            rows.append(compare(model, devices, with_memory=True))
            print(f"{model} on {devices}: {rows[-1]['gain']:+.2%} over {rows[-1]['best']}", flush=True)
    show("Predicted milliseconds of a step", [{k: v for k, v in row.items() if k != "baselines_ms"} for row in rows])
    slower = [row for row in rows if row["gain"] < -1e-9]
    print(f"{len(rows)} compared; slower than a baseline: {[(r['model'], r['devices'], r['gain']) for r in slower] or 'none'}")
    if set(options.models) == set(MODELS) and set(options.devices) == set(MACHINES):
        record("quality", rows, samples_per_device={k: v["batch"] for k, v in MODELS.items()})


if __name__ == "__main__":
    main()
