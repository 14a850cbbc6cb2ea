"""The command `unity diff A [B]`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from unity.base.errors import PlanError
from unity.cli.arguments import growth
from unity.cli.errors import CommandError
from unity.cli.files import read, write
from unity.diff import FORMATS, PlanDiff
from unity.diff.plan_diff import FORMAT_OF_SUFFIX
from unity.diff.verdict import FORMATS as VERDICT_FORMATS
from unity.diff.verdict import ChangeVerdict

HELP = "show the differences between two saved plans, or two graphs"
SAME, DIFFERENT, WRONG = 0, 1, 2  # exit statuses, as those of `diff`
ACCEPTED, REFUSED = 0, 1  # with limits


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe `unity diff`."""
    command.set_defaults(run=run, wrong=WRONG)
    command.description = (
        "Shows the differences between two saved plans or graphs or, for a single plan, between the captured and the planned "
        "program. The exit status is 0 if nothing differs, 1 if something does, 2 after an error. With limits, the change from "
        "plan A to plan B is judged, and its causes are listed by line: the exit status is 0 if it is admitted, 1 if it is not."
    )
    command.epilog = (
        "examples:\n"
        "  unity diff plan.json                              # a plan against the program that it was made for\n"
        "  unity diff fast.json lean.json                    # two plans\n"
        "  unity diff fast.json lean.json -o diff.html\n"
        "  unity diff base.json change.json --slower 5% --larger 5% --format markdown"
    )
    command.add_argument("before", type=Path, metavar="A", help="a plan (plan.files.save) or a graph (JSON)")
    command.add_argument("after", type=Path, metavar="B", nargs="?", help="another; without it, A is compared with its program")
    command.add_argument("--format", choices=FORMATS, help="default: by the suffix of the file after -o, or text")
    command.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a file instead of printing")
    group = command.add_argument_group("limits, for a change of a model")
    group.add_argument("--slower", type=growth, metavar="PERCENT", help="how much more time B may take than A: 5%%")
    group.add_argument("--larger", type=growth, metavar="PERCENT", help="how much more memory B may take than A: 5%%")
    group.add_argument("--strict", action="store_true", help="admit no warnings about B that A does not have")
    command.add_argument("-q", "--quiet", action="store_true", help="print nothing; the exit status is the answer")


def run(options: argparse.Namespace) -> int:
    """Compare two plans or graphs. Return whether they differ, or whether the second is refused, as the exit status."""
    form = options.format or (FORMAT_OF_SUFFIX.get(options.output.suffix) if options.output else None) or "text"
    is_judged = options.slower is not None or options.larger is not None or options.strict
    if is_judged and options.after is None:
        raise CommandError("--slower, --larger and --strict judge a change from one plan to another: name both")
    if is_judged and form not in VERDICT_FORMATS:
        raise CommandError(f"--format {form} shows graphs: with limits, choose one of {', '.join(VERDICT_FORMATS)}")
    diff = _diff(options.before, options.after)
    if not is_judged:
        _put(diff, form, options)
        return DIFFERENT if diff else SAME
    verdict = diff.verdict(slower=options.slower, larger=options.larger, strict=options.strict)
    _put(verdict, form, options)
    return ACCEPTED if verdict.accepted else REFUSED


def _put(result: PlanDiff | ChangeVerdict, form: str, options: argparse.Namespace) -> None:
    """Print a result, in colour on a terminal, or write it to a file."""
    if form == "text" and options.output is None:
        if not options.quiet:
            result.show()
    elif options.output is not None or not options.quiet:
        write(result.formatted(form), options.output)


def _diff(before: Path, after: Path | None) -> PlanDiff:
    """Return the difference of two programs. Those of two files are named by the files."""
    first = read(before)
    if after is not None:
        second = read(after)
        one, other = first[-1], second[-1]
        captured = (first[0].graph, second[0].graph) if len(first) == len(second) == 2 else None
        return PlanDiff(
            replace(one, name=f"{before.name}: {one.name}"), replace(other, name=f"{after.name}: {other.name}"), captured=captured
        )
    if len(first) == 1:
        raise PlanError(f"{before} is a graph: name another one to compare it with")
    return PlanDiff(*first, same_source=True)
