"""Vision transformers (Dosovitskiy et al. 2021); the large one with patches of 16 x 16 has 304,326,632 parameters."""

import jax
import jax.numpy as jnp

from .losses import cast, cross_entropy
from .model import Model, Tree, f32, i32
from .stack import scanned, unrolled
from .transformer import attend, dense_params, feed_forward_params, layer_norm, norm_params, separate_qkv_params


def vit(
    *,
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
    image: int = 224,
    patch: int = 16,
    classes: int = 1000,
    batch: int = 512,
    scan: bool = False,
    remat: bool = False,
    compute: str = "bfloat16",
) -> Model:
    """Cross-entropy of the class, read from a token of its own; `scan`, `remat` and `compute` as for GPT."""
    dtype, stack = jnp.dtype(compute), scanned if scan else unrolled
    side = image // patch

    def block(params: Tree, x: jax.Array) -> jax.Array:
        params = cast(params, dtype)
        attended = _attention(params["attention"], layer_norm(params["norm1"], x), heads)
        with jax.named_scope("residual"):
            x = x + attended
        y = layer_norm(params["norm2"], x)
        y = _dense("down", params["mlp"], jax.nn.gelu(_dense("up", params["mlp"], y)))
        with jax.named_scope("residual"):
            return x + y

    def loss(params: Tree, data: Tree) -> jax.Array:
        pixels = data["image"].reshape(batch, side, patch, side, patch, 3).swapaxes(2, 3).reshape(batch, side * side, -1)
        x = _dense("patch", cast({"patch": params["patch"]}, dtype), pixels.astype(dtype))
        first = jnp.broadcast_to(params["class"]["table"].astype(dtype), (batch, 1, hidden))
        x = jnp.concatenate([first, x], axis=1) + params["position"]["table"].astype(dtype)
        x = stack.apply(jax.checkpoint(block) if remat else block, params["blocks"], x)
        x = layer_norm(cast(params["norm"], dtype), x[:, 0])
        return cross_entropy(_dense("head", cast({"head": params["head"]}, dtype), x).astype(jnp.float32), data["label"])

    one = {
        "norm1": norm_params(hidden),
        "attention": separate_qkv_params(hidden),
        "norm2": norm_params(hidden),
        "mlp": feed_forward_params(hidden, 4 * hidden),
    }
    params = {
        "patch": dense_params(patch * patch * 3, hidden),
        "class": {"table": f32(1, hidden)},
        "position": {"table": f32(side * side + 1, hidden)},
        "blocks": stack.params(one, layers),
        "norm": norm_params(hidden),
        "head": dense_params(hidden, classes),
    }
    data = {"image": f32(batch, image, image, 3), "label": i32(batch)}
    return Model("vit", loss, params, data, below={"image": 0, "label": classes})


def _attention(params: Tree, x: jax.Array, heads: int) -> jax.Array:
    split = (*x.shape[:2], heads, x.shape[2] // heads)
    query, key, value = (_dense(name, params, x).reshape(split) for name in ("query", "key", "value"))
    mixed = attend(query, key, value, jnp.ones((1, 1, x.shape[1], x.shape[1]), bool))
    return _dense("out", params, mixed.reshape(x.shape))


def _dense(name: str, params: Tree, x: jax.Array) -> jax.Array:
    with jax.named_scope(name):
        return x @ params[name]["weight"] + params[name]["bias"]
