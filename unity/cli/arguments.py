"""Arguments that several commands have, and how their values are written."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from unity.machine.hardware import MachineError
from unity.machine.machine import Machine
from unity.machine.presets import CLUSTERS, DEVICES

UNITS = {"": 1, "b": 1} | {f"{k}{end}": one**n for end, one in (("b", 1000), ("ib", 1024)) for n, k in enumerate("kmgt", 1)}
HERE = "local"
MACHINES = (
    f"{HERE} (the devices of this computer, measured once), a cluster (dgx-h100, dgx-h100-4x8), nodes x devices of a kind of "
    "device (v100-4x8), or a file that Machine.save or `unity machine` wrote; `unity machine list` names all"
)


def add_json(command: argparse.ArgumentParser) -> None:
    """Adds `--json`."""
    command.add_argument("--json", action="store_true", help="print data for other tools (JSON) instead of text")


def add_devices(command: argparse.ArgumentParser) -> None:
    """Adds `--devices`."""
    command.add_argument("--devices", type=count, metavar="N", help="virtual devices, where there is no GPU")


def use_devices(number: int | None) -> None:
    """Asks JAX for virtual devices. To be called before anything looks at the devices."""
    import jax

    if number is not None:
        jax.config.update("jax_num_cpu_devices", number)


def count(text: str) -> int:
    """A whole number above zero."""
    if not re.fullmatch(r"0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"expected a whole number above zero, got {text}")
    return int(text)


def nbytes(text: str) -> float:
    """A number of bytes: 16GB, 40GiB, 512MB, 1e9."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"expected bytes, such as 16GB, 40GiB or 1e9, got {text}")
    return float(found[1]) * UNITS[found[2]]


def budget(text: str) -> int | float:
    """How long to look: a number of programs (500), or seconds (30s)."""
    found = re.fullmatch(r"(\d+)|(\d+(?:\.\d*)?)s", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a number of programs (500) or seconds (30s), got {text}")
    return int(found[1]) if found[1] else float(found[2])


def stages(text: str) -> bool | tuple[int, int] | tuple[int, int, str]:
    """Pipelines: "none", or one of so many stages and micro-batches (4x16), and its schedule (4x16:gpipe)."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?::(\w+))?", text)
    if found is None and text != "none":
        raise argparse.ArgumentTypeError(f"expected stages and micro-batches, such as 4x16 or 4x16:gpipe, or none, got {text}")
    if found is None:
        return False
    numbers = (int(found[1]), int(found[2]))
    return (*numbers, found[3]) if found[3] else numbers


def groups(text: str) -> bool | int:
    """Branches: "none", or on so many groups of devices."""
    if text != "none" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of groups of devices, such as 2, or none, got {text}")
    return False if text == "none" else int(text)


def positions(text: str) -> int | tuple[int, ...]:
    """Arguments by number: 0, or 0,2."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers of arguments, such as 0 or 0,1, got {text}") from None
    return found[0] if len(found) == 1 else found


def machine(text: str) -> Machine | None:
    """A machine by name or file; nothing for the one that is here, which `unity.optimize` finds itself."""
    return None if text == HERE else described(text)


def described(text: str) -> Machine:
    """A machine by the name of a cluster or a kind of device, or from a file."""
    grid = re.fullmatch(r"(.+)-([1-9]\d*)x([1-9]\d*)", text)
    try:
        if grid and grid[1] in DEVICES:
            return Machine.grid(int(grid[2]), int(grid[3]), grid[1])
        if text.endswith(".json") or Path(text).is_file():
            return Machine.load(text)
        if grid or text in CLUSTERS:
            return Machine.preset(text)
    except MachineError as problem:
        raise argparse.ArgumentTypeError(f"{text}: {problem.reason}") from None
    except OSError as problem:
        raise argparse.ArgumentTypeError(f"{text}: {problem}") from None
    raise argparse.ArgumentTypeError(
        f"no machine is named {text}; expected {HERE}, a cluster ({', '.join(sorted(CLUSTERS))}), NODESxDEVICES of a kind of "
        f"device ({', '.join(f'{name}-1x8' for name in sorted(DEVICES))}), or a file"
    )


def values(options: argparse.Namespace, names: Any) -> dict[str, Any]:
    """Of a command line, the options of these names that were given (their default is `argparse.SUPPRESS`)."""
    return {name: value for name, value in vars(options).items() if name in names}
