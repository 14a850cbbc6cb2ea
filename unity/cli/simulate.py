"""`unity simulate FILE MODULE:FUNCTION`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unity.cli.arguments import add_json
from unity.cli.errors import CommandError
from unity.cli.model import add_plan, model_of
from unity.cli.output import print_json, results, stage

if TYPE_CHECKING:
    from rich.table import Table

    from unity.search.simulator import Simulation

HELP = "say when everything of one step runs"
ROWS = 32  # of each table: the busiest devices and links, the largest that hold memory


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describes `unity simulate`."""
    command.set_defaults(run=run)
    command.description = (
        "Simulates one step of a saved plan on the machine that it is for: how long it takes, what every device and link is "
        "busy for, what is sent, and what holds memory when most is held. Where all devices do the same, one stands for all. "
        "The machine need not be there."
    )
    command.epilog = (
        "examples:\n"
        "  unity simulate plan.json mymodel:example\n"
        "  unity simulate plan.json mymodel:example --trace step.json --plot step.png   # Perfetto opens the trace"
    )
    add_plan(command)
    command.add_argument("--trace", type=Path, metavar="FILE", help="write a trace that Perfetto and Chrome open")
    command.add_argument("--plot", type=Path, metavar="FILE", help="write a picture (png, pdf, svg)")
    add_json(command)


def run(options: argparse.Namespace) -> int:
    """Simulates."""
    model = model_of(options.model)
    with stage("simulating one step"):
        plan = model.plan(options.path)
        found = plan.simulate()
    if options.trace is not None:
        found.save_trace(options.trace)
    if options.plot is not None:
        _plot(found, options.plot)
    if options.json:
        print_json({
            "name": plan.__name__, "machine": plan.machine.name, "makespan": found.makespan, "predicted": plan.time,
            "busy": dict(found.busy), "sent": dict(found.sent), "memory": _most(found),
        })  # fmt: skip
        return 0
    from unity.base.formatting import duration

    console = results()
    console.print(f"{plan.__name__} on {plan.machine}")
    console.print(f"one step: {duration(found.makespan)} simulated, {duration(plan.time)} predicted by the search")
    console.print(_busy(found))
    console.print(_held(found))
    return 0


def _busy(found: Simulation) -> Table:
    from rich.table import Table

    from unity.base.formatting import duration, size

    table = Table("device or link", "busy", "of the step", "sent")
    rows = sorted(found.busy.items(), key=lambda row: -row[1])
    for name, seconds in rows[:ROWS]:
        sent = size(found.sent[name]) if name in found.sent else ""
        table.add_row(name, duration(seconds), f"{seconds / found.makespan:.0%}", sent)
    if len(rows) > ROWS:
        table.add_row(f"… and {len(rows) - ROWS} more", "", "", "")
    return table


def _most(found: Simulation) -> dict[str, Any]:
    """The device that holds most, when it does, how much that is, and what holds it: why, which operator, of which line."""
    from unity.pcg.ir.user_lines import line_behind

    name, memory = max(found.memory.items(), key=lambda row: row[1].peak)
    joined: dict[tuple[str, str, str], float] = {}
    for h in memory.held:
        key = h.why, "" if h.node.kind == "input" else h.node.kind, line_behind(h.node)
        joined[key] = joined.get(key, 0.0) + h.nbytes
    rows = sorted(joined.items(), key=lambda row: -row[1])
    held = [{"why": why, "operator": kind, "line": line, "bytes": nbytes} for (why, kind, line), nbytes in rows]
    return {"device": name, "seconds": memory.moment, "peak": memory.peak, "held": held}


def _held(found: Simulation) -> Table:
    from rich.table import Table

    from unity.base.formatting import duration, size

    most = _most(found)
    title = f"most memory: {size(most['peak'])} on {most['device']}, {duration(most['seconds'])} into the step"
    table = Table("held as", "made by", "bytes", "line", title=title, title_justify="left")
    for row in most["held"][:ROWS]:
        table.add_row(row["why"], row["operator"], size(row["bytes"]), row["line"])
    if len(most["held"]) > ROWS:
        rest = most["held"][ROWS:]
        table.add_row(f"… and {len(rest)} more", "", size(sum(row["bytes"] for row in rest)), "")
    return table


def _plot(found: Simulation, path: Path) -> None:
    try:
        found.plot(path)
    except ImportError:
        raise CommandError("--plot needs matplotlib: pip install 'unity-jax[plot]'") from None
    except ValueError as problem:  # a format that matplotlib does not know
        raise CommandError(f"{path}: {problem}") from None
