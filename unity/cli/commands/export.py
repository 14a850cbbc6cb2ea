"""The command `unity export FILE MODULE:FUNCTION -o FILE`."""

from __future__ import annotations

import argparse
from pathlib import Path

from unity.cli.arguments import add_json
from unity.cli.model import add_plan, model_of
from unity.cli.output import print_json, stage
from unity.export import write

HELP = "write a saved plan as a file of plain JAX"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe `unity export`."""
    command.set_defaults(run=run)
    command.description = (
        "Writes a saved plan as a Python file that needs nothing but JAX: the mesh, a PartitionSpec for every argument, and the "
        "program with its collectives. Anything that cannot be written in this way is refused, and named."
    )
    command.epilog = (
        "examples:\n"
        "  unity export plan.json mymodel:example -o train_sharding.py\n"
        "  unity export plan.json mymodel:example -o train_sharding.py --json"
    )
    add_plan(command)
    command.add_argument("-o", "--output", type=Path, metavar="FILE", required=True, help="the Python file to write")
    add_json(command)


def run(options: argparse.Namespace) -> int:
    """Write a plan as a file of plain JAX."""
    model = model_of(options.model)
    with stage("writing the program"):
        plan = model.plan(options.path)
        files = write(plan, options.output)
    if options.json:
        machine = plan.inspect.machine
        print_json({"name": plan.__name__, "machine": machine.name, "devices": machine.devices, "files": [str(f) for f in files]})
    else:
        print(f"{options.output} does what the plan does, without unity")
    return 0
