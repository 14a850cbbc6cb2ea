"""Plans training losses of packages on PyPI, unchanged: `python -m benchmarks.zoo [case]...`.

Installs the packages into an environment of its own, in the user's cache folder (`ZOO_ENVIRONMENT` names another): 3 GB.
A package that needs other versions than the rest has another beside it.
Plans every case at full size and runs it at a tiny size, each in a process of its own; `ZOO_STAGES=full` or `tiny` does one.

Writes `benchmarks/results/zoo.json`. A package that uv cannot install beside the newest JAX is recorded with uv's reason,
a stage that fails or takes more than ten minutes with its error. Results of cases and stages that are not run again stay.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import asked, record, results, show
from benchmarks.zoo import ENTRIES, Entry
from benchmarks.zoo.environment import APART, VARIABLES, environments, versions

STAGES = ("full", "tiny")
SECONDS = 600  # for one stage of a case
ROOT = Path(__file__).parents[2]


def measured(entry: Entry, stage: str, python: Path) -> dict[str, Any]:
    """Return the figures of one stage of an entry, measured by another process, or its error."""
    command = [python, "-W", "ignore", "-m", "benchmarks.zoo.measure", entry.label, stage]
    with tempfile.TemporaryDirectory() as cache:
        variables = {**os.environ, **VARIABLES, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": cache}  # no plan is recalled
        try:
            run = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired as ended:
            lines = (ended.stdout or b"{}").splitlines()
            return json.loads(lines[-1]) | {"error": f"not measured within {SECONDS} s"}
    if run.returncode:
        return {"error": ": ".join([f"exit code {run.returncode}", *run.stderr.strip().splitlines()[-1:]])}
    return json.loads(run.stdout.splitlines()[-1])


def recorded() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows on record by package and loss."""
    return {(row["package"], row["loss"]): row for row in results("zoo")["rows"]}


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row for the printed table, without the lists of operators."""
    figures = {f"{stage} {name}": value for stage in STAGES for name, value in row.get(stage, {}).items()}
    return {name: value for name, value in (row | figures).items() if not isinstance(value, (dict, list))}


def main() -> None:
    chosen, _ = asked(__doc__, [entry.label for entry in ENTRIES], "recorded beside the results of the others")
    stages = os.environ.get("ZOO_STAGES", " ".join(STAGES)).split()
    if unknown := set(stages) - set(STAGES):
        raise SystemExit(f"ZOO_STAGES names {', '.join(sorted(unknown))}; the stages are {', '.join(STAGES)}")
    packages = sorted({entry.package for entry in ENTRIES if entry.package not in APART or entry.label in chosen})
    interpreters, problems = environments(packages)
    installed = results("zoo").get("packages", {}) | versions({**interpreters, "jax": interpreters["keras"]})
    for entry in ENTRIES:
        if entry.label not in chosen:
            continue
        for stage in stages:
            problem = problems.get(entry.package)
            figures = {"not installed": problem} if problem else {stage: measured(entry, stage, interpreters[entry.package])}
            rows = recorded()  # now: several commands may run side by side
            before = rows.get((entry.package, entry.name), {})
            kept = {} if problem else {name: before[name] for name in STAGES if name in before}
            row = {"package": entry.package, "loss": entry.name, "lines": entry.lines} | kept | figures
            rows[entry.package, entry.name] = row
            print(json.dumps(row), flush=True)
            record("zoo", [rows[e.package, e.name] for e in ENTRIES if (e.package, e.name) in rows], packages=installed)
    rows = recorded()
    show("the zoo", [flat(rows[e.package, e.name]) for e in ENTRIES if e.label in chosen])


if __name__ == "__main__":
    main()
