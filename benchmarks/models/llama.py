"""Llama 3's decoder (2024): RMS norm, rotary positions, grouped queries, SwiGLU; 8,030,261,248 parameters."""

import jax
import jax.numpy as jnp
from jax import lax

from .losses import cast, cross_entropy
from .model import Model, Tree, f32, i32
from .stack import scanned, unrolled
from .transformer import attend, causal

ROTARY_BASE = 500_000.0


def llama(
    *,
    layers: int = 32,
    hidden: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    feed_forward: int = 14336,
    vocab: int = 128256,
    seq: int = 8192,
    batch: int = 64,
    scan: bool = False,
    remat: bool = False,
    compute: str = "bfloat16",
) -> Model:
    """Mean cross-entropy of the next token; `scan`, `remat` and `compute` as for GPT."""
    dtype, stack = jnp.dtype(compute), scanned if scan else unrolled
    head = hidden // heads

    def block(params: Tree, x: jax.Array) -> jax.Array:
        params = cast(params, dtype)
        attended = grouped_attention(params["attention"], rms_norm(params["norm1"], x), head)
        with jax.named_scope("residual"):
            x = x + attended
        mixed = _swiglu(params["mlp"], rms_norm(params["norm2"], x))
        with jax.named_scope("residual"):
            return x + mixed

    def loss(params: Tree, data: Tree) -> jax.Array:
        with jax.named_scope("token"):
            x = params["token"]["table"].astype(dtype)[data["tokens"]]
        x = stack.apply(jax.checkpoint(block) if remat else block, params["blocks"], x)
        x = rms_norm(cast(params["norm"], dtype), x)
        with jax.named_scope("head"):
            logits = jnp.matmul(x, params["head"]["weight"].astype(dtype), preferred_element_type=jnp.float32)
        return cross_entropy(logits, data["labels"])

    one = {
        "norm1": {"gain": f32(hidden)},
        "attention": {
            "query": {"weight": f32(hidden, heads * head)},
            "key": {"weight": f32(hidden, kv_heads * head)},
            "value": {"weight": f32(hidden, kv_heads * head)},
            "out": {"weight": f32(heads * head, hidden)},
        },
        "norm2": {"gain": f32(hidden)},
        "mlp": {
            "gate": {"weight": f32(hidden, feed_forward)},
            "up": {"weight": f32(hidden, feed_forward)},
            "down": {"weight": f32(feed_forward, hidden)},
        },
    }
    params = {
        "token": {"table": f32(vocab, hidden)},
        "blocks": stack.params(one, layers),
        "norm": {"gain": f32(hidden)},
        "head": {"weight": f32(hidden, vocab)},
    }
    data = {"tokens": i32(batch, seq), "labels": i32(batch, seq)}
    return Model("llama", loss, params, data, below={"tokens": vocab, "labels": vocab})


def rms_norm(params: Tree, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    wide = x.astype(jnp.float32)
    power = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * lax.rsqrt(power + epsilon)).astype(x.dtype) * params["gain"]


def grouped_attention(params: Tree, x: jax.Array, head: int, rotary_base: float = ROTARY_BASE) -> jax.Array:
    """Several query heads share a key head. [batch, sequence, width] -> the same."""
    query, key, value = (product(name, params, x).reshape(*x.shape[:2], -1, head) for name in ("query", "key", "value"))
    group = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(_rotate(key, rotary_base), group, axis=2), jnp.repeat(value, group, axis=2)
    mixed = attend(_rotate(query, rotary_base), key, value, causal(x.shape[1]))
    return product("out", params, mixed.reshape(*x.shape[:2], -1))


def product(name: str, params: Tree, x: jax.Array) -> jax.Array:
    """A product with a weight, in a scope of the weight's name."""
    with jax.named_scope(name):
        return x @ params[name]["weight"]


def _rotate(x: jax.Array, base: float = ROTARY_BASE) -> jax.Array:
    """Rotary positions on [batch, sequence, heads, head width]: halves are the two coordinates of each rotation."""
    length, half = x.shape[1], x.shape[3] // 2
    frequency = base ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = (jnp.arange(length, dtype=jnp.float32)[:, None] * frequency)[None, :, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _swiglu(params: Tree, x: jax.Array) -> jax.Array:
    gate = jax.nn.silu(product("gate", params, x))
    return product("down", params, gate * product("up", params, x))
