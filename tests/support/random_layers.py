"""Random layers on one stream, as a program with a loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from hypothesis import strategies as st
from small_models import Small, f


@st.composite
def programs(draw: st.DrawFn) -> Small:
    """Random layers on one stream: products, elementwise operators, values that are read once more far below, scans, remats."""
    kinds = draw(st.lists(st.sampled_from(["product", "tanh", "gelu", "norm", "skip", "scan", "remat"]), min_size=1, max_size=6))
    rows, width = draw(st.sampled_from([2, 8, 24])), draw(st.sampled_from([3, 8, 16]))

    def layer(kind: str, w: jax.Array, x: jax.Array, first: jax.Array) -> jax.Array:
        match kind:
            case "product":
                return x @ w
            case "tanh":
                return jnp.tanh(x) * w[0]
            case "gelu":
                return x + jax.nn.gelu(x @ w) @ w.T
            case "norm":
                return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
            case "skip":
                return jnp.sin(first @ w) * x
            case "scan":
                return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]
        return jax.checkpoint(lambda w, x: jax.nn.silu(x @ w) * x)(w, x)

    def run(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        first = x
        for kind, w in zip(kinds, weights, strict=True):
            x = layer(kind, w, x, first)
        return jnp.mean(x**2)

    return Small(run, [f(width, width) for _ in kinds], f(rows, width))
