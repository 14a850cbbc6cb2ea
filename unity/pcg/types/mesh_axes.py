"""Correspondence between a user's mesh and a machine: each axis of the mesh as a product of the machine's axes.

Axes are matched by name and size if all of them agree, or else by size, from the outermost inwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity.pcg.types.axis import Axis

MeshAxes = Mapping[str, tuple[int, ...]]  # from the name of a mesh axis to the positions of the machine's axes that make it up


def mesh_axes(sizes: Mapping[str, int], axes: Sequence[Axis]) -> MeshAxes | None:
    """Return the machine's axes that make up each axis of a mesh, or None if the sizes do not fit.

    Args:
        sizes: the sizes of the mesh's axes, outermost first.
        axes: the axes of the machine, outermost first. The order of those of one level is free; so is that of axes of equal names
            and sizes.
    """
    own = {axis.name: axis.size for axis in axes}
    if {name: size for name, size in sizes.items() if size > 1} == own:
        position = {axis.name: k for k, axis in enumerate(axes)}
        return {name: (position[name],) if size > 1 else () for name, size in sizes.items()}
    left, matched = list(range(len(axes))), dict[str, tuple[int, ...]]()
    for name, size in sizes.items():
        parts = list[int]()
        while size > 1:
            position = next((k for k in left if axes[k].level == axes[left[0]].level and size % axes[k].size == 0), None)
            if position is None:
                return None
            left.remove(position)
            parts.append(position)
            size //= axes[position].size
        matched[name] = tuple(parts)
    return None if left else matched


def sliced(over: Sequence[int], names: MeshAxes) -> tuple[str, ...]:
    """Return the mesh axes that slice a dimension as a plan does, or into fewer slices if mesh axes are too large for that.

    Args:
        over: the machine's axes that slice the dimension, by position, outermost first.
        names: the machine's axes that make up each axis of the mesh.
    """
    chosen, left = list[str](), tuple(over)
    for name, parts in names.items():
        if parts and left[: len(parts)] == parts:
            chosen.append(name)
            left = left[len(parts) :]
    return tuple(chosen)
