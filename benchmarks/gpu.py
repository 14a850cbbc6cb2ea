"""One device: predicted time of a step, from operators that were measured one by one, against the step as it runs.

`python -m benchmarks.gpu`, where there is a GPU; `--tiny` runs the same at small sizes anywhere, and records nothing. Each model's
operators are measured as `unity profile` does, into a database of this run's own. A step is the loss and all gradients, compiled
as XLA does by default. Steps follow each other as in training: the host does not wait for one before it starts the next. *alone* is
one that it does wait for. Every model's figures are kept as soon as they are there, beside those of other models on the same device
and software; and the machine with all that was measured of it, as JSON (`unity.Machine.load`).

`--others` needs no GPU: each model that is kept is predicted from what was measured of the others alone, and printed.
"""

from __future__ import annotations

import argparse
import datetime
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
from benchmarks.record import RESULTS, record, results, show
from unity.exec.measure.local_machine import where
from unity.machine.machine import Machine
from unity.machine.profiles.profile import Profile
from unity.machine.profiles.store import Store
from unity.profiling import profile, tasks_of_plan
from unity.search.cost.prediction import predict

ERROR = 0.1  # target: |predicted - measured| / measured
ROUNDS = 7
STEPS = 10  # of a round
WARM = 3
MACHINE = "machine-{}.json"  # where one is kept, by its device


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


def seconds(plan: unity.Plan, model: Model, rounds: int) -> tuple[float, float, float]:
    """Seconds of a step among others, the median of rounds, and their interquartile range over it; and of a step alone."""
    args = plan.shard(*concrete(model))
    step = jax.jit(jax.value_and_grad(plan)).lower(*args).compile()

    def taken(steps: int) -> float:
        start, last = time.perf_counter(), None
        for _ in range(steps):
            last = step(*args)
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / steps

    taken(WARM)
    found, alone = [taken(STEPS) for _ in range(rounds)], [taken(1) for _ in range(rounds)]
    low, high = np.quantile(found, [0.25, 0.75])
    return median(found), float(high - low) / median(found), median(alone)


def case(name: str, small: bool, rounds: int) -> dict[str, Any]:
    """One model's figures."""
    model = (CASES[name].small if small else CASES[name].full)()
    devices, store, args, started = jax.devices()[:1], Store.usual(), (model.params, model.batch), time.perf_counter()
    steps = [step for step in profile(model.loss, args, {"search": "captured"}, devices, store) if step.task is not None]
    spent = time.perf_counter() - started
    machine = Machine.local(devices)
    plan = unity.optimize(model.loss, *args, machine=machine, search="captured", progress=False)
    differentiated = plan.program.family.search.differentiated
    found = predict(plan.program.pcg, machine, differentiated)
    plain = predict(plan.program.pcg, machine.with_profile(None), differentiated)
    measured, spread, alone = seconds(plan, model, rounds)
    error = abs(found.time - measured) / measured
    return {
        "model": name,
        "parameters": model.parameters,
        "operators": len(steps),
        "profile s": spent,
        "measured ms": measured * 1e3,
        "spread": spread,
        "alone ms": alone * 1e3,
        "profiled ms": found.time * 1e3,
        "error": error,
        "plain ms": plain.time * 1e3,
        "plain error": abs(plain.time - measured) / measured,
        "known": dict(Counter(t.how for t in found.operators)),
        "not measured": sorted({step.problem for step in steps if step.problem}),
        "met": error <= ERROR,
        "device": machine.device.name,
        "date": datetime.date.today().isoformat(),
    }


def kept(place: str) -> list[dict[str, Any]]:
    """What was recorded on this device before."""
    content = results("gpu")
    return content["rows"] if content.get("device") == place else []


def with_all(machine: Machine, path: Path) -> Machine:
    """The machine with what a file knows of it too, where that was measured alike and not again."""
    known, found = Machine.load(path).profile if path.exists() else None, machine.profile
    if known is None or found is None or known.where != found.where:
        return machine
    return machine.with_profile(Profile(found.where, tuple({**known.exact, **found.exact}.values())))


def by_others() -> list[dict[str, Any]]:
    """The models that are kept, each predicted from the operators of the others, and from those of none."""
    rows = []
    for row in results("gpu")["rows"]:
        model, machine = CASES[row["model"]].full(), Machine.load(RESULTS / MACHINE.format(row["device"]))
        plan = unity.optimize(model.loss, model.params, model.batch, machine=machine, search="captured", progress=False)
        own, profile = tasks_of_plan(plan, domains=True, every=False), machine.profile
        assert profile is not None, "a machine is kept with what was measured of it"
        others = Profile(profile.where, tuple(m for m in profile.measurements if m.content not in own))
        figures = {"model": row["model"], "measured ms": row["measured ms"]}
        for name, known in (("by others", others), ("by none", None)):
            found = predict(plan.program.pcg, machine.with_profile(known), plan.program.family.search.differentiated).time * 1e3
            figures |= {f"{name} ms": found, f"{name} error": abs(found - row["measured ms"]) / row["measured ms"]}
        rows.append(figures)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="some of the cases")
    parser.add_argument("--tiny", action="store_true", help="small sizes, not recorded")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--others", action="store_true", help="predict the models that are kept, each from the others' operators")
    options = parser.parse_args()
    if options.others:
        return show("each model from the operators of the others", by_others())
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    place = str(where(jax.devices()[:1]))
    rows = {} if options.tiny else {row["model"]: row for row in kept(place)}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # the device as it is today
        for name in options.cases or CASES:
            rows[name] = case(name, options.tiny, options.rounds)
            print(f"{name}: predicted {rows[name]['profiled ms']:.3g} ms, measured {rows[name]['measured ms']:.3g} ms", flush=True)
            if not options.tiny:
                record("gpu", [rows[name] for name in CASES if name in rows], target=ERROR, device=place)
                machine = Machine.local(jax.devices()[:1])
                with_all(machine, path := RESULTS / MACHINE.format(machine.device.name)).save(path)
    show(f"one step on {place}", list(rows.values()))


if __name__ == "__main__":
    main()
