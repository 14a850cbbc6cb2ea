"""How long a call takes on the devices, and how often to repeat what is too short to be timed once."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from typing import Any

import jax

GROWTH = 64  # times as many repetitions at once, at most


def seconds_of(call: Callable[[], Any]) -> float:
    """Seconds from a call to when its results are there."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def repetitions(seconds: Callable[[int], float], run: float, most: int) -> int:
    """How often to repeat something, at most so often, for a run to take about `run` seconds: half of that at least.

    `seconds`: what so many repetitions take, without the call around them.
    """
    times = 1
    while (taken := seconds(times)) < run / 2 and times < most:
        times = min(most, times * max(2, min(GROWTH, ceil(run / max(taken, run / GROWTH)))))
    return times
