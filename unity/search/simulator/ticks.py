"""Times that are added without rounding: what takes equally long ends at the same moment, in whatever order its parts are added.

So what is ready at the same moment is taken in the order of names (`tasks`), not in that of roundings.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", float, NDArray[np.float64])

TICKS = 2.0**42  # in a second: one is a fifth of a picosecond


def in_ticks(seconds: F) -> F:
    """The nearest times that are added without rounding."""
    return np.rint(seconds * TICKS) / TICKS  # pyright: ignore[reportReturnType]


def added_exactly(total: float) -> bool:
    """Whether times that are whole numbers of ticks, `total` in all, are added without rounding, in whatever order."""
    return total < 2.0**53 / TICKS
