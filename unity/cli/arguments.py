"""Options that several commands share, and the conversions of their values from text."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import jax
from jax.sharding import AbstractMesh

from unity.base.errors import file_fault
from unity.cli.errors import CommandError
from unity.machine.hardware import MachineError
from unity.machine.machine import Machine
from unity.machine.presets import CLUSTERS, DEVICES
from unity.plan.further_options import PipelineShape

UNITS = {"": 1, "b": 1} | {f"{k}{end}": one**n for end, one in (("b", 1000), ("ib", 1024)) for n, k in enumerate("kmgt", 1)}
LOCAL = "local"
MACHINES = (
    f"{LOCAL} (the devices of this computer, measured once), a cluster (dgx-h100, dgx-h100-4x8), nodes x devices of a kind of "
    "device (v100-4x8), or a file that Machine.save or `unity machine` wrote; `unity machine list` names all"
)


def add_json(command: argparse.ArgumentParser) -> None:
    """Add the option `--json`."""
    command.add_argument("--json", action="store_true", help="print data for other tools (JSON) instead of text")


def add_devices(command: argparse.ArgumentParser) -> None:
    """Add the option `--devices`."""
    command.add_argument("--devices", type=count, metavar="N", help="virtual devices, where there is no GPU")


def use_devices(number: int | None) -> None:
    """Make JAX provide virtual CPU devices. Raises CommandError if JAX has already started with another number of devices."""
    if number is None:
        return
    try:
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError:  # the number is fixed once JAX has started, as it has where `main` is called in a notebook
        present = jax.device_count()
        if present != number:
            raise CommandError(
                f"--devices {number}: JAX has already started, with {present} devices; run the command in a new process, or leave"
                " --devices out to use these"
            ) from None


def count(text: str) -> int:
    """Parse a positive integer."""
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected a whole number above zero, got {text}")
    return int(text)


def nbytes(text: str) -> float:
    """Parse a number of bytes, such as 16GB, 40GiB, 512MB or 1e9."""
    quantity = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    if quantity is None or quantity[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"expected bytes, such as 16GB, 40GiB or 1e9, got {text}")
    return float(quantity[1]) * UNITS[quantity[2]]


def growth(text: str) -> float:
    """Parse a growth in percent, such as 5% or 0.5%, as a fraction."""
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if percent is None:
        raise argparse.ArgumentTypeError(f"expected a growth in percent that is not negative, such as 5% or 0.5%, got {text}")
    return float(percent[1]) / 100


def budget(text: str) -> int | float:
    """Parse a search budget: a number of programs (500, an int), or seconds (30s, a float)."""
    amount = re.fullmatch(r"(\d+)|(\d+(?:\.\d*)?)s", text)
    if amount is None:
        raise argparse.ArgumentTypeError(f"expected a number of programs (500) or seconds (30s), got {text}")
    return int(amount[1]) if amount[1] else float(amount[2])


def slots(text: str) -> int | float:
    """Parse the number of an optimizer's values per weight, which may be a fraction (2, 2.5)."""
    if not re.fullmatch(r"\d+(?:\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"expected a number that is not negative, such as 2 or 2.5, got {text}")
    return float(text) if "." in text else int(text)


def pipeline(text: str) -> PipelineShape | None:
    """Parse a pipeline: stages and micro-batches (4x16), perhaps with a schedule (4x16:gpipe), or None for "none"."""
    shape = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?::(\w+))?", text)
    if shape is None and text != "none":
        raise argparse.ArgumentTypeError(f"expected stages and micro-batches, such as 4x16 or 4x16:gpipe, or none, got {text}")
    return None if shape is None else PipelineShape(int(shape[1]), int(shape[2]), shape[3])


def groups(text: str) -> int | None:
    """Parse the number of device groups for branches, or None for "none"."""
    if text != "none" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of groups of devices, such as 2, or none, got {text}")
    return None if text == "none" else int(text)


def micro_batches(text: str) -> int | bool:
    """Parse a number of micro-batches, or "auto" as True."""
    if text != "auto" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of micro-batches, such as 8, or auto, got {text}")
    return True if text == "auto" else int(text)


def positions(text: str) -> int | tuple[int, ...]:
    """Parse argument positions: 0, or 0,2."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers of arguments, such as 0 or 0,1, got {text}") from None
    return numbers[0] if len(numbers) == 1 else numbers


def machine(text: str) -> Machine | None:
    """Return a machine by name or from a file, or None for the local machine, which `unity.optimize` looks up itself."""
    return None if text == LOCAL else named_machine(text)


def mesh(text: str) -> AbstractMesh:
    """Parse the axes of a mesh, such as data=4,tensor=8."""
    axes = [re.fullmatch(r"([^=,]+)=([1-9]\d*)", part) for part in text.split(",")]
    named = {axis[1]: int(axis[2]) for axis in axes if axis is not None}
    if len(named) < len(axes):
        raise argparse.ArgumentTypeError(f"expected different names of axes with sizes, such as data=4,tensor=8, got {text}")
    return AbstractMesh(tuple(named.values()), tuple(named))


def named_machine(text: str) -> Machine:
    """Return a machine by the name of a cluster or a kind of device, or from a file."""
    grid = re.fullmatch(r"(.+)-([1-9]\d*)x([1-9]\d*)", text)
    try:
        if grid and grid[1] in DEVICES:
            return Machine.grid(int(grid[2]), int(grid[3]), grid[1])
        if text.endswith(".json") or Path(text).is_file():
            return _machine_in(text)
        if grid or text in CLUSTERS:
            return Machine.preset(text)
    except MachineError as problem:
        raise argparse.ArgumentTypeError(f"{text}: {problem.reason}") from None
    raise argparse.ArgumentTypeError(
        f"no machine is named {text}; expected {LOCAL}, a cluster ({', '.join(sorted(CLUSTERS))}), NODESxDEVICES of a kind of "
        f"device ({', '.join(f'{name}-1x8' for name in sorted(DEVICES))}), or a file"
    )


def _machine_in(path: str) -> Machine:
    """Return the machine in a file, which messages name once."""
    try:
        return Machine.load(path)
    except MachineError as problem:
        raise argparse.ArgumentTypeError(problem.reason) from None
    except OSError as problem:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {file_fault(problem)}") from None
