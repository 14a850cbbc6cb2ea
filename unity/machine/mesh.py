"""The user's mesh axes on the levels of a machine.

The devices of a mesh, counted with its last axis fastest, are those of the machine, counted with its innermost level fastest. So on
4 nodes of 8 devices, an axis of 4 in front of one of 8 is the nodes; an axis of 8 in front of one of 4 is the nodes times 2 devices
of each, and the axis of 4 the other devices of a node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from unity.machine.hardware import Level, MachineError, check_count

Extent = tuple[tuple[int, int], ...]  # levels of an axis by number, outermost first, each with the units that the axis joins


def extents_of(sizes: Sequence[int], levels: Sequence[int]) -> list[Extent] | None:
    """Return the levels that each axis of a mesh is on.

    Args:
        sizes: the sizes of the axes, outermost first.
        levels: the sizes of the levels, outermost first, with the same product.

    Returns:
        None if along an axis some groups of devices would be within a unit of a level, and others across units.
    """
    extents: list[Extent] = []
    level, free = len(levels) - 1, levels[-1]
    for size in reversed(sizes):
        extent: list[tuple[int, int]] = []
        while size > 1:
            while free == 1:
                level -= 1
                free = levels[level]
            units = min(size, free)
            if max(size, free) % units:
                return None
            extent.insert(0, (level, units))
            size, free = size // units, free // units
        extents.insert(0, tuple(extent))
    return extents


def check_mesh(machine: str, levels: Sequence[Level], mesh: Sequence[tuple[str, int]]) -> None:
    """Raise MachineError unless a mesh, by names and sizes of its axes, fits the levels of a machine (by name, for messages)."""
    names, sizes = [name for name, _ in mesh], [size for _, size in mesh]
    shape = " × ".join(f"{name}: {size}" for name, size in mesh)
    for name, size in mesh:
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
            raise MachineError(
                f"mesh axis {name!r}: expected a name of letters, digits, '_', '.' and '-'. (docs:"
                " moving#plan-for-a-mesh-of-your-own)"
            )
        check_count(f"mesh axis {name!r}: size", size, "devices")
    if len(set(names)) < len(names):
        raise MachineError(f"the mesh ({shape}) has two axes of one name. (docs: moving#plan-for-a-mesh-of-your-own)")
    own = " > ".join(f"{level.size} {level.name}" for level in levels)
    devices = prod(level.size for level in levels)
    if prod(sizes) != devices:
        raise MachineError(
            f"the mesh ({shape}) has {prod(sizes)} devices, and machine {machine!r} has {devices} ({own}): plan for a machine of as"
            " many, such as machine=unity.Machine.grid(nodes, devices_per_node, ...). (docs: moving#plan-for-a-mesh-of-your-own)"
        )
    if extents_of(sizes, [level.size for level in levels]) is None:
        raise MachineError(
            f"the mesh ({shape}) does not fit the levels of machine {machine!r} ({own}): along an axis, some groups of devices"
            " would be within a unit of a level, and others across units.\n    Choose axes that are whole levels, products of"
            " neighbouring ones, or factors of one, in the order of the levels. (docs: moving#plan-for-a-mesh-of-your-own)"
        )
