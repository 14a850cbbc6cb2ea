"""Predicted memory against the compiled program's, on eight devices, for points along the whole frontier.

    python -m benchmarks.memory [--keep] [case ...]

Compiled for virtual CPU devices; nothing is run. One gradient step is compared, so no optimizer slots: arguments, outputs and
temporaries (`compiled.memory_analysis()`), predicted for the CPU backend by the search's memory model. The model's rules were found
on the cases marked as fitted; the others were only measured. A ratio above 1 means that too much was predicted.

Cases are written to `results/memory.json` one by one, as they are done, in the place of what is there of them; named ones only with
`--keep`. So a run that was stopped goes on where it was with the cases that it has not done yet.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import unity
from benchmarks.models import registry
from benchmarks.models.model import Model
from benchmarks.record import record, results, show

DEVICES = 8
POINTS = 6  # of each frontier: the fastest, the leanest, and some between
WORST = 0.2


@dataclass(frozen=True)
class Case:
    """A model, and whether the prediction's rules were found on it."""

    model: Callable[[], Model]
    fitted: bool


def _case(name: str, fitted: bool = False, **sizes: object) -> Case:
    return Case(lambda: registry.get(name, **sizes), fitted)


GPT: dict[str, Any] = {"layers": 4, "hidden": 128, "heads": 4, "vocab": 512, "seq": 128, "batch": 16}
CASES = {
    "gpt": _case("gpt2", True, **GPT),
    "gpt scan": _case("gpt2", True, **GPT, scan=True),
    "gpt scan remat": _case("gpt2", True, **GPT, scan=True, remat=True),
    "gpt scan bfloat16": _case("gpt2", **GPT, scan=True, compute="bfloat16"),
    "gpt scan remat bfloat16": _case("gpt2", **GPT, scan=True, remat=True, compute="bfloat16"),
    "lstm": _case("rnnlm", True, hidden=128, vocab=512, steps=40, batch=32),
    "lstm bfloat16": _case("rnnlm", True, hidden=128, vocab=512, steps=40, batch=32, compute="bfloat16"),
    "cnn": _case("resnet50", True, blocks=(1, 1), base=32, image=64, batch=16, classes=16),
    "dlrm": _case("dlrm", True, tables=(8192,) * 4, width=64, bottom=(16, 64, 64), top=(64, 64, 2), batch=512),
    "gpt remat": _case("gpt2", **GPT, remat=True),
    "gpt bfloat16": _case("gpt2", True, **GPT, compute="bfloat16"),
    "llama": _case("llama3_8b", True, **GPT, kv_heads=2, feed_forward=384),
    "bert": _case("bert_large", True, **GPT),
    "nmt": _case("nmt", True, hidden=128, vocab=512, steps=16, batch=32),
    "mlp": _case("mlp", True, layers=4, width=512, batch=256),
    "alexnet": _case("alexnet", True, image=63, width=512, batch=64, classes=16),
    "vgg16": _case("vgg16", True, image=32, channels=16, width=256, batch=32, classes=16),
    "candle": _case("candle_uno", True, width=256, batch=256),
    "xdl": _case("xdl", True, tables=(8192,) * 4, width=64, batch=512),
}


def measure(name: str, case: Case) -> list[dict]:
    """The points of one case's frontier."""
    model = case.model()
    plan = unity.optimize(model.loss, model.params, model.batch, machine=unity.Machine.grid(1, DEVICES, "a100"), progress=False)
    last = len(plan.frontier) - 1
    rows = []
    for k in sorted({round(last * i / (POINTS - 1)) for i in range(POINTS)}):
        point = plan.frontier[k]
        check = point.check()
        lines = {line.kind: line for line in check.memory_lines}
        rows.append({
            "case": name, "fitted": case.fitted, "point": f"{k}/{last}", "step_ms": point.time * 1e3,
            **{f"predicted_{n}_MB": lines[n].predicted / 1e6 for n in lines},
            **{f"compiled_{n}_MB": lines[n].compiled / 1e6 for n in lines},
            "ratio": lines["all"].predicted / lines["all"].compiled,
        })  # fmt: skip
    return rows


def _apart(name: str) -> list[dict]:
    """One case in a process of its own, which sees the devices and no cached plan."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": cache}
        command = [sys.executable, "-m", "benchmarks.memory", "--measure", name]
        return json.loads(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout)


BRIEF = ("case", "point", "predicted_all_MB", "compiled_all_MB", "ratio", "met")


def keep(found: list[dict]) -> None:
    """Writes the rows of one case, and leaves what is there of others."""
    kept = results("memory")["rows"]
    rows = [*(row for row in kept if row["case"] != found[0]["case"]), *found]
    rows.sort(key=lambda row: list(CASES).index(row["case"]))
    record("memory", rows, target={"worst": WORST}, **_errors(rows), devices=DEVICES)


def _errors(rows: list[dict]) -> dict[str, Any]:
    """Return the median and the worst error, and how many predictions meet the target."""
    distances = [abs(row["ratio"] - 1) for row in rows]
    return {"median": median(distances), "worst": max(distances), "within": sum(map(_is_met, rows)), "of": len(rows)}


def main() -> None:
    """Measures the named cases, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all, if none is named")
    parser.add_argument("--keep", action="store_true", help="named cases are written to the results, too")
    parser.add_argument("--measure", action="store_true", help="one case, in this process; prints its rows")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if options.measure:
        print(json.dumps(measure(options.cases[0], CASES[options.cases[0]])))
        return
    rows = []
    for name in options.cases or CASES:
        day = datetime.date.today().isoformat()
        found = [row | {"met": _is_met(row), "date": day} for row in _apart(name)]
        show(name, [{k: r[k] for k in BRIEF} for r in found])
        rows += found
        if options.keep or not options.cases:
            keep(found)
    print("median error {median:.1%}, worst {worst:.1%}; {within} of {of} plans meet the target".format(**_errors(rows)))


def _is_met(row: dict) -> bool:
    """Whether the prediction of a point meets the target."""
    return abs(row["ratio"] - 1) <= WORST


if __name__ == "__main__":
    main()
