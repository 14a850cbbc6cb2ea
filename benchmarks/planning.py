"""Processor seconds of `unity.optimize` with its default options, cold, for models whose planning is slow, on 8 H100s.

`python -m benchmarks.planning [case]...`, in an environment with the packages of the cases (`benchmarks.zoo` makes one). Each
case is planned in a process of its own, without a cache; tracing the function is included, building the model is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

import unity
from benchmarks.models import get
from benchmarks.packages.package import images
from benchmarks.record import show
from benchmarks.zoo import ENTRIES

Case = tuple[Callable[..., Any], tuple[Any, ...]]


def model(name: str) -> Case:
    """Return a model of `benchmarks.models`."""
    built = get(name)
    return built.loss, (built.params, built.batch)


def zoo(label: str) -> Case:
    """Return an entry of the zoo at full size."""
    (entry,) = (entry for entry in ENTRIES if entry.label == label)
    loss, arguments = entry.case(tiny=False)
    return loss, jax.eval_shape(arguments)


def keras(name: str, size: int, batch: int) -> Case:
    """Return a Keras application on this many images."""
    from benchmarks.packages.keras import keras_application

    loss, (*state, _, _) = keras_application(name, size)
    return loss, (*state, *images(size, batch))


CASES: dict[str, Callable[[], Case]] = {
    "Keras' EfficientNetB0": lambda: keras("EfficientNetB0", 224, 256),
    "Haiku's ResNet-50": lambda: zoo("dm-haiku: ResNet-50"),
    "equimo's MLLA-T": lambda: zoo("equimo: MLLA-T (Mamba-like linear attention)"),
    "Inception-v3": lambda: model("inception_v3"),
}


def planned(case: str) -> dict[str, Any]:
    """Plan a case in this process."""
    loss, arguments = CASES[case]()
    start = time.process_time()
    plan = unity.optimize(loss, *arguments, machine=unity.Machine.grid(1, 8, "h100"), progress=False)
    seconds = time.process_time() - start
    return {"case": case, "processor s": seconds, "step ms": plan.time * 1e3, "GB": plan.memory / 1e9}


def main(cases: list[str]) -> None:
    rows = []
    for case in cases or CASES:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planning", "--in-this-process", case]
            run = subprocess.run(command, env={**os.environ, "XDG_CACHE_HOME": cache}, check=True, stdout=subprocess.PIPE)
            rows.append(json.loads(run.stdout.splitlines()[-1]))
    show("Processor seconds of planning", rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-this-process"]:
        print(json.dumps(planned(sys.argv[2])))
    else:
        main(sys.argv[1:])
