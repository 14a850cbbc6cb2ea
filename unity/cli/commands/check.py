"""The command `unity check FILE MODULE:FUNCTION`."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from unity.cli.arguments import add_devices, add_json, use_devices
from unity.cli.model import add_plan, model_of
from unity.cli.output import print_json, stage
from unity.exec.compiled.check import Check, ComparedLine
from unity.plan.plan import Plan

HELP = "compare a saved plan with its compiled program"
AGREES, DIFFERS, WRONG = 0, 1, 2


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe `unity check`."""
    command.set_defaults(run=run, wrong=WRONG)
    command.description = (
        "Replays the derivation of a saved plan, compiles one step of it, and compares the program's collectives, by kind, and its "
        "memory with the plan's; if collectives differ, also by line. Nothing is allocated, but the plan's number of devices must "
        "be present; --devices provides them on a CPU. The exit status is 0 if the collectives agree, 1 if they do not, 2 after an "
        "error."
    )
    command.epilog = (
        "examples:\n  unity check plan.json mymodel:example --devices 8\n  unity check plan.json mymodel:example --forward --json\n"
        "  unity check plan.json mymodel:example --devices 8 --partitioned"
    )
    add_plan(command)
    command.add_argument("--forward", action="store_true", help="compile the forward pass alone")
    command.add_argument("--partitioned", action="store_true", help="compile it for XLA's partitioner, which chooses collectives")
    command.add_argument(
        "--tolerance", type=float, default=0.02, metavar="X", help="fraction of all elements that may differ (default 0.02)"
    )
    add_devices(command)
    add_json(command)


def run(options: argparse.Namespace) -> int:
    """Compile a plan's step and compare it with the plan."""
    use_devices(options.devices)
    model = model_of(options.model)
    with stage("replaying the derivation") as say:
        plan = model.plan(options.path)
        steps = plan.program.check_derivation()
        say("compiling one step")
        check = plan.check(gradient=False if options.forward else None, partitioned=options.partitioned)
    agrees = check.agrees(options.tolerance)
    if options.json:
        print_json(data(plan, check, len(steps), agrees))
    else:
        print(f"{plan}\nits derivation replays: {len(steps)} applications of proved rules\n{check}")
        print(_verdict(check, agrees))
    return AGREES if agrees else DIFFERS


def _verdict(check: Check, agrees: bool) -> str:
    if check.disagreements:
        return "the compiled program may hang: not all devices reach every collective"
    return "the compiled program has the plan's collectives" if agrees else "the compiled program's collectives are others"


def data(plan: Plan, check: Check, steps: int, agrees: bool) -> dict[str, Any]:
    """Return the comparison as data for other tools: elements of collectives, and bytes of memory, on one device."""
    lines: dict[str, tuple[ComparedLine, ...]] = {
        "collectives": (*check.lines, check.total),
        "deviations": check.deviations,
        "memory": check.memory_lines,
    }
    rows = {what: [asdict(line) for line in of] for what, of in lines.items()}
    disagreements = [asdict(disagreement) for disagreement in check.disagreements]
    identity = {"name": plan.__name__, "machine": plan.inspect.machine.name, "derivation": steps}
    return {**identity, "agrees": agrees, "disagreements": disagreements, **rows}
