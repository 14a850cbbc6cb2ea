"""Diffusion transformers (Peebles and Xie 2023); the largest, with patches of 2 x 2, has 675,129,632 parameters."""

import jax
import jax.numpy as jnp

from .losses import cast, squared_error
from .model import Model, Tree, f32, i32
from .stack import scanned, unrolled
from .transformer import attend, dense, dense_params, feed_forward_params, fused_qkv_params

FREQUENCIES = 256
"""Sines and cosines of a time."""


def dit(
    *,
    layers: int = 28,
    hidden: int = 1152,
    heads: int = 16,
    image: int = 32,
    patch: int = 2,
    channels: int = 4,
    classes: int = 1000,
    batch: int = 256,
    scan: bool = False,
    remat: bool = False,
    compute: str = "bfloat16",
) -> Model:
    """Squared error of the noise in an image [channels, image, image], by its time and its class.

    The network also puts out variances, of which the loss is a second, smaller term here. `scan`, `remat`, `compute` as for GPT.
    """
    dtype, stack, side = jnp.dtype(compute), scanned if scan else unrolled, image // patch

    def loss(params: Tree, data: Tree) -> jax.Array:
        pixels = data["image"].reshape(batch, channels, side, patch, side, patch).transpose(0, 2, 4, 1, 3, 5)
        x = dense(cast(params["patch"], dtype), pixels.reshape(batch, side * side, -1).astype(dtype))
        x = x + params["position"]["table"].astype(dtype)
        times = cast(params["time"], dtype)
        known = dense(times["down"], jax.nn.silu(dense(times["up"], _waves(data["time"]).astype(dtype))))
        condition = jax.nn.silu(known + params["class"]["table"].astype(dtype)[data["label"]])

        def block(layer: Tree, x: jax.Array) -> jax.Array:
            layer = cast(layer, dtype)
            shift1, scale1, gate1, shift2, scale2, gate2 = jnp.split(dense(layer["modulate"], condition)[:, None], 6, axis=-1)
            x = x + gate1 * _attention(layer["attention"], _modulated(x, shift1, scale1), heads)
            up = jax.nn.gelu(dense(layer["mlp"]["up"], _modulated(x, shift2, scale2)))
            return x + gate2 * dense(layer["mlp"]["down"], up)

        x = stack.apply(jax.checkpoint(block) if remat else block, params["blocks"], x)
        last = cast(params["last"], dtype)
        shift, scale = jnp.split(dense(last["modulate"], condition)[:, None], 2, axis=-1)
        noise, spread = jnp.split(dense(last["out"], _modulated(x, shift, scale)).astype(jnp.float32), 2, axis=-1)
        target = data["noise"].reshape(batch, channels, side, patch, side, patch).transpose(0, 2, 4, 1, 3, 5).reshape(noise.shape)
        return squared_error(noise, target) + 1e-3 * jnp.mean(jnp.square(spread))

    one = {
        "modulate": dense_params(hidden, 6 * hidden),
        "attention": fused_qkv_params(hidden),
        "mlp": feed_forward_params(hidden, 4 * hidden),
    }
    params = {
        "patch": dense_params(channels * patch**2, hidden),
        "position": {"table": f32(side * side, hidden)},
        "time": {"up": dense_params(FREQUENCIES, hidden), "down": dense_params(hidden, hidden)},
        "class": {"table": f32(classes + 1, hidden)},
        "blocks": stack.params(one, layers),
        "last": {"modulate": dense_params(hidden, 2 * hidden), "out": dense_params(hidden, 2 * channels * patch**2)},
    }
    pictures = f32(batch, channels, image, image)
    data = {"image": pictures, "noise": pictures, "time": f32(batch), "label": i32(batch)}
    return Model("dit", loss, params, data, below={"image": 0, "noise": 0, "time": 0, "label": classes})


def _waves(time: jax.Array) -> jax.Array:
    """Cosines and sines of times [batch] -> [batch, frequencies]."""
    half = FREQUENCIES // 2
    angle = time[:, None] * 10_000.0 ** -(jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def _modulated(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """A layer norm whose gain and bias depend on the condition. [batch, sequence, width] and twice [batch, 1, width]."""
    wide = x.astype(jnp.float32)
    mean, variance = jnp.mean(wide, axis=-1, keepdims=True), jnp.var(wide, axis=-1, keepdims=True)
    normal = ((wide - mean) * jax.lax.rsqrt(variance + 1e-6)).astype(x.dtype)
    return normal * (1 + scale) + shift


def _attention(params: Tree, x: jax.Array, heads: int) -> jax.Array:
    split = (*x.shape[:2], heads, x.shape[2] // heads)
    query, key, value = (y.reshape(split) for y in jnp.split(dense(params["qkv"], x), 3, axis=-1))
    mixed = attend(query, key, value, jnp.ones((1, 1, x.shape[1], x.shape[1]), bool))
    return dense(params["out"], mixed.reshape(x.shape))
