"""The U-Net of denoising diffusion (Ho et al. 2020), for images of 32 x 32: 35,746,307 parameters."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from .losses import squared_error
from .model import Model, Tree, f32
from .transformer import dense, dense_params

GROUPS = 32
"""Groups of channels that are normalized together."""


def unet(
    *,
    width: int = 128,
    growth: tuple[int, ...] = (1, 2, 2, 2),
    blocks: int = 2,
    attended: tuple[int, ...] = (16,),
    image: int = 32,
    channels: int = 3,
    batch: int = 128,
    remat: bool = False,
) -> Model:
    """Squared error of the noise in an image [channels, image, image], by its time.

    Level k has `growth[k]` times `width` channels and half the resolution of the one before; `attended` are the resolutions with
    attention. `remat` keeps only the inputs of the residual blocks, and their attention, for the backward pass.
    """
    block = jax.checkpoint(_unit) if remat else _unit
    levels = list(enumerate(growth))
    last = width * growth[-1]

    def loss(params: Tree, data: Tree) -> jax.Array:
        known = dense(params["time"]["down"], jax.nn.silu(dense(params["time"]["up"], _waves(data["time"], width))))
        known = jax.nn.silu(known)
        x = _conv(params["first"], data["image"])
        kept, layers = [x], iter(params["down"])
        for k, _ in levels:
            for _ in range(blocks):
                x = block(next(layers), x, known)
                kept.append(x)
            if k + 1 < len(levels):
                x = _conv(next(layers), x, stride=2)
                kept.append(x)
        x = block(params["middle"][0] | params["middle"][1], x, known)
        x = block({"residual": params["middle"][2]}, x, known)
        layers = iter(params["up"])
        for k, _ in reversed(levels):
            for _ in range(blocks + 1):
                x = block(next(layers), jnp.concatenate([x, kept.pop()], axis=1), known)
            if k:
                x = _conv(next(layers), jnp.repeat(jnp.repeat(x, 2, axis=2), 2, axis=3))
        return squared_error(_conv(params["last"]["out"], jax.nn.silu(_normed(params["last"]["norm"], x))), data["noise"])

    def unit(inputs: int, outputs: int, size: int) -> Tree:
        attention = {"attention": _attention_params(outputs)} if size in attended else {}
        return {"residual": _residual_params(inputs, outputs, 4 * width)} | attention

    def down() -> Iterator[Tree]:
        now = width
        for k, factor in levels:
            for _ in range(blocks):
                yield unit(now, now := width * factor, image >> k)
            if k + 1 < len(levels):
                yield _conv_params(now, now)

    def up() -> Iterator[Tree]:
        sizes = [width] + [width * growth[j] for j, _ in levels for _ in range(blocks + (j + 1 < len(levels)))]
        now = last
        for k, factor in reversed(levels):
            for _ in range(blocks + 1):
                yield unit(now + sizes.pop(), now := width * factor, image >> k)
            if k:
                yield _conv_params(now, now)

    middle = _residual_params(last, last, 4 * width)
    params = {
        "time": {"up": dense_params(width, 4 * width), "down": dense_params(4 * width, 4 * width)},
        "first": _conv_params(channels, width),
        "down": list(down()),
        "middle": [{"residual": middle}, {"attention": _attention_params(last)}, middle],
        "up": list(up()),
        "last": {"norm": _norm_params(width * growth[0]), "out": _conv_params(width * growth[0], channels)},
    }
    pictures = f32(batch, channels, image, image)
    data = {"image": pictures, "noise": pictures, "time": f32(batch)}
    return Model("unet", loss, params, data, below={"image": 0, "noise": 0, "time": 0})


def _waves(time: jax.Array, count: int) -> jax.Array:
    """Sines and cosines of times [batch] -> [batch, count]."""
    half = count // 2
    angle = time[:, None] * 10_000.0 ** -(jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def _conv_params(inputs: int, outputs: int, window: int = 3) -> Tree:
    return {"kernel": f32(outputs, inputs, window, window), "bias": f32(outputs)}


def _conv(params: Tree, x: jax.Array, stride: int = 1) -> jax.Array:
    around = params["kernel"].shape[2] // 2
    padding = [(around, around)] * 2 if stride == 1 else [(0, 1), (0, 1)]
    return lax.conv_general_dilated(x, params["kernel"], (stride, stride), padding) + params["bias"][:, None, None]


def _norm_params(width: int) -> Tree:
    return {"gain": f32(width), "bias": f32(width)}


def _normed(params: Tree, x: jax.Array) -> jax.Array:
    """Group norm. [batch, channels, height, width] -> the same."""
    groups = x.reshape(x.shape[0], min(GROUPS, x.shape[1]), -1)
    mean, variance = jnp.mean(groups, axis=-1, keepdims=True), jnp.var(groups, axis=-1, keepdims=True)
    normal = ((groups - mean) * lax.rsqrt(variance + 1e-6)).reshape(x.shape)
    return normal * params["gain"][:, None, None] + params["bias"][:, None, None]


def _residual_params(inputs: int, outputs: int, known: int) -> Tree:
    params = {
        "norm1": _norm_params(inputs),
        "conv1": _conv_params(inputs, outputs),
        "time": dense_params(known, outputs),
        "norm2": _norm_params(outputs),
        "conv2": _conv_params(outputs, outputs),
    }
    return params | ({"shortcut": _conv_params(inputs, outputs, 1)} if inputs != outputs else {})


def _residual(params: Tree, x: jax.Array, known: jax.Array) -> jax.Array:
    y = _conv(params["conv1"], jax.nn.silu(_normed(params["norm1"], x))) + dense(params["time"], known)[:, :, None, None]
    y = _conv(params["conv2"], jax.nn.silu(_normed(params["norm2"], y)))
    return y + (_conv(params["shortcut"], x) if "shortcut" in params else x)


def _attention_params(width: int) -> Tree:
    return {"norm": _norm_params(width)} | {name: dense_params(width, width) for name in ("query", "key", "value", "out")}


def _unit(params: Tree, x: jax.Array, known: jax.Array) -> jax.Array:
    """A residual block, and attention over the positions where there are parameters for it."""
    x = _residual(params["residual"], x, known)
    if "attention" not in params:
        return x
    attention = params["attention"]
    places = _normed(attention["norm"], x).reshape(*x.shape[:2], -1).swapaxes(1, 2)  # [batch, positions, channels]
    query, key, value = (dense(attention[name], places) for name in ("query", "key", "value"))
    weights = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", query, key) * x.shape[1] ** -0.5)
    mixed = dense(attention["out"], jnp.einsum("bqk,bkc->bqc", weights, value))
    return x + mixed.swapaxes(1, 2).reshape(x.shape)
