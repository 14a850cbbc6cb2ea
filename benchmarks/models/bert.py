"""BERT (Devlin et al. 2019): the large one with its masked-language-model head has 335,174,458 parameters."""

import jax
import jax.numpy as jnp

from .losses import log_likelihood, squared_error
from .model import Model, Tree, f32, i32
from .stack import scanned, unrolled
from .transformer import (
    attend,
    dense,
    dense_params,
    feed_forward,
    feed_forward_params,
    layer_norm,
    norm_params,
    self_attention,
    separate_qkv_params,
)

SEGMENTS = 2


def bert(
    *,
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
    vocab: int = 30522,
    seq: int = 512,
    batch: int = 8,
    scan: bool = False,
) -> Model:
    """Mean cross-entropy of the masked tokens; padding is hidden from attention."""
    stack = scanned if scan else unrolled

    def loss(params: Tree, data: Tree) -> jax.Array:
        visible = (data["valid"] > 0)[:, None, None, :]

        def block(layer: Tree, x: jax.Array) -> jax.Array:
            x = layer_norm(layer["norm1"], x + self_attention(layer["attention"], x, heads, visible))
            return layer_norm(layer["norm2"], x + feed_forward(layer["mlp"], x))

        logits = _head(params, stack.apply(block, params["blocks"], _embed(params, data)))
        chosen = data["masked"].astype(jnp.float32)
        return -jnp.sum(chosen * log_likelihood(logits, data["labels"])) / jnp.maximum(jnp.sum(chosen), 1)

    one = {
        "attention": separate_qkv_params(hidden),
        "norm1": norm_params(hidden),
        "mlp": feed_forward_params(hidden, 4 * hidden),
        "norm2": norm_params(hidden),
    }
    params = {
        "token": {"table": f32(vocab, hidden)},
        "position": {"table": f32(seq, hidden)},
        "segment": {"table": f32(SEGMENTS, hidden)},
        "norm": norm_params(hidden),
        "blocks": stack.params(one, layers),
        "transform": dense_params(hidden, hidden),
        "transform_norm": norm_params(hidden),
        "logits": {"bias": f32(vocab)},
    }
    below = {"tokens": vocab, "segments": SEGMENTS, "valid": 2, "masked": 2, "labels": vocab}
    return Model("bert", loss, params, {name: i32(batch, seq) for name in below}, below)


def attention_stack(*, layers: int = 12, hidden: int = 1024, heads: int = 16, seq: int = 512, batch: int = 8) -> Model:
    """Unity's released example: attention and two dense layers, without biases, residuals or norms; squared error."""
    names = ("query", "key", "value", "out", "up", "down")

    def block(params: Tree, x: jax.Array) -> jax.Array:
        split = (*x.shape[:2], heads, hidden // heads)
        query, key, value = ((x @ params[name]["weight"]).reshape(split) for name in names[:3])
        mixed = attend(query, key, value, jnp.ones((1, 1, seq, seq), bool)).reshape(x.shape)
        up = jax.nn.relu(mixed @ params["out"]["weight"] @ params["up"]["weight"])
        return up @ params["down"]["weight"]

    def loss(params: Tree, data: Tree) -> jax.Array:
        x = unrolled.apply(block, params["blocks"], data["x"])
        return squared_error(x @ params["head"]["weight"], data["y"])

    one = {name: {"weight": f32(hidden, hidden)} for name in names}
    params = {"blocks": unrolled.params(one, layers), "head": {"weight": f32(hidden, 1)}}
    data = {"x": f32(batch, seq, hidden), "y": f32(batch, seq, 1)}
    return Model("bert_unity", loss, params, data, below={"x": 0, "y": 0})


def _embed(params: Tree, data: Tree) -> jax.Array:
    tokens, segments = params["token"]["table"][data["tokens"]], params["segment"]["table"][data["segments"]]
    return layer_norm(params["norm"], tokens + segments + params["position"]["table"])


def _head(params: Tree, x: jax.Array) -> jax.Array:
    """Logits [batch, sequence, vocabulary] by the embedding table."""
    x = layer_norm(params["transform_norm"], jax.nn.gelu(dense(params["transform"], x)))
    return x @ params["token"]["table"].T + params["logits"]["bias"]
