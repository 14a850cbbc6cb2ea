"""Random small functions of a batch and a few weights, for laws that must hold whatever the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import strategies as st

B, D = 8, 16
OPERATIONS = ("dense", "bias", "relu", "residual", "softmax", "mean", "turn", "halves", "gate", "scores")


@dataclass(frozen=True)
class Function:
    """A loss over weights and a batch, with abstract arguments; its name is what it does."""

    name: str
    loss: Callable[[Any, Any], Any]
    params: list[Any]
    batch: Any


def function(operations: tuple[str, ...]) -> Function:
    """Applies operations to a matrix of samples and features, one after the other, and takes the mean of squares."""
    shapes = {"dense": (D, D), "bias": (D,), "gate": (D, D)}
    params = [jax.ShapeDtypeStruct(shapes[o], "float32") for o in operations if o in shapes]

    def loss(params: list[Any], x: Any) -> Any:
        weights, first = iter(params), x
        for o in operations:
            x = _apply(o, x, first, weights)
        return (x * x).mean()

    return Function("-".join(operations), loss, params, jax.ShapeDtypeStruct((B, D), "float32"))


def _apply(operation: str, x: Any, first: Any, weights: Any) -> Any:
    match operation:
        case "dense":
            return x @ next(weights)
        case "bias":
            return x + next(weights)
        case "relu":
            return jax.nn.relu(x)
        case "residual":
            return x + first
        case "softmax":
            return jax.nn.softmax(x)
        case "mean":
            return x - x.mean(0)
        case "turn":
            return x.reshape(B, 4, D // 4).swapaxes(1, 2).reshape(B, D)
        case "halves":
            left, right = jnp.split(x, 2, -1)
            return jnp.concatenate([right, left], -1)
        case "gate":
            return x * jax.nn.sigmoid(x @ next(weights))
        case _:
            return (x @ x.T) @ x


functions = st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=5).map(lambda o: function(("dense", *o)))
