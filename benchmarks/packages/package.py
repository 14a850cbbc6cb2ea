"""A model of a package, and what the builders of such models share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Case = tuple[Callable[..., Any], tuple[Any, ...]]
Abstract = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Packaged:
    """A model of a package: `build` gives a loss, and its abstract arguments (weights first)."""

    package: str
    name: str
    build: Callable[[], Case]


MODELS: list[Packaged] = []


def model(package: str, name: str, *args: Any) -> Callable[[Callable[..., Case]], Callable[..., Case]]:
    def register(build: Callable[..., Case]) -> Callable[..., Case]:
        MODELS.append(Packaged(package, name, lambda: build(*args)))
        return build

    return register


def images(size: int, batch: int = 32, channels: int = 3) -> tuple[Abstract, Abstract]:
    return Abstract((batch, size, size, channels), jnp.float32), Abstract((batch,), jnp.int32)


def tokens(length: int, batch: int = 8) -> Abstract:
    return Abstract((batch, length), jnp.int32)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), labels[..., None], axis=-1)
    return -jnp.mean(chosen)


def key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: Abstract(x.shape, x.dtype), tree)
