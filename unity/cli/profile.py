"""`unity profile MODULE:FUNCTION`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from unity.search.hardware import MachineError
from unity.search.profiles.store import ProfileError, Store

CONSOLE = Console()
COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
FORM = "expected MODULE:FUNCTION, a function that gives (fn, args) or (fn, args, options of unity.optimize)"


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Describes `unity profile`."""
    command.set_defaults(run=run)
    command.add_argument("model", metavar="MODULE:FUNCTION", help=f"what to measure: {FORM}")
    command.add_argument("--all", action="store_true", help="every operator that a search looks at, not only those of good plans")
    command.add_argument("--devices", type=int, metavar="N", help="virtual devices, where there is no GPU")
    command.add_argument("--save", type=Path, metavar="FILE", help="write the machine with all that was measured, as JSON")


@dataclass(frozen=True)
class Model:
    """What to measure: a function, its arguments, and options of `unity.optimize`."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]


def model_of(which: str) -> Model:
    """Calls the function that the command line names. Raises ProfileError where there is none, or it gives something else."""
    module, colon, name = which.partition(":")
    if not (module and colon and name):
        raise ProfileError(f"{which}: {FORM}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as problem:
        raise ProfileError(f"{which}: {problem}; {FORM}") from None
    if not callable(found):
        raise ProfileError(f"{which} is a {type(found).__name__}; {FORM}")
    given = found()
    if not isinstance(given, tuple) or len(given) not in (2, 3) or not callable(given[0]) or not isinstance(given[1], tuple | list):
        raise ProfileError(f"{which}() gives a {type(given).__name__}; {FORM}")
    options = given[2] if len(given) == 3 else {}
    if not isinstance(options, Mapping):
        raise ProfileError(f"{which}() gives options that are a {type(options).__name__}; {FORM}")
    return Model(given[0], tuple(given[1]), options)


def run(options: argparse.Namespace) -> int:
    """Measures what is missing."""
    import jax

    if options.devices is not None:
        if options.devices < 1:
            raise ProfileError(f"--devices must be a whole number above zero, got {options.devices}")
        jax.config.update("jax_num_cpu_devices", options.devices)
    model = model_of(options.model)
    try:
        devices = jax.devices()
    except RuntimeError as problem:
        raise ProfileError(f"JAX finds no devices to measure on: {problem}") from None
    try:
        return _measure(model, devices, options)
    except MachineError as problem:
        raise ProfileError(str(problem)) from None


def _measure(model: Model, devices: list[Any], options: argparse.Namespace) -> int:
    from unity.profiling import profile
    from unity.search.local import where
    from unity.search.machine import Machine

    store, place, done, failed = Store.usual(), where(devices), 0, 0
    with Progress(*COLUMNS, console=CONSOLE) as progress:
        bar = progress.add_task("planning", total=None)
        for step in profile(model.fn, model.args, model.options, devices, store, options.all):
            if step.task is None:
                progress.reset(bar, description=f"measuring operators, round {step.round + 1}", total=step.count)
                continue
            progress.advance(bar)
            done, failed = done + (not step.problem), failed + bool(step.problem)
            if step.problem:
                progress.print(f"{' '.join(step.task.operator.body.primitives)[:60]}: {step.problem}", markup=False)
    found = store.profile(place)
    failures = f" ({failed} more do not run here)" if failed else ""
    CONSOLE.print(f"{done} operators measured on {place}{failures}; {len(found or ())} are known, in {store.path}", markup=False)
    if options.save:
        Machine.local(devices).with_profile(found).save(options.save)
        CONSOLE.print(f"the machine is in {options.save}: unity.Machine.load reads it anywhere", markup=False)
    return 0
