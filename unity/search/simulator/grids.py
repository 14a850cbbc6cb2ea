"""Numbers in a grid, row by row: pieces of an operator, devices of a mesh."""

from __future__ import annotations

from functools import cache
from math import prod

import numpy as np


@cache
def groups(sizes: tuple[int, ...], over: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The numbers of a grid of these sizes in groups: those of a group differ along the dimensions `over` alone."""
    rest = [k for k in range(len(sizes)) if k not in over]
    grid = np.arange(prod(sizes)).reshape(sizes).transpose(*rest, *over)
    return tuple(map(tuple, grid.reshape(-1, prod(sizes[k] for k in over)).tolist()))
