"""The command `unity simulate FILE MODULE:FUNCTION`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.table import Table

from unity.base.formatting import duration, size
from unity.cli.arguments import add_json
from unity.cli.errors import CommandError
from unity.cli.model import add_plan, model_of
from unity.cli.output import print_json, result_console, stage
from unity.search.memory.buffers_by_line import by_line
from unity.search.simulator import Simulation

HELP = "simulate one step of a saved plan on its machine"
MAX_ROWS = 32  # rows of each table: the busiest devices and links, the largest live values


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe `unity simulate`."""
    command.set_defaults(run=run)
    command.description = (
        "Simulates one step of a saved plan on the machine that it is for: the time, the load of every device and link, the bytes "
        "sent, and the buffers that are live at the peak. If all devices do the same, one stands for all. The machine need not be "
        "present."
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
    """Simulate one step of a plan."""
    model = model_of(options.model)
    with stage("simulating one step"):
        plan = model.plan(options.path)
        simulation = plan.inspect.simulate()
    if options.trace is not None:
        simulation.save_trace(options.trace)
    if options.plot is not None:
        _plot(simulation, options.plot)
    if options.json:
        print_json({
            "name": plan.__name__, "machine": plan.inspect.machine.name, "makespan": simulation.makespan, "predicted": plan.time,
            "busy": dict(simulation.busy), "sent": dict(simulation.sent), "memory": _fullest_device(simulation),
        })  # fmt: skip
        return 0
    console = result_console()
    console.print(f"{plan.__name__} on {plan.inspect.machine.described(plan.program.computed_dtypes)}")
    console.print(f"one step: {duration(simulation.makespan)} simulated, {duration(plan.time)} predicted by the search")
    console.print(_busy_table(simulation))
    console.print(_memory_table(simulation))
    return 0


def _busy_table(simulation: Simulation) -> Table:
    table = Table("device or link", "busy", "of the step", "sent")
    rows = sorted(simulation.busy.items(), key=lambda row: -row[1])
    for name, seconds in rows[:MAX_ROWS]:
        sent = size(simulation.sent[name]) if name in simulation.sent else ""
        table.add_row(name, duration(seconds), f"{seconds / simulation.makespan:.0%}", sent)
    if len(rows) > MAX_ROWS:
        table.add_row(f"… and {len(rows) - MAX_ROWS} more", "", "", "")
    return table


def _fullest_device(simulation: Simulation) -> dict[str, Any]:
    """Return the device with the highest peak memory, the time of the peak, and its live values by reason, operator and source
    line.
    """
    name, memory = max(simulation.memory.items(), key=lambda row: row[1].peak)
    rows = by_line(memory.held)
    kinds = ["" if row.operator == "input" else row.operator for row in rows]
    held = [{"why": r.why, "operator": kind, "line": r.line, "bytes": r.nbytes} for r, kind in zip(rows, kinds, strict=True)]
    return {"device": name, "seconds": memory.moment, "peak": memory.peak, "held": held}


def _memory_table(simulation: Simulation) -> Table:
    most = _fullest_device(simulation)
    title = f"peak memory: {size(most['peak'])} on {most['device']}, {duration(most['seconds'])} into the step"
    table = Table("live buffers", "producer", "bytes", "line", title=title, title_justify="left")
    for row in most["held"][:MAX_ROWS]:
        table.add_row(row["why"], row["operator"], size(row["bytes"]), row["line"])
    if len(most["held"]) > MAX_ROWS:
        rest = most["held"][MAX_ROWS:]
        table.add_row(f"… and {len(rest)} more", "", size(sum(row["bytes"] for row in rest)), "")
    return table


def _plot(simulation: Simulation, path: Path) -> None:
    try:
        simulation.plot(path)
    except ImportError:
        raise CommandError("--plot needs matplotlib: pip install 'unity-jax[plot]'") from None
    except ValueError as problem:  # a format that matplotlib does not know
        raise CommandError(f"{path}: {problem}") from None
