"""`unity report FILE [MODULE:FUNCTION] -o PAGE`."""

from __future__ import annotations

import argparse
from pathlib import Path

from unity.cli.model import METAVAR, model_of
from unity.cli.output import stage

HELP = "write a saved plan as an HTML page"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describes `unity report`."""
    command.set_defaults(run=run)
    command.description = (
        "Writes a saved plan as one HTML page that needs nothing from the network: its graph and the steps that led to it, the "
        "frontier, collectives, and which device holds which part of the arguments. With the model it shows more: the graph after "
        "each rule, what operators cost one by one, when everything of a step runs, and what is in memory."
    )
    command.epilog = "examples:\n  unity report plan.json\n  unity report plan.json mymodel:example -o page.html"
    command.add_argument("path", type=Path, metavar="FILE", help="a plan (plan.save, unity optimize -o)")
    command.add_argument("model", metavar=METAVAR, nargs="?", help="the model that it was made for: shows more")
    command.add_argument("-o", "--output", type=Path, metavar="PAGE", help="default: FILE's name, ending in .html")


def run(options: argparse.Namespace) -> int:
    """Writes the page, and says where."""
    from unity.report import of_file, of_plan, save

    output = options.output or options.path.with_suffix(".html")
    with stage("drawing the plan"):
        source = of_file(options.path) if options.model is None else of_plan(model_of(options.model).plan(options.path))
        save(source, output)
    print(output)
    return 0
