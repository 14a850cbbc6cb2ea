"""The command `unity diff A [B]`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from unity.base.errors import PlanError
from unity.cli.files import read, write
from unity.diff import FORMATS, PlanDiff
from unity.diff.plan_diff import FORMAT_OF_SUFFIX
from unity.plan.summary import Summary

HELP = "say what is different between two saved plans, or two graphs"
SAME, DIFFERENT, WRONG = 0, 1, 2  # exit statuses, as those of `diff`


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe `unity diff`."""
    command.set_defaults(run=run, wrong=WRONG)
    command.description = (
        "Says what is different between two saved plans or graphs; of one plan, between the program as captured and as planned. "
        "The exit status is 0 if nothing is different, 1 if something is, 2 if something is wrong."
    )
    command.epilog = (
        "examples:\n"
        "  unity diff plan.json                              # a plan against the program that it was made for\n"
        "  unity diff fast.json lean.json                    # two plans\n"
        "  unity diff fast.json lean.json -o diff.html"
    )
    command.add_argument("before", type=Path, metavar="A", help="a plan (plan.save) or a graph (JSON)")
    command.add_argument("after", type=Path, metavar="B", nargs="?", help="another; without it, A is compared with its program")
    command.add_argument("--format", choices=FORMATS, help="default: what the name after -o says, or text")
    command.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a file instead of printing")
    command.add_argument("-q", "--quiet", action="store_true", help="print nothing: the exit status tells")


def run(options: argparse.Namespace) -> int:
    """Compare two plans or graphs, and return whether they differ as the exit status."""
    diff = PlanDiff(*_sides(options.before, options.after))
    form = options.format or (FORMAT_OF_SUFFIX.get(options.output.suffix) if options.output else None) or "text"
    if form == "text" and options.output is None:
        if not options.quiet:
            diff.show()
    elif options.output is not None or not options.quiet:
        write(diff.formatted(form), options.output)
    return DIFFERENT if diff else SAME


def _sides(before: Path, after: Path | None) -> tuple[Summary, Summary]:
    """Return the two programs to compare. Those of two files are named by the files."""
    first = read(before)
    if after is not None:
        one, other = first[-1], read(after)[-1]
        return replace(one, name=f"{before.name}: {one.name}"), replace(other, name=f"{after.name}: {other.name}")
    if len(first) == 1:
        raise PlanError(f"{before} is a graph: name another one to compare it with")
    return first[0], first[1]
