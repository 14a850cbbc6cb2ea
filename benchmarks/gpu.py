"""One device: predicted time of a step, from operators that were measured one by one, against the step as it runs.

`python -m benchmarks.gpu`, where there is a GPU; `--tiny` runs the same at small sizes anywhere, and records nothing. Each model's
operators are measured as `unity profile` does, into a database of this run's own. A step is the loss and all gradients, compiled
as XLA does by default, many times over. The machine with all that was measured is kept as JSON (`unity.Machine.load`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np

import unity
from benchmarks.models import concrete
from benchmarks.models.bert import bert
from benchmarks.models.gpt import gpt
from benchmarks.models.model import Model
from benchmarks.models.recommenders import dlrm
from benchmarks.models.registry import tiny
from benchmarks.models.resnet import resnet
from benchmarks.record import RESULTS, record, show
from unity.profiling import profile
from unity.search.local import where
from unity.search.machine import Machine
from unity.search.predict import predict
from unity.search.profiles.store import Store

ERROR = 0.1  # target: |predicted - measured| / measured
ROUNDS = 30


@dataclass(frozen=True)
class Case:
    """A model as it is published, and small enough to run anywhere."""

    full: Callable[[], Model]
    small: Callable[[], Model]


CASES = {
    "gpt2 small": Case(lambda: gpt(batch=8), lambda: tiny("gpt2")),
    "gpt2 medium": Case(lambda: gpt(layers=24, hidden=1024, heads=16, batch=4), lambda: tiny("gpt2", hidden=48)),
    "gpt2 small, bfloat16": Case(lambda: gpt(batch=8, compute="bfloat16"), lambda: tiny("gpt2", compute="bfloat16")),
    "resnet50": Case(lambda: resnet(batch=64), lambda: tiny("resnet50")),
    "bert_large, 4 layers": Case(lambda: bert(layers=4, batch=8), lambda: tiny("bert_large")),
    "dlrm": Case(
        lambda: dlrm(tables=(1_000_000,) * 8, width=64, bottom=(16, 512, 256, 64), top=(1024, 512, 8), batch=2048),
        lambda: tiny("dlrm"),
    ),
}


def seconds(plan: unity.Plan, model: Model, rounds: int) -> tuple[float, float]:
    """The median of a step's seconds, and their interquartile range over it."""
    args = plan.shard(*concrete(model))
    step = jax.jit(jax.value_and_grad(plan)).lower(*args).compile()
    found = []
    for _ in range(rounds + 3):
        start = time.perf_counter()
        jax.block_until_ready(step(*args))
        found.append(time.perf_counter() - start)
    low, high = np.quantile(found[3:], [0.25, 0.75])  # the first ones warm up
    return median(found[3:]), float(high - low) / median(found[3:])


def case(name: str, small: bool, rounds: int) -> dict[str, Any]:
    """One model's figures."""
    model = (CASES[name].small if small else CASES[name].full)()
    devices, store, args, started = jax.devices()[:1], Store.usual(), (model.params, model.batch), time.perf_counter()
    steps = [step for step in profile(model.loss, args, {"search": "captured"}, devices, store) if step.task is not None]
    spent = time.perf_counter() - started
    machine = Machine.local(devices)
    plan = unity.optimize(model.loss, *args, machine=machine, search="captured", progress=False)
    differentiated = plan._made.search.differentiated
    found = predict(plan.pcg, machine, differentiated)
    plain = predict(plan.pcg, machine.with_profile(None), differentiated)
    measured, spread = seconds(plan, model, rounds)
    error = abs(found.time - measured) / measured
    return {
        "model": name,
        "parameters": model.parameters,
        "operators": len(steps),
        "profile s": spent,
        "measured ms": measured * 1e3,
        "spread": spread,
        "profiled ms": found.time * 1e3,
        "error": error,
        "plain ms": plain.time * 1e3,
        "plain error": abs(plain.time - measured) / measured,
        "known": dict(Counter(t.how for t in found.operators)),
        "not measured": sorted({step.problem for step in steps if step.problem}),
        "met": error <= ERROR,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="some of the cases, not recorded")
    parser.add_argument("--tiny", action="store_true", help="small sizes, not recorded")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--machine", type=Path, metavar="FILE", help="where to write the machine (default: among the results)")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    recorded = not (options.tiny or options.cases)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # the device as it is today
        rows = []
        for name in options.cases or CASES:
            rows.append(case(name, options.tiny, options.rounds))
            print(f"{name}: predicted {rows[-1]['profiled ms']:.3g} ms, measured {rows[-1]['measured ms']:.3g} ms", flush=True)
        machine = Machine.local(jax.devices()[:1])
    show(f"one step on {where(jax.devices()[:1])}", rows)
    path = options.machine or (RESULTS / f"machine-{machine.device.name}.json" if recorded else None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine.save(path)
        print(f"the machine is in {path}")
    if recorded:
        record("gpu", rows, target=ERROR, device=str(where(jax.devices()[:1])))


if __name__ == "__main__":
    main()
