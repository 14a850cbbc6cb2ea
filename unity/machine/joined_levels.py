"""Machines with fewer levels on which no collective takes longer, so that the fastest strategy there is a bound for all levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from unity.machine.hardware import Level
from unity.machine.machine import Machine
from unity.pcg.types.axis import Axis


def joined(machine: Machine, count: int) -> Machine | None:
    """Return a machine of at most `count` levels, its outer ones joined into one, on which no collective takes longer.

    The joined level has the bandwidth of the fastest of its levels, and no latency. By the formulas of `machine.collectives`, a
    group of k_1 x k_2 devices on two levels with B_1 <= B_2 takes at least

        (1 - 1/k_2) / B_2 + (1 - 1/k_1) / (k_2 B_1)  >=  (1 - 1/(k_1 k_2)) / B_2

    seconds for each byte. Returns None for a machine whose collectives were measured, since they may be faster than the formulas.
    """
    if any(level.curves or level.relative for level in machine.levels):
        return None
    outer, inner = machine.levels[: len(machine.levels) + 1 - count], machine.levels[len(machine.levels) + 1 - count :]
    if len(outer) < 2:
        return machine
    size, bandwidth = prod(level.size for level in outer), max(level.bandwidth for level in outer)
    level = Level(outer[-1].name, size, bandwidth, latency=0.0)
    return replace(machine, name=f"{machine.name} of {count} levels", levels=(level, *inner), mesh=())


def joined_axes(axes: Sequence[Axis], machine: Machine, bound: Machine) -> tuple[Axis, ...]:
    """Return axes of `bound`, a machine with joined levels, that have the sizes on its levels that some axes of `machine` have."""
    left, chosen = [1] * len(bound.levels), list[Axis]()
    for level, units in (part for axis in axes for part in axis.extent):
        left[max(0, level - len(machine.levels) + len(bound.levels))] *= units
    for axis in bound.axes:
        if left[axis.level] % axis.size == 0:
            chosen.append(axis)
            left[axis.level] //= axis.size
    return tuple(chosen)
