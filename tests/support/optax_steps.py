"""A training step with an optimizer of optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax


def optax_step(loss: Callable[..., Any], optimizer: optax.GradientTransformation) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a step from weights with the optimizer's state, and a batch, to the next ones, and the loss."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        weights, moments = state
        value, gradient = jax.value_and_grad(loss)(weights, batch)
        updates, moments = optimizer.update(gradient, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    return step
