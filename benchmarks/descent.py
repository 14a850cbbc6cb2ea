"""A step of gradient descent, as the benchmarks train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def step_of(fn: Callable[..., Any], rate: float) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    """Weights and samples to new weights and the loss of `fn(weights, samples)` before."""

    @jax.jit
    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, gradient = jax.value_and_grad(fn)(params, batch)
        return jax.tree.map(lambda p, g: p - rate * g, params, gradient), value

    return step
