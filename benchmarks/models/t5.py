"""T5's encoder and decoder (Raffel et al. 2020): RMS norm, relative positions, no biases; large: 737,668,096 parameters."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from .llama import product, rms_norm
from .losses import cast, cross_entropy
from .model import Model, Tree, f32, i32
from .stack import scanned, unrolled
from .transformer import MASKED, causal

DISTANT = 128
"""Distance from which on all positions are in one bucket."""


def t5(
    *,
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
    feed_forward: int = 4096,
    buckets: int = 32,
    vocab: int = 32128,
    seq: int = 512,
    batch: int = 64,
    scan: bool = False,
    remat: bool = False,
    compute: str = "bfloat16",
) -> Model:
    """Mean cross-entropy of the next token of the target; `layers` of the encoder, and of the decoder.

    Logits are products with the embedding table; `scan`, `remat` and `compute` as for GPT.
    """
    dtype, head, stack = jnp.dtype(compute), hidden // heads, scanned if scan else unrolled

    def coder(name: str, params: Tree, x: jax.Array, source: jax.Array | None = None) -> jax.Array:
        """The encoder, or with the encoded `source` the decoder. [batch, sequence, width] -> the same."""
        near = _bucket(x.shape[1], buckets, both=source is None)
        bias = params[name]["position"]["table"][near].transpose(2, 0, 1)
        if source is not None:
            bias = jnp.where(causal(x.shape[1])[0], bias, MASKED)

        def block(layer: Tree, x: jax.Array) -> jax.Array:
            layer = cast(layer, dtype)
            y = rms_norm(layer["norm1"], x)
            x = x + _attention(layer["attention"], y, y, head, bias)
            if source is not None:
                x = x + _attention(layer["cross"], rms_norm(layer["norm2"], x), source, head)
            hidden = jax.nn.relu(product("up", layer["mlp"], rms_norm(layer["norm3"], x)))
            return x + product("down", layer["mlp"], hidden)

        x = stack.apply(jax.checkpoint(block) if remat else block, params[name]["blocks"], x)
        return rms_norm(cast(params[name]["norm"], dtype), x)

    def loss(params: Tree, data: Tree) -> jax.Array:
        table = params["token"]["table"].astype(dtype)
        source = coder("encoder", params, table[data["source"]])
        y = coder("decoder", params, table[data["target"]], source) * hidden**-0.5
        return cross_entropy(jnp.matmul(y, table.T, preferred_element_type=jnp.float32), data["labels"])

    attention = {name: {"weight": f32(hidden, hidden)} for name in ("query", "key", "value", "out")}
    norm = {"gain": f32(hidden)}
    mlp = {"up": {"weight": f32(hidden, feed_forward)}, "down": {"weight": f32(feed_forward, hidden)}}
    encoder = {"norm1": norm, "attention": attention, "norm3": norm, "mlp": mlp}
    decoder = encoder | {"norm2": norm, "cross": attention}
    params: Tree = {"token": {"table": f32(vocab, hidden)}}
    for name, block in (("encoder", encoder), ("decoder", decoder)):
        params[name] = {"blocks": stack.params(block, layers), "norm": norm, "position": {"table": f32(buckets, heads)}}
    below = dict.fromkeys(("source", "target", "labels"), vocab)
    return Model("t5", loss, params, {name: i32(batch, seq) for name in below}, below)


def _attention(params: Tree, x: jax.Array, source: jax.Array, head: int, bias: jax.Array | None = None) -> jax.Array:
    """Queries from `x`, keys and values from `source`; scores are not scaled, as in T5. `bias` [heads, queries, keys]."""
    query, key, value = (
        product(name, params, y).reshape(*y.shape[:2], -1, head) for name, y in (("query", x), ("key", source), ("value", source))
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
    weights = jax.nn.softmax(scores if bias is None else scores + bias).astype(x.dtype)
    return product("out", params, jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape))


def _bucket(length: int, count: int, both: bool) -> np.ndarray:
    """The bucket of the distance from each query to each key: one each for half of them, then wider ones. [queries, keys]."""
    distance = np.arange(length)[None, :] - np.arange(length)[:, None]
    start = np.where(distance > 0, count // 2, 0) if both else 0
    count = count // 2 if both else count
    distance = np.abs(distance) if both else np.maximum(-distance, 0)
    exact = count // 2
    ratio = np.log(np.maximum(distance, 1) / exact) / math.log(DISTANT / exact)
    wide = np.minimum(exact + (ratio * (count - exact)).astype(int), count - 1)
    return start + np.where(distance < exact, distance, wide)
