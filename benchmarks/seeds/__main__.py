"""`python -m benchmarks.seeds [PART…]`: runs what there is no result of yet, and writes the page.

Parts are named after the papers' figures: tensoropt6 (and table 3), tensoropt7, tensoropt8, optcnn7 (and 8), flexflow6 (7, 9 and
table 5), flexsteps (its recurrent networks step by step), unity14 (and 15b), unity15 (15a). Results are kept one by one in
`benchmarks/results/seeds/cases`, so a run that was interrupted goes on where it was, and together in `results.json` beside the
page; `--again` forgets those that are named. `--page` writes the page of what is there and runs nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing is run on devices

import argparse
import json

from benchmarks.record import RESULTS, record
from benchmarks.seeds.cases import PARTS, Case, cases
from benchmarks.seeds.page import page
from benchmarks.seeds.results import Results
from benchmarks.seeds.run import known, left, restore, run

FOLDER = RESULTS / "seeds"
RECORD = FOLDER / "results.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; all without")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--models", nargs="*", help="only these models")
    parser.add_argument("--devices", nargs="*", type=int, help="only these numbers of devices")
    parser.add_argument("--algorithms", nargs="*", help="only these algorithms")
    parser.add_argument("--again", action="store_true", help="run what was run before, too")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    every = [
        case for case in cases(tuple(options.parts or PARTS))
        if (not options.models or case.model in options.models)
        and (not options.devices or case.machine.devices in options.devices)
        and (not options.algorithms or case.algorithm in options.algorithms)
    ]  # fmt: skip
    folder = FOLDER / "cases"
    if RECORD.exists():
        restore(folder, json.loads(RECORD.read_text())["rows"])
    if options.again:
        for case in every:
            (folder / f"{case.name}.json").unlink(missing_ok=True)
    if not options.page:
        _run(every, options.processes)
    whole = cases(tuple(PARTS))
    found = known(folder, whole)
    record("seeds/results", list(found.values()))
    page(Results(tuple(found.values())), len(whole), FOLDER)
    print(f"{len(found)} of {len(whole)} cases; {FOLDER / 'page.md'}")


def _run(every: list[Case], processes: int) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    waiting = left(FOLDER / "cases", every)
    minutes = sum(case.minutes for case in waiting) / max(1, processes)
    print(f"{len(waiting)} of {len(every)} cases to run, about {minutes:.0f} minutes on {processes} cores", flush=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("cases", total=len(waiting))
        for names in run(every, FOLDER / "cases", processes):
            bar.update(task, advance=len(names), description=names[-1][:48])


if __name__ == "__main__":
    main()
