"""What transformers are made of. Sequences are [batch, sequence, width]; sublayers keep their parameters by name."""

import jax
import jax.numpy as jnp
from jax import lax

from .model import Tree, f32

MASKED = -1e9
"""Score of a key that a query may not see."""


def dense_params(inputs: int, outputs: int) -> Tree:
    return {"weight": f32(inputs, outputs), "bias": f32(outputs)}


def dense(params: Tree, x: jax.Array) -> jax.Array:
    return x @ params["weight"] + params["bias"]


def norm_params(width: int) -> Tree:
    return {"gain": f32(width), "bias": f32(width)}


def layer_norm(params: Tree, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """Over the last dimension; the statistics are float32 at least."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.var(wide, axis=-1, keepdims=True)
    normal = ((wide - mean) * lax.rsqrt(variance + epsilon)).astype(x.dtype)
    return normal * params["gain"] + params["bias"]


def fused_qkv_params(width: int) -> Tree:
    return {"qkv": dense_params(width, 3 * width), "out": dense_params(width, width)}


def separate_qkv_params(width: int) -> Tree:
    return {name: dense_params(width, width) for name in ("query", "key", "value", "out")}


def self_attention(params: Tree, x: jax.Array, heads: int, visible: jax.Array) -> jax.Array:
    """Multi-head attention; `visible` [batch or 1, 1, queries, keys] says which keys a query sees."""
    if "qkv" in params:
        query, key, value = jnp.split(dense(params["qkv"], x), 3, axis=-1)
    else:
        query, key, value = (dense(params[name], x) for name in ("query", "key", "value"))
    split = (*x.shape[:2], heads, x.shape[2] // heads)
    mixed = attend(query.reshape(split), key.reshape(split), value.reshape(split), visible)
    return dense(params["out"], mixed.reshape(x.shape))


def attend(query: jax.Array, key: jax.Array, value: jax.Array, visible: jax.Array) -> jax.Array:
    """Softmax attention on [batch, sequence, heads, head width]; the softmax is in float32 at least."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    scores = jnp.where(visible, scores.astype(jnp.promote_types(scores.dtype, jnp.float32)), MASKED)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def causal(length: int) -> jax.Array:
    """Queries see the keys up to their own position. [1, 1, length, length]."""
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


def feed_forward_params(width: int, hidden: int) -> Tree:
    return {"up": dense_params(width, hidden), "down": dense_params(hidden, width)}


def feed_forward(params: Tree, x: jax.Array) -> jax.Array:
    return dense(params["down"], jax.nn.gelu(dense(params["up"], x)))
