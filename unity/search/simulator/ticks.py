"""Times that are added without rounding: multiples of a power of two, and not too many of them."""

from __future__ import annotations

TICKS = 2.0**42  # in a second: one is a fifth of a picosecond
LONGEST = 2.0**10  # seconds: sums of ticks up to twice that have no more than 53 bits


def in_ticks(seconds: float) -> float:
    """The nearest time that is added without rounding."""
    return round(seconds * TICKS) / TICKS


def is_exact(seconds: float) -> bool:
    """Whether a time is added without rounding."""
    return (seconds * TICKS).is_integer()
