"""`python -m benchmarks.equivalent`: how far apart the plans of equivalent programs are.

For every class of programs that compute the same, and for 8, 32 and 192 devices, the predicted step time of the best plan of
each form, without rewriting; and worst over best. Searches that are on record for the same code are not repeated, so an
interrupted run continues; `--again` repeats them. `--only` takes parts of names of classes, and `--devices` numbers of devices.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs on devices

import argparse
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import jax

import unity
from benchmarks.equivalent import CLASSES
from benchmarks.equivalent.forms import Equivalence
from benchmarks.record import RESULTS, record, show
from unity.machine.machine import Machine
from unity.pcg.capture.capture import capture
from unity.search.cost.cost import Training
from unity.search.session import Search

LIMIT = 1.05  # of worst over best, where the arithmetic is the same
MACHINES: Mapping[int, Machine] = {
    8: Machine.grid(1, 8, "a100"),
    32: Machine.preset("dgx-h100-4x8"),
    192: Machine.grid(32, 6, "v100"),
}


@dataclass(frozen=True)
class Result:
    """The predicted step time of a form's best plan, and how long its search took."""

    name: str
    devices: int
    form: str
    ms: float
    seconds: float


def searched(name: str, devices: int, form: str) -> Result:
    """Plans one form of a class."""
    start, equivalence = time.perf_counter(), CLASSES[name]
    captured = capture(equivalence.forms[form].run, *equivalence.structs(form))
    fastest = Search(captured.graph, captured.differentiated, MACHINES[devices], Training()).fastest
    return Result(name, devices, form, fastest.time * 1e3, time.perf_counter() - start)


def row(equivalence: Equivalence, results: list[Result]) -> dict[str, object]:
    """A class on one machine: its forms' times from the best to the worst, and why they differ."""
    ordered = sorted(results, key=lambda r: r.ms)
    best, worst = ordered[0].ms, ordered[-1].ms
    return {
        "class": ordered[0].name,
        "devices": ordered[0].devices,
        "worst / best": worst / best,
        "the same arithmetic": alike(equivalence, ordered),
        "ms": ", ".join(f"{r.form} {r.ms:.4g}" for r in ordered),
        "difference": "; ".join(
            f"{r.form}: {equivalence.differences[r.form]}"
            for r in ordered
            if r.form in equivalence.differences and r.ms > LIMIT * best
        ),
    }


def alike(equivalence: Equivalence, ordered: list[Result]) -> float:
    """Worst over best among the forms whose arithmetic is the same."""
    same = [r.ms for r in ordered if r.form not in equivalence.differences]
    return same[-1] / same[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="classes whose names contain one of these")
    parser.add_argument("--devices", nargs="*", type=int, default=list(MACHINES), choices=list(MACHINES))
    parser.add_argument("--again", action="store_true", help="search also what is on record")
    options = parser.parse_args()
    names = [n for n in CLASSES if not options.only or any(part in n for part in options.only)]
    cases = [(n, d, form) for n in names for d in options.devices for form in CLASSES[n].forms]
    known = {(r.name, r.devices, r.form): r for r in recorded()}
    done = {} if options.again else known
    rows = []
    for name in names:
        for devices in options.devices:
            results = [done.get(case) or searched(*case) for case in cases if case[:2] == (name, devices)]
            known |= {(r.name, r.devices, r.form): r for r in results}
            rows.append(row(CLASSES[name], results))
            print(f"{name}, {devices}: {rows[-1]['worst / best']:.3f} ({rows[-1]['ms']})", flush=True)
        keep(known)
    rows.sort(key=lambda r: (-r["the same arithmetic"], -r["worst / best"]))
    show("Worst over best of equivalent programs", [r for r in rows if r["worst / best"] > 1.01])


@cache
def version() -> str:
    """A hash of all that a result depends on: unity's code, the classes, and JAX's version."""
    folders = Path(unity.__file__).parent, Path(__file__).parent
    texts = [path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))]
    return hashlib.sha256("\0".join([jax.__version__, *texts]).encode()).hexdigest()[:16]


def recorded() -> list[Result]:
    """The results on record, if they are of the same code."""
    path = RESULTS / "equivalent.json"
    content = json.loads(path.read_text()) if path.exists() else {}
    return [Result(**r) for r in content.get("searches", [])] if content.get("code") == version() else []


def keep(known: Mapping[tuple[str, int, str], Result]) -> None:
    """Records all results so far, and the table of them."""
    rows = []
    for name, equivalence in CLASSES.items():
        for devices in MACHINES:
            results = [known[name, devices, form] for form in equivalence.forms if (name, devices, form) in known]
            if len(results) == len(equivalence.forms):
                rows.append(row(equivalence, results))
    rows.sort(key=lambda r: (-r["the same arithmetic"], -r["worst / best"]))
    record("equivalent", rows, code=version(), target=LIMIT, searches=[asdict(r) for r in known.values()])


if __name__ == "__main__":
    main()
