"""Times that are added without rounding: what takes equally long ends at the same moment, in whatever order its parts are added.

What ends at the same moment is simulated together (`schedule`), so pieces that are alike cost less than pieces that are not.
"""

from __future__ import annotations

from collections.abc import Iterable

TICKS = 2.0**42  # in a second: one is a fifth of a picosecond
MOST = 2.0**11  # seconds; sums up to this have no more than 53 bits


def in_ticks(seconds: float) -> float:
    """The nearest time that is added without rounding."""
    return round(seconds * TICKS) / TICKS


def exact(seconds: Iterable[float]) -> bool:
    """Whether all are such times."""
    return all((s * TICKS).is_integer() for s in seconds)
