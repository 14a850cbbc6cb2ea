"""Mesh axes: a machine's devices form a mesh of axes of prime size, each on one level of the network, or a mesh of the user's."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from unity.base.documents import Natural, Positive, Record


class Axis(Record, array_like=True):
    """A mesh axis.

    Attributes:
        name: the first letter of its level's name and a number, such as "d0", or the user's name.
        size: a prime, or any size of the user's.
        level: an index into the machine's levels; 0 is the outermost (slowest). An axis on several levels has its outermost one.
        reduce_in: the narrow type whose partial sums are added in that type along this axis (`unity.pcg.types.accumulation`).
        inner: for an axis on several levels, the further ones, each with the number of its units that the axis joins.
    """

    name: str
    size: Positive
    level: Natural
    reduce_in: str = ""
    inner: tuple[tuple[Natural, Positive], ...] = ()

    @property
    def extent(self) -> tuple[tuple[int, int], ...]:
        """The levels of the axis, outermost first, each with the number of its units that the axis joins.

        Axes of equal extent are interchangeable.
        """
        return ((self.level, self.size // prod(units for _, units in self.inner)), *self.inner)


class LevelPart(Axis, array_like=True):
    """An axis that users see as a part of a level of the machine (`unity.pcg.parallel.axis_names`).

    Attributes:
        whole: the name of the level.
        whole_size: the size of the level.
    """

    whole: str = ""
    whole_size: Positive = 1


def joined_names(axes: Iterable[Axis], marks: Iterable[tuple[str, str]] | None = None) -> list[str]:
    """Return the names of axes, with the name of a level in place of those of all its parts.

    Args:
        axes: the axes.
        marks: texts before and after the name of each axis. Parts with equal texts are joined.
    """
    axes = list(axes)
    around = [("", "")] * len(axes) if marks is None else list(marks)
    sizes: dict[tuple[str, tuple[str, str]], int] = {}
    for axis, mark in zip(axes, around, strict=True):
        if isinstance(axis, LevelPart):
            sizes[axis.whole, mark] = sizes.get((axis.whole, mark), 1) * axis.size
    names = []
    for axis, mark in zip(axes, around, strict=True):
        name = axis.name
        if isinstance(axis, LevelPart) and sizes[axis.whole, mark] == axis.whole_size:
            name = axis.whole
        names.append(f"{mark[0]}{name}{mark[1]}")
    return list(dict.fromkeys(names))
