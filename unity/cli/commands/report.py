"""The command `unity report FILE [MODULE:FUNCTION] -o PAGE`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from unity.cli.arguments import add_json
from unity.cli.model import METAVAR, model_of
from unity.cli.output import print_json, stage
from unity.report import content, of_file, of_plan, save

HELP = "write a saved plan as an HTML page"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe `unity report`."""
    command.set_defaults(run=run)
    command.description = (
        "Writes a saved plan as one HTML page that needs nothing from the network: its graph and the steps that led to it, the "
        "costs of operators, the frontier, the timeline of a step, live memory, collectives, and each device's part of the "
        "arguments. The file is enough; with the model its derivation is replayed first, and figures that an older file lacks are "
        "computed."
    )
    command.epilog = "examples:\n  unity report plan.json\n  unity report plan.json mymodel:example -o page.html --json"
    command.add_argument("path", type=Path, metavar="FILE", help="a plan (plan.files.save, unity optimize -o)")
    command.add_argument("model", metavar=METAVAR, nargs="?", help="the model that it was made for, to replay the derivation")
    command.add_argument("-o", "--output", type=Path, metavar="PAGE", help="default: FILE's name, ending in .html")
    add_json(command)


def run(options: argparse.Namespace) -> int:
    """Write the page, and print its path."""
    output = options.output or options.path.with_suffix(".html")
    with stage("drawing the plan"):
        source = of_file(options.path) if options.model is None else of_plan(model_of(options.model).plan(options.path))
        report = content(source)
        save(report, output)
    if options.json:
        print_json({"page": str(output), "bytes": output.stat().st_size, **data(report)})
    else:
        print(output)
    return 0


def data(report: dict[str, Any]) -> dict[str, Any]:
    """Return a summary of the page as data for other tools: its figures, its steps, and the parts that are missing."""
    lacks = [name for name in ("timeline", "memory") if "missing" in report[name]]
    return {
        "name": report["title"],
        "machine": report["machine"],
        "figures": {what: figure for what, figure, _ in report["figures"]},
        "steps": [frame["title"] for frame in report["frames"]],
        "points": len(report["frontier"]["points"]),
        "lacks": lacks,
    }
