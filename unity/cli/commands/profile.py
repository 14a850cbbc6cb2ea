"""The command `unity profile MODULE:FUNCTION`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from unity.cli.arguments import add_devices, add_json, use_devices
from unity.cli.model import Model, add_model, model_of
from unity.cli.output import print_json, progress
from unity.exec.measure.local_machine import where
from unity.machine.machine import Machine
from unity.machine.profiles.store import ProfileError, Store
from unity.profiling import profile

HELP = "measure a model's operators on the present devices"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describe `unity profile`."""
    command.set_defaults(run=run)
    command.description = (
        "Measures the operators that good plans of a model consist of, on the present devices. Measurements are kept in the user's "
        "cache folder, and plans for this machine use them. An interrupted run continues where it stopped."
    )
    command.epilog = (
        "examples:\n  unity profile mymodel:example\n  unity profile mymodel:example --all --devices 8 --save machine.json"
    )
    add_model(command, "what to measure")
    command.add_argument("--all", action="store_true", help="every operator that a search considers, not only those of good plans")
    add_devices(command)
    command.add_argument("--save", type=Path, metavar="FILE", help="write the machine with all measurements, as JSON")
    add_json(command)


def run(options: argparse.Namespace) -> int:
    """Measure the operators that are not measured yet."""
    use_devices(options.devices)
    model = model_of(options.model)
    try:
        devices = jax.devices()
    except RuntimeError as problem:
        raise ProfileError(f"JAX finds no devices to measure on: {problem}") from None
    return _measure(model, devices, options)


def _measure(model: Model, devices: list[Any], options: argparse.Namespace) -> int:
    store, place, done, failed = Store.usual(), where(devices), 0, 0
    with progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bars:
        bar = bars.add_task("planning", total=None)
        for step in profile(model.fn, model.args, model.options, devices, store, options.all):
            if step.task is None:
                bars.reset(bar, description=f"measuring operators, round {step.round + 1}", total=step.count)
                continue
            bars.advance(bar)
            done, failed = done + (not step.problem), failed + bool(step.problem)
            if step.problem:
                bars.console.print(f"{' '.join(step.task.operator.body.primitives)[:60]}: {step.problem}", markup=False)
    all_measured = store.profile(place)
    if options.save:
        Machine.local(devices).with_profile(all_measured).save(options.save)
    if options.json:
        print_json(
            {"measured": done, "failed": failed, "known": len(all_measured or ()), "on": str(place), "store": str(store.path)}
        )
        return 0
    failures = f" ({failed} more do not run here)" if failed else ""
    print(f"{done} operators measured on {place}{failures}; {len(all_measured or ())} are known, in {store.path}")
    if options.save:
        print(f"the machine is in {options.save}: unity.Machine.load and --machine read it anywhere")
    return 0
