"""Times of programs that take turns, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import jax
import numpy as np


def alternate(
    runs: Mapping[str, Callable[[], Any]], rounds: int, least: float = 0.02, warm: bool = True
) -> dict[str, list[float]]:
    """Seconds of every run in every round. The order is drawn anew each round; a run shorter than `least` is repeated."""
    if warm:
        for run in runs.values():
            jax.block_until_ready(run())
    counts = {name: max(1, round(least / seconds(run, 1))) if warm else 1 for name, run in runs.items()}
    found: dict[str, list[float]] = {name: [] for name in runs}
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for name in rng.permutation(sorted(runs)):
            found[str(name)].append(seconds(runs[str(name)], counts[str(name)]))
    return found


def seconds(run: Callable[[], Any], count: int) -> float:
    """Seconds of one of `count` runs."""
    start = time.perf_counter()
    for _ in range(count):
        jax.block_until_ready(run())
    return (time.perf_counter() - start) / count


def ratio(times: Mapping[str, list[float]], of: str, to: str) -> dict[str, float]:
    """The ratio of two medians, and the quartiles of the rounds' own ratios."""
    each = np.array(times[of]) / np.array(times[to])
    low, high = np.quantile(each, [0.25, 0.75])
    return {"ratio": median(times[of]) / median(times[to]), "quartile 1": float(low), "quartile 3": float(high)}
