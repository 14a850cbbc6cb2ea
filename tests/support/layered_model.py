"""What reports, diffs and exports show: layers with a pair of products after them, which a rule makes one, and two towers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import unity

EIGHT = unity.Machine.grid(1, 8, "v100")


def loss(params: dict[str, Any], x: Any) -> Any:
    for layer in params["layers"]:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x @ params["a"] @ params["b"]) ** 2)


def scanned(params: dict[str, Any], x: Any) -> Any:
    def step(x: Any, layer: Any) -> Any:
        return x + jnp.tanh(x @ layer), None

    return jnp.mean(jax.lax.scan(step, x, params["layers"])[0] ** 2)


def towers(params: dict[str, Any], batch: dict[str, Any]) -> Any:
    """Two that do not need each other before the end."""
    one = jax.nn.relu(batch["x"] @ params["u1"]) @ params["u2"]
    other = jnp.tanh(jax.nn.relu(batch["y"] @ params["v1"]) @ params["v2"]) @ params["v3"]
    return ((one * other).sum(-1) ** 2).mean()


def towers_arguments() -> tuple[dict[str, Any], dict[str, Any]]:
    sizes = {"u1": (24, 32), "u2": (32, 16), "v1": (40, 16), "v2": (16, 48), "v3": (48, 16)}
    return {name: f(*size) for name, size in sizes.items()}, {"x": f(16, 24), "y": f(16, 40)}


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def arguments(layers: int) -> tuple[dict[str, Any], jax.ShapeDtypeStruct]:
    """What `loss` takes."""
    weights = [{"up": f(256, 1024), "down": f(1024, 256)} for _ in range(layers)]
    return {"layers": weights, "a": f(256, 4096), "b": f(4096, 8)}, f(2048, 256)


def line_of(text: str) -> str:
    """The line of this file with a text, as it is shown to users."""
    path = Path(__file__)
    return f"{path.name}:{next(k for k, line in enumerate(path.read_text().splitlines(), 1) if text in line)}"
