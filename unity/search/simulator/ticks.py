"""Times that are added without rounding: what takes equally long ends at the same moment, in whatever order its parts are added.

So what is ready at the same moment is taken in the order of names (`tasks`), not in that of roundings.
"""

from __future__ import annotations

TICKS = 2.0**42  # in a second: one is a fifth of a picosecond


def in_ticks(seconds: float) -> float:
    """The nearest time that is added without rounding."""
    return round(seconds * TICKS) / TICKS
