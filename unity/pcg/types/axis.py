"""Mesh axes: a machine's devices form a mesh of axes of prime size, each on one level of the network, or a mesh of the user's."""

from __future__ import annotations

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
