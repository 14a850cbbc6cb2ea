"""Models of several layers without a checkpoint: written out and scanned, with attention, random masks, and checkpoints inside."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from small_models import Small, f, gpt, gpt_scanned


def dropped(layers: int = 4, b: int = 64, d: int = 16, wide: int = 64) -> Small:
    """Layers with random masks, each drawn with another key."""

    def loss(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for p, key in zip(params, jax.random.split(jax.random.wrap_key_data(batch["key"]), layers), strict=True):
            h = jnp.tanh(x @ p["up"])
            h = jnp.where(jax.random.bernoulli(key, 0.8, h.shape), h / 0.8, 0.0)
            x = x + jax.nn.gelu(h * h) @ p["down"]
        return jnp.mean(x**2)

    key = jax.ShapeDtypeStruct((2,), "uint32")
    return Small(loss, [{"up": f(d, wide), "down": f(wide, d)}] * layers, {"x": f(b, d), "key": key})


def partly(layers: int = 4, b: int = 64, d: int = 8, wide: int = 32) -> Small:
    """Layers with a checkpoint around one half, under a policy."""
    policy = jax.checkpoint_policies.dots_saveable

    def loss(params: Any, x: Any) -> Any:
        for p in params:
            x = x + jax.checkpoint(lambda x, p: jnp.tanh(x @ p["up"]) @ p["down"], policy=policy)(x, p)
            x = x + jnp.sin(jax.nn.gelu(x @ p["gate"]) * x.sum(-1, keepdims=True)) @ p["out"]
        return jnp.mean(x**2)

    shapes = {"up": f(d, wide), "down": f(wide, d), "gate": f(d, wide), "out": f(wide, d)}
    return Small(loss, [shapes] * layers, f(b, d))


def unlike(b: int = 64) -> Small:
    """Layers that all differ."""
    widths = (8, 24, 16, 40, 8)

    def loss(params: Any, x: Any) -> Any:
        for k, w in enumerate(params):
            x = (jnp.tanh if k % 2 else jax.nn.gelu)(x @ w) * 1.5
            x = x - x.mean(-1, keepdims=True)
        return jnp.mean(x**2)

    return Small(loss, [f(m, n) for m, n in pairwise(widths)], f(b, 8))


MODELS: dict[str, Callable[[], Small]] = {
    "written out": lambda: gpt(layers=4, d=16, vocabulary=32, b=16, s=16),
    "two layers": lambda: gpt(layers=2, d=16, vocabulary=32, b=16, s=16),
    "scanned": lambda: gpt_scanned(layers=4, b=16, s=16),
    "dropped": dropped,
    "partly": partly,
    "unlike": unlike,
}
