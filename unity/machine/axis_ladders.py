"""The sets of a machine's axes over which stages and branches may be placed."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from unity.machine.machine import Machine
from unity.pcg.types.axis import Axis


def axis_ladders(machine: Machine) -> Iterator[list[tuple[Axis, ...]]]:
    """Yield lists of sets of axes for stages or groups, by ascending number of devices along them.

    A set has some axes of one level (equal ones are interchangeable), or all axes of outer levels and some of the next.
    """
    outer: tuple[Axis, ...] = ()
    for level in range(len(machine.levels)):
        here = tuple(axis for axis in machine.axes if axis.level == level)
        for before in ((), outer) if outer and here else ((),):
            yield sorted(((*before, *part) for part in _parts(here)), key=lambda axes: prod(axis.size for axis in axes))
        outer += here


def _parts(axes: tuple[Axis, ...]) -> Iterator[tuple[Axis, ...]]:
    """Yield the nonempty selections of a level's axes: any number of each size."""
    counts: list[tuple[Axis, ...]] = [()]
    for size in sorted({axis.size for axis in axes}):
        same = [axis for axis in axes if axis.size == size]
        counts = [(*c, *same[:n]) for c in counts for n in range(len(same) + 1)]
    yield from (tuple(sorted(c, key=axes.index)) for c in counts if c)
