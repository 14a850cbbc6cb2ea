"""Times of programs that take turns, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Times:
    """Seconds of a program in every round: on the wall, and of this process alone (others on the cores do not count)."""

    wall: list[float]
    own: list[float]

    @property
    def median(self) -> float:
        return median(self.wall)


def alternate(runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Times]:
    """Runs every program once in every round, in an order that is drawn anew, after one round that does not count."""
    found = {name: Times([], []) for name in runs}
    rng = np.random.default_rng(0)
    for run in runs.values():
        jax.block_until_ready(run())
    for _ in range(rounds):
        for name in map(str, rng.permutation(sorted(runs))):
            wall, own = time.perf_counter(), time.process_time()
            jax.block_until_ready(runs[name]())
            found[name].wall.append(time.perf_counter() - wall)
            found[name].own.append(time.process_time() - own)
    return found


def ratio(of: Times, to: Times) -> dict[str, Any]:
    """The ratio of two medians, on the wall and of the process alone; and the quartiles of the rounds' own ratios."""
    low, high = np.quantile(np.array(of.wall) / np.array(to.wall), [0.25, 0.75])
    return {"ratio": of.median / to.median, "own ratio": median(of.own) / median(to.own), "quartiles": f"{low:.2f} to {high:.2f}"}
