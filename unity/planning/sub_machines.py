"""The parts of a machine on which a plan for the fewest devices may run."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from unity.machine.machine import Machine


def sub_machines(machine: Machine) -> list[Machine]:
    """Return the parts of a machine, smallest first and itself last, in which inner levels fill up before outer ones are used."""
    sizes = [level.size for level in machine.levels]
    parts = {}  # sizes of the levels by number of devices
    for k in range(len(sizes)):
        for n in range(1, sizes[k] + 1):
            if sizes[k] % n == 0:
                part = [1] * k + [n] + sizes[k + 1 :]
                parts.setdefault(prod(part), part)
    return [
        replace(machine, name=f"{machine.name} ({n} devices)" if n < machine.devices else machine.name,
                levels=tuple(replace(level, size=units) for level, units in zip(machine.levels, part, strict=True)))
        for n, part in sorted(parts.items())
    ]  # fmt: skip
