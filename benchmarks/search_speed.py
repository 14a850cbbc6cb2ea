"""How long a search takes: cold, by stage, each case in a process of its own; then again from the cache.

`python -m benchmarks.search_speed`. A case's stages are those of the fastest plan whatever its memory; `optimize` is the
user's call with the device's memory as the limit, the writing of the cache included, and `overlap_part` the time of the same with
`overlap=True` as a multiple of it (both in a process of their own, by its own seconds). To trace the user's function takes its time
from the cache, too, and of small models most of it: `cached_untraced` is the part of the cold time without that.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax

import unity
from benchmarks.models import get
from benchmarks.models.model import Model
from benchmarks.record import record, show
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.search.cost.assembly import assemble
from unity.search.cost.cost import Training
from unity.search.solver.minimizer import Minimizer

FROM_CACHE, MEMORY = 0.1, 2e9  # targets: part of the cold time, bytes


@dataclass(frozen=True)
class Case:
    """A model on a machine, and the seconds that its search may take."""

    model: Callable[[], Model]
    machine: Machine
    target: float | None = None


CASES = {
    "gpt 12 layers, 8": Case(lambda: get("gpt2_padded", batch=32), Machine.grid(1, 8, "a100"), 2),
    "gpt 32 layers of 4096, 64": Case(lambda: get("gpt3_6.7b", vocab=50304), Machine.grid(8, 8, "a100"), 5),
    "vgg16, 4": Case(lambda: get("vgg16"), Machine.grid(1, 4, "v100"), 0.3),
    "inception_v3, 4": Case(lambda: get("inception_v3"), Machine.grid(1, 4, "v100"), 1.5),
    "inception_v3, 192": Case(lambda: get("inception_v3"), Machine.grid(32, 6, "v100"), 30),
    "bert_large, 192": Case(lambda: get("bert_large"), Machine.grid(32, 6, "v100")),
}


class _Clock:
    """Seconds since the last look: on the wall, and of this process alone (others on the cores do not count)."""

    def __init__(self) -> None:
        self.wall, self.own = time.perf_counter(), time.process_time()

    def __call__(self) -> tuple[float, float]:
        before = self.wall, self.own
        self.wall, self.own = time.perf_counter(), time.process_time()
        return self.wall - before[0], self.own - before[1]


def stages(case: Case) -> dict:
    """One cold search, stage by stage."""
    model, clock, found = case.model(), _Clock(), {}
    jax.make_jaxpr(model.loss)(model.params, model.batch)
    found["trace"] = clock()
    captured = capture(model.loss, model.params, model.batch)  # JAX remembers the trace
    found["capture"] = clock()
    assembled = assemble(captured.graph, captured.differentiated, case.machine, Training())
    found["assemble"] = clock()
    problem = assembled.problem
    found["problem"] = clock()
    point = Minimizer(problem).at([0.0])[0]
    found["eliminate"] = clock()
    total = tuple(map(sum, zip(*found.values(), strict=True)))
    return {
        "operators": len(captured.graph),
        "variables": len(problem.sizes),
        "values": max(problem.sizes),
        **{name: seconds[0] for name, seconds in found.items()},
        "search": total[0],
        "search_process": total[1],
        "target": case.target,
        "peak_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "step_ms": point.time * 1e3,
        "memory_GB": point.memory / 1e9,
    }


def optimize(case: Case, overlap: bool = False) -> dict:
    """The user's call."""
    model, clock = case.model(), _Clock()
    options = {"machine": case.machine, "memory_limit": None, "pipelines": False, "overlap": overlap, "progress": False}
    plan = unity.optimize(model.loss, model.params, model.batch, **options)
    wall, own = clock()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"wall": wall, "process": own, "search": plan.inspect.search_seconds, "step_ms": plan.time * 1e3, "peak_GB": peak}


def _apart(what: str, name: str, cache: str) -> dict:
    env = {**os.environ, "XDG_CACHE_HOME": cache}
    command = [sys.executable, "-m", "benchmarks.search_speed", what, name]
    return json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout)


BRIEF = (
    *("case", "operators", "values", "trace", "capture", "assemble", "problem", "eliminate", "search", "search_process", "target"),
    *("optimize", "cached", "cached_part", "cached_untraced", "overlap_part", "peak_GB", "met", "cache_met"),
)


def main(names: list[str]) -> None:
    rows = []
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as cache:
            row = {"case": name, **_apart("stages", name, cache)}
            cold, again = (_apart("optimize", name, cache) for _ in range(2))
            hidden = _apart("overlap", name, cache)
        row |= {"optimize": cold["wall"], "optimize_process": cold["process"], "cached": again["wall"]}
        row |= {"cached_without_capture": again["search"], "cached_part": again["wall"] / cold["wall"]}
        row |= {"overlap_process": hidden["process"], "overlap_part": hidden["process"] / cold["process"]}
        row["cached_untraced"] = max(0.0, again["wall"] - row["trace"]) / cold["wall"]
        row["peak_GB"] = max(row["peak_GB"], cold["peak_GB"])
        row["met"] = (row["target"] is None or row["search"] <= row["target"]) and row["peak_GB"] * 1e9 <= MEMORY
        row["cache_met"] = row["cached_part"] <= FROM_CACHE
        rows.append(row)
        print(f"{name}: {row['search']:.2f} s, optimize {cold['wall']:.2f} s, from the cache {again['wall']:.2f} s", flush=True)
    show("Seconds of a search", [{k: r[k] for k in BRIEF} for r in rows])
    if not names:
        record("search_speed", rows, targets={"from_cache": FROM_CACHE, "peak_bytes": MEMORY})


if __name__ == "__main__":
    one = {"stages": stages, "optimize": optimize, "overlap": partial(optimize, overlap=True)}
    if len(sys.argv) == 3 and sys.argv[1] in one:
        print(json.dumps(one[sys.argv[1]](CASES[sys.argv[2]])))
    else:
        main(sys.argv[1:])
