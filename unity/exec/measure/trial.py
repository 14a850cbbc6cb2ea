"""Step times of several plans of one function, compared by running them in turns on the devices of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unity.base.processes import agreed
from unity.exec.hosts.arrays import place
from unity.exec.planned_step import PlannedStep

ROUNDS = 7
SHORTEST_ROUND = 0.02  # seconds


def ratio(one: PlannedStep, other: PlannedStep) -> float:
    """Return the time of one step divided by that of another: the median over rounds in which both run."""
    return median(a / b for a, b in _rounds([one, other]))


def relative(steps: Sequence[PlannedStep]) -> list[float]:
    """Return the seconds of each step, as multiples of the first one's median.

    The multiples are medians over rounds in which all steps run, so that drift of the machine's speed cancels.
    """
    rounds = _rounds(steps)
    first = median(seconds[0] for seconds in rounds)
    return [first * median(seconds[k] / seconds[0] for seconds in rounds) for k in range(len(steps))]


def _rounds(steps: Sequence[PlannedStep]) -> list[list[float]]:
    """Return the seconds of each step, round by round."""
    runs = [_prepare(step) for step in steps]
    repeats = [max(1, round(SHORTEST_ROUND / max(_seconds(run, 1), 1e-6))) for run in runs]
    return [[_seconds(run, n) / n for run, n in zip(runs, repeats, strict=True)] for _ in range(ROUNDS)]


def _prepare(step: PlannedStep) -> Callable[[], Any]:
    """Return a call of the compiled step on example arguments, after a first run."""
    compiled = step.compile()
    tensors = [n.tensors[0] for n in step.graph.inputs]
    leaves = [place(_example(t.struct, seed), s) for seed, (t, s) in enumerate(zip(tensors, step.shardings, strict=True))]
    arguments = step.grouped(leaves)
    jax.block_until_ready(compiled(*arguments))
    return lambda: compiled(*arguments)


def _example(struct: jax.ShapeDtypeStruct, seed: int) -> Any:
    """Return small random numbers for floating types, a key for keys, and zeros for indices."""
    if jnp.issubdtype(struct.dtype, jnp.floating):
        return jnp.asarray(np.random.default_rng(seed).normal(size=struct.shape) / 8, struct.dtype)
    return jax.random.key(0) if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key) else jnp.zeros(struct.shape, struct.dtype)


def _seconds(run: Callable[[], Any], times: int) -> float:
    """Return the seconds that `times` runs take, by the clock of the first process, so that all processes decide alike."""
    started = time.perf_counter()
    jax.block_until_ready([run() for _ in range(times)])
    return agreed(time.perf_counter() - started)
