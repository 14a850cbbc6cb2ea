"""A benchmark model: a loss over abstract arguments, and real arrays for it where it is small enough to run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any  # a pytree: nested dicts, lists and tuples of arrays
Abstract = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Model:
    """A training step's loss and its arguments, of which nothing is allocated.

    `below` has the structure of `batch`: integers of a leaf lie in [0, below); for a leaf of real numbers it is 0.
    """

    name: str
    loss: Callable[[Tree, Tree], jax.Array]
    params: Tree
    batch: Tree
    below: Tree

    @property
    def parameters(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.params))


def f32(*shape: int) -> Abstract:
    return Abstract(shape, jnp.float32)


def i32(*shape: int) -> Abstract:
    return Abstract(shape, jnp.int32)


def concrete(model: Model, seed: int = 0, scale: float = 1.0) -> tuple[Tree, Tree]:
    """Real `(params, batch)` for a model: weights that keep activations near 1, and nothing that is exactly 0 or 1.

    Gains and biases are drawn too, so that a test sees a parameter that was lost or added twice. `scale` multiplies
    every deviation from the neutral value.
    """
    rng = np.random.default_rng(seed)

    def parameter(path: tuple[Any, ...], leaf: Abstract) -> jax.Array:
        centre, deviation = _initial(path[-1].key, leaf.shape)
        return jnp.asarray(centre + scale * deviation * rng.standard_normal(leaf.shape), leaf.dtype)

    def sample(leaf: Abstract, below: int) -> jax.Array:
        drawn = rng.integers(below, size=leaf.shape) if below else rng.standard_normal(leaf.shape)
        return jnp.asarray(drawn, leaf.dtype)

    params = jax.tree_util.tree_map_with_path(parameter, model.params)
    return params, jax.tree.map(sample, model.batch, model.below)


def _initial(kind: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a parameter, by the name its builder gave it."""
    match kind:
        case "weight":  # [..., inputs, outputs]
            return 0.0, shape[-2] ** -0.5
        case "kernel":  # [outputs, inputs, *window], followed by a relu, which halves the power
            return 0.0, (2 / math.prod(shape[1:])) ** 0.5
        case "table":  # [rows, width]
            return 0.0, shape[-1] ** -0.5
        case "gain":
            return 1.0, 0.1
        case "bias":
            return 0.0, 0.1
        case _:
            raise ValueError(f"no initial value is known for a parameter named {kind!r}")
