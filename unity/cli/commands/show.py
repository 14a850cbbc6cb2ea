"""The command `unity show FILE`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from unity.base.formatting import duration, size
from unity.cli.files import read, write
from unity.pcg.ir.dot import to_dot
from unity.plan.summary import Summary

HELP = "print the graph of a saved plan, or a graph"
FORMATS = ("text", "json", "dot")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe `unity show`."""
    command.set_defaults(run=run)
    command.description = "Prints the parallel computation graph of a saved plan, or a graph."
    command.epilog = "examples:\n  unity show plan.json\n  unity show plan.json --captured --format dot -o program.dot"
    command.add_argument("path", type=Path, metavar="FILE", help="a plan (plan.files.save) or a graph (JSON)")
    command.add_argument("--captured", action="store_true", help="of a plan: the graph as it was captured, before all rewriting")
    command.add_argument("--format", choices=FORMATS, default="text")
    command.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a file instead of printing")


def run(options: argparse.Namespace) -> int:
    """Print the graph of a file, for people over the mesh axes that users see, for other tools over those of the search."""
    summaries = read(options.path)
    summary = summaries[0] if options.captured else summaries[-1]
    formats: dict[str, Callable[[], str]] = {
        "text": lambda: _text(summary.in_user_names()),
        "json": lambda: json.dumps(summary.to_json(), indent=1),
        "dot": lambda: to_dot(summary.in_user_names().graph),
    }
    write(formats[options.format](), options.output)
    return 0


def _text(summary: Summary) -> str:
    """Return a headline, the rules that led to the graph, and the graph."""
    lines = [f"# {summary.name}, {len(summary.graph)} operators"]
    if summary.machine:
        lines[0] += f", on {summary.machine}: {duration(summary.time)} a step, {size(summary.memory)} on each device (predicted)"
    for use in (*summary.rules, *summary.applications):
        lines.append(f"# {use.times} × {use.rule}:  {use.says}  ({', '.join((*use.lines, *use.over))})")
    return "\n".join([*lines, str(summary.graph)])
