"""Timing of calls on devices, repeated where one call is too short."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from typing import Any

import jax

GROWTH = 64  # times as many repetitions at once, at most


def seconds_of(call: Callable[[], Any]) -> float:
    """Return the seconds from a call until its results are ready."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def repetitions(seconds: Callable[[int], float], run: float, most: int) -> int:
    """Return the number of repetitions, at most `most`, with which a run takes about `run` seconds, at least half of that.

    `seconds` maps a number of repetitions to the time that they take, without the call around them.
    """
    times = 1
    while (elapsed := seconds(times)) < run / 2 and times < most:
        times = min(most, times * max(2, min(GROWTH, ceil(run / max(elapsed, run / GROWTH)))))
    return times
