"""The command `unity optimize MODULE:FUNCTION`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from unity.base.errors import UnityError
from unity.base.formatting import duration, size
from unity.cli.arguments import (
    MACHINES,
    add_devices,
    add_json,
    budget,
    groups,
    machine,
    mesh,
    micro_batches,
    nbytes,
    pipeline,
    positions,
    slots,
    use_devices,
)
from unity.cli.errors import CommandError
from unity.cli.model import Model, add_model, model_of
from unity.cli.output import print_json, stage
from unity.optimize import OPTION_NAMES, optimize
from unity.plan.plan import Plan
from unity.plan.undivided import headline, undivided
from unity.planning.options import OBJECTIVES, SEARCHES

HELP = "find the best plan for a model, and save it"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe `unity optimize`."""
    command.set_defaults(run=run)
    command.description = (
        "Captures a model's step, searches for the best way to split it over the devices of a machine, and saves the plan. "
        "Nothing is allocated, and the machine need not be present. Options given here override the model's own. "
        "The exit status is 1 if no plan fits into the memory."
    )
    command.epilog = (
        "examples:\n"
        "  unity optimize mymodel:example -o plan.json\n"
        "  unity optimize mymodel:example --machine a100-4x8 --memory 30GB --frontier\n"
        "  unity optimize mymodel:example --machine dgx-h100 --objective devices --budget 60s --json"
    )
    add_model(command, "what to plan")
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help="save the plan")
    command.add_argument("--frontier", action="store_true", help="search the frontier of time and memory; print and save it too")
    add_json(command)
    add_devices(command)
    group = command.add_argument_group("options of unity.optimize", argument_default=argparse.SUPPRESS)
    group.add_argument("--machine", type=machine, metavar="NAME", help=f"what to plan for: {MACHINES}")
    group.add_argument("--mesh", type=mesh, metavar="AXES", help="a mesh of your own, outermost axis first: data=4,tensor=8")
    group.add_argument(
        "--memory", type=nbytes, dest="memory_limit", metavar="SIZE", help="the memory that a device may use: 16GB, 40GiB"
    )
    group.add_argument("--objective", choices=OBJECTIVES, help="the fastest that fits, the fewest devices, or the leanest")
    group.add_argument("--search", choices=SEARCHES, metavar="NAME", help=f"the algorithm: {', '.join(SEARCHES)}")
    group.add_argument("--budget", type=budget, metavar="N", help="how long to search: programs (500) or seconds (30s)")
    group.add_argument("--rules", type=Path, metavar="FILE", help="the library of rules that may be used")
    group.add_argument("--slots", type=slots, dest="optimizer_slots", metavar="N", help="optimizer's values per weight")
    group.add_argument("--forward", action="store_false", dest="training", help="plan the forward pass alone")
    group.add_argument("--argnums", type=positions, metavar="N,…", help="the arguments that are differentiated (default 0)")
    group.add_argument(
        "--pipelines", type=pipeline, dest="pipeline", metavar="SxM", help="a pipeline of S stages and M micro-batches; or none"
    )
    group.add_argument(
        "--branches", type=groups, dest="branch_groups", metavar="N", help="branches on N groups of devices; or none"
    )
    group.add_argument("--pack", action="store_true", help="pack weights: those of branches on their devices, joined ones once")
    group.add_argument("--padding", action="store_true", help="pad dimensions that the devices do not divide, where it is better")
    group.add_argument("--no-recompute", action="store_false", dest="recompute", help="recompute no layers where nothing fits")
    group.add_argument("--offload", action="store_true", help="offload products of recomputed layers and optimizer state")
    group.add_argument(
        "--micro-batches", type=micro_batches, metavar="N", help="the loss in N micro-batches; or auto, if memory asks for it"
    )
    group.add_argument("--seed", type=int, metavar="N", help="the seed of random searches")
    group.add_argument("--measure", action="store_true", help="run the best plans on the devices here, and take the fastest")


def run(options: argparse.Namespace) -> int:
    """Plan a model, save the plan, and print it in short."""
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise CommandError(
            f"{options.output} cannot be written: there is no folder {options.output.parent}"
        )  # checked before the search
    use_devices(options.devices)
    plan = plan_of(options.model, model_of(options.model), options_of(options))
    if options.frontier:
        with stage("searching the frontier"):
            _ = plan.frontier  # computed here, so that it is saved too
    if options.output is not None:
        with stage("saving the plan"):
            plan.files.save(options.output)
    if options.json:
        print_json(data(plan, options.output, options.frontier))
    else:
        print(in_words(plan, options.output))
        if options.frontier:
            print(plan.frontier)
    return 0


def options_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `unity.optimize` that are on the command line."""
    specified = {name: value for name, value in vars(options).items() if name in OPTION_NAMES}
    if "pipeline" in options:
        specified |= {"pipelines": options.pipeline is not None, "pipeline": options.pipeline}
    if "branch_groups" in options:
        specified |= {"branches": options.branch_groups is not None, "branch_groups": options.branch_groups}
    if "budget" in options:
        is_count = isinstance(options.budget, int)
        specified |= {"budget": options.budget, "seconds": None} if is_count else {"budget": None, "seconds": options.budget}
    return specified


def plan_of(which: str, model: Model, options: dict[str, Any]) -> Plan:
    """Return the plan of a model.

    Args:
        which: MODULE:FUNCTION, for error messages.
        model: the model.
        options: options of `unity.optimize`, which override the model's own.

    Raises:
        CommandError: the user's function raised an exception.
    """
    try:
        return optimize(model.fn, *model.args, **{**model.options, **options})
    except UnityError:
        raise
    except Exception as problem:
        if notes := getattr(problem, "__notes__", ()):  # unity notes that the error is in the user's function
            raise CommandError("\n    ".join((f"{which}: {type(problem).__name__}: {problem}", *notes))) from problem
        raise


def in_words(plan: Plan, path: Path | None) -> str:
    """Return a plan in a few lines."""
    lines = [
        f"{plan.__name__} on {plan.inspect.machine.described(plan.program.computed_dtypes)}",
        f"{duration(plan.time)} a step, {size(plan.memory)} on each device (predicted); {plan.program.family.searched}",
    ]
    lines += (t.described(plan.program.axis_names) for t in plan.program.transformations)
    if whole := undivided(plan.program):
        lines.append(f"{headline(whole)}; `unity explain` says where")
    return "\n".join([*lines, *([f"saved in {path}"] if path is not None else [])])


def data(plan: Plan, path: Path | None, frontier: bool) -> dict[str, Any]:
    """Return a plan in short as data for other tools."""
    loops = plan.program.loop_rewriting
    result = {
        "name": plan.__name__,
        "machine": plan.inspect.machine.name,
        "devices": plan.inspect.machine.devices,
        "time": plan.time,
        "memory": plan.memory,
        "search_seconds": plan.inspect.search_seconds,
        "interrupted": plan.program.family.interrupted,
        "recomputed": None if plan.program.recomputing is None else str(plan.program.recomputing),
        "rules": {str(way): times for way, times in plan.program.rewriting.applied},
        "loop_rules": {rule.name: times for rule, times in loops.applied.items()} if loops is not None else {},
        "micro_batches": None if plan.program.micro_batching is None else str(plan.program.micro_batching),
        "pipeline": None if plan.program.pipelining is None else str(plan.program.pipelining),
        "branches": None if plan.program.branching is None else str(plan.program.branching),
        "file": None if path is None else str(path),
    }
    return result | ({"frontier": [{"time": p.time, "memory": p.memory} for p in plan.frontier]} if frontier else {})
