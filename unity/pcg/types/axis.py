"""Mesh axes: the devices of a machine form a mesh of axes of prime size, each on one level of the network."""

from __future__ import annotations

from unity.base.documents import Natural, Positive, Record


class Axis(Record, array_like=True):
    """A mesh axis.

    Attributes:
        name: the first letter of its level's name and a number, such as "d0".
        size: a prime.
        level: an index into the machine's levels; 0 is the outermost (slowest).
        reduce_in: the narrow type whose partial sums are added in that type along this axis (`unity.pcg.types.accumulation`).
    """

    name: str
    size: Positive
    level: Natural
    reduce_in: str = ""
