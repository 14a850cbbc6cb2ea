"""GPT-2's decoder (Radford et al. 2019): pre-norm, gelu, learned positions; 124,439,808 parameters."""

import jax
import jax.numpy as jnp

from .losses import cast, cross_entropy
from .model import Model, Tree, f32, i32
from .stack import scanned, unrolled
from .transformer import (
    causal,
    feed_forward,
    feed_forward_params,
    fused_qkv_params,
    layer_norm,
    norm_params,
    self_attention,
    separate_qkv_params,
)


def gpt(
    *,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    vocab: int = 50257,
    seq: int = 1024,
    batch: int = 8,
    tied: bool = True,
    fused_qkv: bool = True,
    scan: bool = False,
    remat: bool = False,
    compute: str = "float32",
) -> Model:
    """Mean cross-entropy of the next token.

    `tied` projects to logits with the embedding table; `scan` stacks the layers' parameters; `remat` keeps only the
    layers' inputs for the backward pass; `compute` is the precision of activations over float32 parameters.
    """
    dtype, stack = jnp.dtype(compute), scanned if scan else unrolled

    def block(params: Tree, x: jax.Array) -> jax.Array:
        params = cast(params, dtype)
        x += self_attention(params["attention"], layer_norm(params["norm1"], x), heads, causal(seq))
        return x + feed_forward(params["mlp"], layer_norm(params["norm2"], x))

    def loss(params: Tree, data: Tree) -> jax.Array:
        x = params["token"]["table"].astype(dtype)[data["tokens"]] + params["position"]["table"].astype(dtype)
        x = stack.apply(jax.checkpoint(block) if remat else block, params["blocks"], x)
        x = layer_norm(cast(params["norm"], dtype), x)
        head = params["token"]["table"].T if tied else params["head"]["weight"]
        logits = jnp.matmul(x, head.astype(dtype), preferred_element_type=jnp.promote_types(dtype, jnp.float32))
        return cross_entropy(logits, data["labels"])

    one = {
        "norm1": norm_params(hidden),
        "attention": fused_qkv_params(hidden) if fused_qkv else separate_qkv_params(hidden),
        "norm2": norm_params(hidden),
        "mlp": feed_forward_params(hidden, 4 * hidden),
    }
    params = {
        "token": {"table": f32(vocab, hidden)},
        "position": {"table": f32(seq, hidden)},
        "blocks": stack.params(one, layers),
        "norm": norm_params(hidden),
    }
    params |= {} if tied else {"head": {"weight": f32(hidden, vocab)}}
    data = {"tokens": i32(batch, seq), "labels": i32(batch, seq)}
    return Model("gpt", loss, params, data, below={"tokens": vocab, "labels": vocab})
