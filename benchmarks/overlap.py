"""Simulated steps of plans, chosen with and without overlap, against data parallelism, FSDP, tensor parallelism and their mixes.

`python -m benchmarks.overlap`, or with parts of the names of cases; rows of other cases stay recorded. The models are those of
`benchmarks.quality` and Llama-3-8B, as captured; on 8 devices also over slow links. A baseline is the best of its kind by the
sum that the search minimizes, and is simulated like the plans; those that do not fit the devices are left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.models import get
from benchmarks.quality import MACHINES, MODELS, name
from benchmarks.record import by_case, in_order, record, results, show
from unity.base.gc_pause import uncollected
from unity.baselines.by_hand import mixtures, space_on
from unity.baselines.restricted import Structure
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.search.cost.cost import Training
from unity.search.overlap import overlapping, simulated
from unity.search.session import Search

LLAMA = {"batch": 1, "scan": True, "remat": True}
CASES: Mapping[str, tuple[str, dict[str, Any], Machine]] = {  # model, its options with samples for each device, machine
    **{
        f"llama3_8b on {8 * n} {kind}": ("llama3_8b", LLAMA, Machine.grid(n, 8, kind))
        for n, kind in ((1, "h100"), (1, "a100"), (8, "h100"), (8, "a100"))
    },
    **{
        f"{model} on {devices} {machine.device.name}": (model, sizes, machine)
        for devices, machine in MACHINES.items()
        for model, sizes in MODELS.items()
    },
    **{
        f"{model} over pcie4 on 8 a100": (model, sizes, Machine.grid(1, 8, "a100", intra="pcie4"))
        for model, sizes in {"llama3_8b": LLAMA, **MODELS}.items()
    },
}


@uncollected()  # as `unity.optimize` runs
def compare(case: str) -> dict[str, Any]:
    """Plan one case with and without overlap, and simulate its baselines."""
    model, sizes, machine = CASES[case]
    program = get(model, **{**sizes, "batch": sizes["batch"] * machine.devices})
    captured = capture(program.loss, program.params, program.batch)
    search, limit = Search(captured.graph, captured.differentiated, machine, Training()), machine.device.memory
    clock = time.process_time()
    least = search.under(limit)
    searched = time.process_time() - clock
    assert least is not None
    clock = time.process_time()
    candidates = overlapping(search, least, limit)
    more = time.process_time() - clock
    first, plan = candidates[0], min(candidates, key=lambda s: s.seconds)
    structure, baselines = Structure(search), dict[str, float]()
    for mesh in mixtures(len(machine.axes)):
        candidate = space_on(structure, mesh).under(search, limit)
        if candidate is not None and candidate.memory <= limit:
            baselines[name(mesh, len(machine.axes))] = simulated(search, candidate).seconds * 1e3
    best = min(baselines, key=baselines.__getitem__)
    return {
        "case": case,
        "sum_ms": least.time * 1e3,
        "simulated_ms": first.seconds * 1e3,
        "overlapped_sum_ms": plan.candidate.time * 1e3,
        "overlapped_simulated_ms": plan.seconds * 1e3,
        "best": best,
        "best_ms": baselines[best],
        "bound_ms": None if search.least_computing is None else search.least_computing * 1e3,
        "gap": None if search.least_computing is None else plan.seconds / search.least_computing - 1,
        "gain": baselines[best] / (plan.seconds * 1e3) - 1,
        "gain_without": baselines[best] / (first.seconds * 1e3) - 1,
        "search_process_seconds": searched,
        "overlap_process_seconds": more,
        "baselines_ms": baselines,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="parts of the names of cases, such as llama or 'on 64'; by default all")
    parts = parser.parse_args().cases
    rows = list[dict[str, Any]]()
    for case in CASES:
        if not parts or any(part in case for part in parts):
            rows.append(compare(case))
            without, gain, best = (rows[-1][column] for column in ("gain_without", "gain", "best"))
            print(f"{case}: {without:+.2%}, with overlap {gain:+.2%} over {best}", flush=True)
            kept = by_case(results("overlap")["rows"], "case") | by_case(rows, "case")
            record("overlap", in_order(kept, CASES), samples_per_device={m: sizes["batch"] for m, sizes, _ in CASES.values()})
    show("Milliseconds of a step", [{k: v for k, v in row.items() if k != "baselines_ms"} for row in rows])
    for column, kind in (("gain_without", "without"), ("gain", "with")):
        slower = [(row["case"], round(row[column], 4)) for row in rows if row[column] < -1e-9]
        print(f"{len(rows)} compared; simulated slower than a baseline {kind} overlap: {slower or 'none'}")


if __name__ == "__main__":
    main()
