"""Plans training losses of packages on PyPI, unchanged: `python -m benchmarks.zoo [case]...`.

Installs the packages into an environment of its own, in the user's cache folder (`ZOO_ENVIRONMENT` names another), and measures
every case in a process of its own. Writes `benchmarks/results/zoo.json`; the rows of cases that are not run again stay.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, asked, record, show
from benchmarks.zoo import ENTRIES, Entry
from benchmarks.zoo.environment import VARIABLES, environment, versions

SECONDS = 600  # for one case
ROOT = Path(__file__).parents[2]


def measured(entry: Entry, python: Path) -> dict[str, Any]:
    """Return the row of an entry, measured by another process."""
    command = [python, "-W", "ignore", "-m", "benchmarks.zoo.measure", entry.label]
    variables = {**os.environ, **VARIABLES, "PYTHONPATH": str(ROOT)}
    problem = {"package": entry.package, "loss": entry.name, "lines": entry.lines}
    try:
        run = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return problem | {"error": f"not measured within {SECONDS} s"}
    if run.returncode:
        return problem | {"error": (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]}
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    chosen, _ = asked(__doc__, [entry.label for entry in ENTRIES], "recorded beside the results of the others")
    path = RESULTS / "zoo.json"
    rows = {(row["package"], row["loss"]): row for row in (json.loads(path.read_text())["rows"] if path.exists() else ())}
    packages = sorted({entry.package for entry in ENTRIES})
    python, problems = environment(packages)
    for entry in ENTRIES:
        if entry.label not in chosen:
            continue
        problem = problems.get(entry.package)
        row = {"package": entry.package, "loss": entry.name, "not installed": problem} if problem else measured(entry, python)
        rows[entry.package, entry.name] = row
        print(json.dumps(row), flush=True)
        recorded = [rows[e.package, e.name] for e in ENTRIES if (e.package, e.name) in rows]
        record("zoo", recorded, packages=versions(python, [*packages, "jax"]))
    show("the zoo", [rows[e.package, e.name] for e in ENTRIES if e.label in chosen])


if __name__ == "__main__":
    main()
