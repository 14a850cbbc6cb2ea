"""Captures models of many packages at published sizes: `python -m benchmarks.capture [part of a name]...`.

Nothing is allocated: arguments are abstract. Writes `benchmarks/results/capture.json`. Packages that are not installed are left
out, and named.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from benchmarks import models
from benchmarks.packages import MODELS, Packaged
from unity.pcg.capture.capture import capture, unparallelized
from unity.pcg.capture.repetition import repeated
from unity.pcg.ir.program import program_of

RESULTS = Path(__file__).parent / "results" / "capture.json"
OWN = ("gpt2", "bert_large", "llama3_8b", "resnet50", "inception_v3", "nmt", "dlrm_summit", "candle_uno")
LAYERS = 110  # of a GPT of more than 10,000 equations
DISTRIBUTIONS = {"haiku": "dm-haiku", "unity": "jax"}


def own(name: str, **sizes: int) -> Packaged:
    def build() -> Any:
        model = models.get(name, **sizes)
        return model.loss, (model.params, model.batch)

    return Packaged("unity", " ".join([name, *(f"{k}={n}" for k, n in sizes.items())]), build)


def measure(case: Packaged) -> dict[str, Any]:
    """One capture: its size, its time (tracing included, and by itself), what cannot be parallelized."""
    fn, args = case.build()
    started = time.perf_counter()
    traced = jax.make_jaxpr(fn)(*args)
    tracing = time.perf_counter() - started
    jax.clear_caches()
    started = time.perf_counter()
    graph = capture(fn, *args).graph
    seconds = time.perf_counter() - started
    whole = unparallelized(graph)
    return {
        "package": case.package,
        "model": case.name,
        "equations": len(program_of(traced)[0].equations),
        "operators": len(graph),
        "seconds": round(seconds, 3),
        "seconds_tracing": round(tracing, 3),
        "unparallelized": dict(Counter(why for _, why in whole)),
        "kinds": dict(Counter(n.kind for n, _ in graph.walk() if n.kind != "input").most_common()),
        "repeated": [str(run) for run in repeated(graph)],
        "key": graph.key,
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return None


def main(wanted: list[str]) -> None:
    found, missing = [], set()
    for case in [*map(own, OWN), own("gpt2", layers=LAYERS), *MODELS]:
        if wanted and not any(w.lower() in f"{case.package} {case.name}".lower() for w in wanted):
            continue
        if version(case.package) is None:
            missing.add(case.package)
            continue
        result = measure(case)
        found.append(result)
        print(
            "{package:13} {model:42} {equations:6} equations {operators:5} operators {seconds:7.2f} s".format(**result), flush=True
        )
    for package in sorted(missing):
        print(f"{package} is not installed: left out")
    packages = sorted({r["package"] for r in found if r["package"] != "unity"})
    data = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
        "versions": {name: version(name) for name in ["jax", "jaxlib", "numpy", *packages]},
        "left_out": sorted(missing),
        "models": found,
    }
    if not wanted:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(data, indent=1) + "\n")
        print(f"wrote {RESULTS}")


if __name__ == "__main__":
    main(sys.argv[1:])
