"""Mesh axes: a machine's devices are a mesh of axes of prime size, each on one level of the network."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A mesh axis. `level` indexes the machine's levels, 0 is the outermost (slowest).

    `reduce_in`: the narrow type whose partial sums are added in that type along this axis (`unity.pcg.types.accumulation`).
    """

    name: str
    size: int
    level: int
    reduce_in: str = ""
