"""The command `unity explain FILE [MODULE:FUNCTION [PATH]]`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unity.base.documents import plain
from unity.base.formatting import duration, pattern, size
from unity.cli.arguments import add_json
from unity.cli.errors import CommandError
from unity.cli.files import read
from unity.cli.model import METAVAR, model_of
from unity.cli.output import print_json, stage
from unity.diff.document import UNMARKED, Document, DocumentRow, DocumentTable, cut
from unity.diff.formats.text import show
from unity.explain.tables import blocked
from unity.explain.why import answers
from unity.pcg.ir.user_lines import line_behind
from unity.pcg.types.parallel_type import show as in_types
from unity.pcg.types.parallel_type import slice_count
from unity.plan.plan import Plan
from unity.plan.summary import RuleUse, Summary, summary_of
from unity.plan.undivided import undivided

HELP = "explain the decisions and costs of a saved plan"
MAX_ROWS = 40  # rows of a table that are shown


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe `unity explain`."""
    command.set_defaults(run=run)
    command.description = (
        "Prints where a saved plan's arguments are stored, what every line of yours computes and communicates, and the rules "
        "behind it. With the model it also prints the buffers that are live at the peak, and what could not be split and why; with "
        "a path too, the types and costs of one argument, operator or line, and the costs of plans with other types of it."
    )
    command.epilog = (
        "examples:\n"
        "  unity explain plan.json\n"
        "  unity explain plan.json --json\n"
        "  unity explain plan.json mymodel:example \"params['layers'][*]['w']\"\n"
        "  unity explain plan.json mymodel:example model.py:42 --json"
    )
    command.add_argument("path", type=Path, metavar="FILE", help="a plan (plan.files.save, unity optimize -o)")
    command.add_argument("model", metavar=METAVAR, nargs="?", help="the model that it was made for, to print more")
    command.add_argument("about", metavar="PATH", nargs="?", help="an argument, a kind of operator, or a line to explain")
    add_json(command)


def run(options: argparse.Namespace) -> int:
    """Print an explanation."""
    if options.model is not None:
        with stage("capturing the model"):
            plan = model_of(options.model).plan(options.path)
        if options.json:
            print_json(data_with_model(plan, options.about))
        else:
            plan.explain(options.about, file=sys.stdout)
        return 0
    summary = read(options.path)[-1].in_user_names()
    if not summary.machine:
        raise CommandError(f"{options.path} is a graph, of which no costs are known: `unity show` prints it")
    if options.json:
        print_json(data(summary))
    else:
        show(document(summary), sys.stdout)
    return 0


def data(summary: Summary) -> dict[str, Any]:
    """Return a plan's decisions and costs as data for other tools. The graph is left out: `unity show --json` prints it."""
    figures = {k: v for k, v in vars(summary).items() if isinstance(v, str | int | float)}
    rows = {k: plain(getattr(summary, k)) for k in ("work", "talk", "rules", "applications", "warnings")}
    arguments = [{"name": n, "tensor": t, "stored": s, "nbytes": b} for (n, t, s), b in _stored_arguments(summary)]
    return {**figures, "arguments": arguments, **rows}


def data_with_model(plan: Plan, about: str | None) -> dict[str, Any] | list[dict[str, Any]]:
    """Return `data` with live buffers and dimensions that could not be split, or explanations of the nodes that `about` names."""
    if about is not None:
        return answers(plan, about)
    memory = plan.program.memory
    held = [{"why": h.why, "made_by": h.node.kind, "line": line_behind(h.node), "nbytes": h.nbytes} for h in memory.held]
    offloaded = [{"made_by": h.node.name or h.node.kind, "line": line_behind(h.node), "nbytes": h.nbytes} for h in memory.offloaded]
    return {
        **data(summary_of(plan.program).in_user_names()),
        "held": held,
        **({"offloaded": offloaded} if offloaded else {}),
        "undivided": [asdict(row) for row in undivided(plan.program)],
        "blocked": blocked(plan),
    }


def document(summary: Summary) -> Document:
    """Return a plan's decisions and costs as tables."""
    title = (
        f"{summary.name} on {summary.machine}, {summary.devices} devices: {duration(summary.time)} a step, "
        f"{size(summary.memory)} on each device (predicted)"
    )
    tables = (
        _rules("rewritten by", summary.rules),
        _rules("parallelized by", summary.applications),
        _arguments(summary),
        _operators(summary),
        _collectives(summary),
        _warnings(summary),
    )
    return Document(title, tuple(t for t in tables if t.rows))


def _rules(title: str, uses: tuple[RuleUse, ...]) -> DocumentTable:
    rows = [(f"{u.times} ×", u.rule, u.says, ", ".join((*u.lines, *u.over))) for u in uses]
    return _table(title, ("", "rule", "what it says", "where"), rows, "rules")


def _stored_arguments(summary: Summary) -> list[tuple[tuple[str, str, str], float]]:
    """Return every argument's name, tensor and type, and the bytes of its piece on one device."""
    axes, rows = summary.graph.axes, []
    for node in summary.graph.inputs:
        tensor, type_ = node.tensors[0], node.types[0]
        names = node.name, str(tensor), in_types(type_, axes, tensor.ndim)
        rows.append((names, tensor.nbytes / slice_count(type_, axes)))
    return rows


def _arguments(summary: Summary) -> DocumentTable:
    """Return the arguments, those of one type whose names differ only in a layer's number in one row."""
    sizes: dict[tuple[str, str, str], list[float]] = {}
    for (name, tensor, type_), nbytes in _stored_arguments(summary):
        sizes.setdefault((pattern(name), tensor, type_), []).append(nbytes)
    rows = [(f"{len(b)} ×", *key, size(sum(b))) for key, b in sorted(sizes.items(), key=lambda row: -sum(row[1]))]
    columns = ("", "arguments", "shape", "stored", "bytes on a device")
    return _table("where arguments are stored", columns, rows, "kinds of arguments")


def _operators(summary: Summary) -> DocumentTable:
    rows = [(f"{w.count} ×", w.kind, duration(w.seconds), w.line) for w in sorted(summary.work, key=lambda w: -w.seconds)]
    return _table("what computes", ("", "operator", "forward + backward", "line"), rows, "kinds of operators")


def _collectives(summary: Summary) -> DocumentTable:
    slowest_first = sorted(summary.talk, key=lambda t: -t.seconds)
    rows = [(f"{t.count} ×", t.kind, t.over, size(t.nbytes), duration(t.seconds), t.why, t.line) for t in slowest_first]
    columns = ("", "collective", "over", "bytes", "time", "why", "line")
    return _table("what communicates", columns, rows, "kinds of collectives")


def _warnings(summary: Summary) -> DocumentTable:
    return _table("warnings", ("line", "warning"), [(w.line, w.text) for w in summary.warnings], "warnings")


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]], what: str) -> DocumentTable:
    return DocumentTable(title, columns, cut([DocumentRow(UNMARKED, row) for row in rows], what, MAX_ROWS))
