"""Machines with fewer levels on which no collective takes longer, so that the fastest strategy there is a bound for all levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from unity.machine.hardware import Level, Protocol
from unity.machine.machine import Machine
from unity.pcg.types.axis import Axis


def joined(machine: Machine, count: int) -> Machine | None:
    """Return a machine of at most `count` levels, its outer ones joined into one, on which no collective takes longer.

    The joined level has the bandwidth of the fastest of its levels, whatever the protocol, and no latency. By the formulas of
    `machine.collectives`, a group of k_1 x k_2 devices on two levels with B_1 <= B_2 takes at least

        (1 - 1/k_2) / B_2 + (1 - 1/k_1) / (k_2 B_1)  >=  (1 - 1/(k_1 k_2)) / B_2

    seconds for each byte. Returns None for a machine whose collectives were measured, since they may be faster than the formulas.
    """
    if any(level.curves or level.relative for level in machine.levels):
        return None
    outer, inner = machine.levels[: len(machine.levels) + 1 - count], machine.levels[len(machine.levels) + 1 - count :]
    if len(outer) < 2:
        return machine
    size, bandwidth = prod(level.size for level in outer), max(level.bandwidth for level in outer)
    level = Level(outer[-1].name, size, bandwidth, latency=0.0, protocols=_fastest(outer, machine.levels))
    return replace(machine, name=f"{machine.name} of {count} levels", levels=(level, *inner), mesh=())


def _fastest(levels: Sequence[Level], among: Sequence[Level]) -> tuple[Protocol, ...]:
    """Return, under the name of each of a machine's protocols, one that waits for nothing; none if the levels have none."""
    trees = {protocol.name for level in levels for protocol in level.protocols if protocol.tree_step is not None}
    names = dict.fromkeys(protocol.name for level in among for protocol in level.protocols)
    fastest = tuple(Protocol(name, 0.0, 0.0, tree_step=0.0 if name in trees else None) for name in names)
    return fastest if any(level.protocols for level in levels) else ()


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
