"""Plans of one function, run in turns on the devices that are there: which one is faster is not left to a model of costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from unity.base.processes import agreed
from unity.exec.compiled.check import compile_step
from unity.exec.hosts.arrays import place

if TYPE_CHECKING:
    from unity.plan.plan import Plan

ROUNDS = 7
SHORT = 0.02  # seconds that a round takes at least


def ratio(one: Plan, other: Plan, gradient: bool) -> float:
    """How many times as long a step of one takes as one of the other: the median of rounds in which both run."""
    rounds = _rounds([one, other], gradient)
    return median(a / b for a, b in rounds)


def relative(plans: Sequence[Plan], gradient: bool) -> list[float]:
    """Seconds of a step of each plan, as they compare in rounds in which all run: multiples of the first one's median."""
    rounds = _rounds(plans, gradient)
    first = median(r[0] for r in rounds)
    return [first * median(r[k] / r[0] for r in rounds) for k in range(len(plans))]


def _rounds(plans: Sequence[Plan], gradient: bool) -> list[list[float]]:
    """Seconds of a step of each plan, round by round."""
    steps = [_step(plan, gradient) for plan in plans]
    counts = [max(1, round(SHORT / max(_seconds(step, 1), 1e-6))) for step in steps]
    return [[_seconds(step, n) / n for step, n in zip(steps, counts, strict=True)] for _ in range(ROUNDS)]


def _step(plan: Plan, gradient: bool) -> Callable[[], Any]:
    """A compiled step on arguments of its own, run once."""
    step = compile_step(plan, gradient)
    leaves = [
        place(_something(n.tensors[0].struct, k), s)
        for k, (n, s) in enumerate(zip(plan.serial.inputs, plan._shardings, strict=True))
    ]
    groups = _as_compiled(plan, leaves, gradient)
    jax.block_until_ready(step(*groups))
    return lambda: step(*groups)


def _as_compiled(plan: Plan, leaves: Sequence[Any], gradient: bool) -> list:
    """The arguments as `compile_step` takes them: the weights apart, where gradients are taken."""
    if not gradient:
        return list(leaves)
    captured = plan._made.captured
    weights = sorted(k for k in captured.differentiated if plan.serial.inputs[k].tensors[0].floating)
    return [[leaves[k] for k in weights], [x for k, x in enumerate(leaves) if k not in weights]]


def _something(struct: jax.ShapeDtypeStruct, seed: int) -> Any:
    """Small numbers; zeros where they are indices or keys."""
    if jnp.issubdtype(struct.dtype, jnp.floating):
        return jnp.asarray(np.random.default_rng(seed).normal(size=struct.shape) / 8, struct.dtype)
    return jax.random.key(0) if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key) else jnp.zeros(struct.shape, struct.dtype)


def _seconds(step: Callable[[], Any], times: int) -> float:
    """Seconds of so many steps: of several processes the first one's, so that all go on alike."""
    started = time.perf_counter()
    jax.block_until_ready([step() for _ in range(times)])
    return agreed(time.perf_counter() - started)
