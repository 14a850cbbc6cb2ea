"""Programs compiled for GPUs that are not there: do they communicate, and hold in memory, what the plan says?

`pip install 'jax[cuda13]'` and `python -m benchmarks.gpu_programs [case ...]`, on a machine with or without a GPU. The fastest and
the leanest plan of each model and one in between, for `DEVICES` H200s of one node, with gradients. XLA compiles them by a
description of the devices (`jax.experimental.topologies`); nothing is run. It does not try out how each product is fastest
(`autotune`), as it would where the devices are; and it does not join collectives. By default it does, tens of megabytes of a kind,
and holds at once what is joined: for the small GPT 7 MB more than the 10 that it holds else. Gradients of a product are tied, as in
plans for devices with little more memory than the plan needs (docs: memory#late-gradients-on-gpus). Programs in which they are late
are compiled, too, for their memory (`bytes late`).

Cases are those of `benchmarks.fidelity` and `benchmarks.memory`, and some at the sizes they are used at, of which most are planned
as captured, so that a search takes seconds; and the fastest plan of a GPT as a pipeline, by both schedules. They are written to
`results/gpu_programs.json` one by one, as they are done, in the place of what is there of them.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # the devices of this process, which plans are not compiled for
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_gpu_autotune_level=0",
        *(f"--xla_gpu_{kind}_combine_threshold_bytes=0" for kind in ("all_gather", "all_reduce", "reduce_scatter")),
        "--xla_gpu_collective_permute_combine_threshold_bytes=0",
    )
)

import argparse
import datetime
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

import unity
from benchmarks import absent_gpus
from benchmarks.absent_gpus import DEVICES, USED, described
from benchmarks.models.registry import get
from benchmarks.record import record, results, show
from unity.exec.compiled.check import compare
from unity.exec.compiled.hlo import memory as memory_of
from unity.plan.step import step_of

TOLERANCE = 0.02  # of the total, in elements
GPT: dict[str, Any] = {"layers": 8, "vocab": 50304, "seq": 512, "scan": True}
PIPELINES = {
    "gpt2, 8 layers, scan": (GPT, (2, 8)),
    "gpt2, 8 layers, scan and remat": ({**GPT, "remat": True}, (4, 16)),
}
SHAPES = {
    f"{name}, {kind}": unity.PipelineShape(shape[0], shape[1], kind)
    for name, (_, shape) in PIPELINES.items()
    for kind in ("1f1b", "gpipe")
}
CASES = absent_gpus.CASES | {
    f"{name}, {kind}": partial(get, "gpt2", batch=8 * shape[1], **sizes)
    for name, (sizes, shape) in PIPELINES.items()
    for kind in ("1f1b", "gpipe")
}


def rows_of(name: str, devices: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Compiles and compares."""
    model, machine, shape = CASES[name](), unity.Machine.grid(1, DEVICES, "h200"), SHAPES.get(name)
    plan = unity.optimize(
        model.loss,
        model.params,
        model.batch,
        machine=machine,
        progress=False,
        search="captured" if name in USED or shape is not None else "unity",
        pipeline=shape,
    )
    last = len(plan.frontier) - 1
    for point in (0,) if shape is not None else sorted({0, last // 2, last}):
        day = datetime.date.today().isoformat()
        start = time.perf_counter()
        row: dict[str, Any] = {"model": name, "point": f"{point} of {last}", "date": day}
        try:
            step = replace(step_of(plan.frontier[point].on(devices), plan.program.training(True)), ties=True)
            found = compare(step, step.compile())
            late = memory_of(replace(step, ties=False).compile()).total
        except jax.errors.JaxRuntimeError as problem:  # some products XLA compiles only where it can try them out
            yield row | {"not compiled": str(problem)[:200]}
            continue
        memory_line = found.memory_lines[-1]
        row |= {
            "predicted": found.total.predicted,
            "compiled": found.total.compiled,
            "within 2 %": found.agrees(TOLERANCE),
            "bytes": memory_line.compiled,
            "bytes late": late,
            "by the sum": memory_line.predicted / memory_line.compiled,
            "compile s": time.perf_counter() - start,
            "kinds": {line.kind: [line.predicted, line.compiled] for line in found.lines},
        }
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="some of the cases")
    names = parser.parse_args().cases
    if unknown := set(names) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    rows, devices = results("gpu_programs")["rows"], described(DEVICES)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name in names or CASES:
            found = list(rows_of(name, devices))
            rows = [*(row for row in rows if row["model"] != name and row["model"] in CASES), *found]
            rows.sort(key=lambda row: list(CASES).index(row["model"]))
            show("elements, and memory, on one device", [{k: v for k, v in row.items() if k != "kinds"} for row in found])
            agree, programs = sum(row.get("within 2 %", False) for row in rows), sum("not compiled" not in row for row in rows)
            record("gpu_programs", rows, agree=agree, programs=programs, tolerance=TOLERANCE, devices=f"{DEVICES} x NVIDIA H200")
            print(
                f"{agree} of {programs} programs communicate as predicted, within 2 % of the total in total and by kind", flush=True
            )


if __name__ == "__main__":
    main()
