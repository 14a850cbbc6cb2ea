"""Networks as data: a layer says which parameters an input needs, and what it computes from them.

Image layers take [batch, channels, height, width]; `dense` takes [..., features].
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from .losses import cross_entropy
from .model import Abstract, Model, Tree, f32, i32

Pair = tuple[int, int]


@dataclass(frozen=True)
class Layer:
    """`params` maps an abstract input to abstract parameters; `apply` computes."""

    name: str
    params: Callable[[Abstract], Tree]
    apply: Callable[[Tree, jax.Array], jax.Array]


def pure(name: str, compute: Callable[[jax.Array], jax.Array]) -> Layer:
    """A layer without parameters."""
    return Layer(name, lambda x: {}, lambda params, x: compute(x))


def recomputed(layer: Layer) -> Layer:
    """A layer of which the backward pass keeps the input alone."""
    return Layer(layer.name, layer.params, jax.checkpoint(layer.apply))


relu = pure("relu", jax.nn.relu)
sigmoid = pure("sigmoid", jax.nn.sigmoid)
flatten = pure("flatten", lambda x: x.reshape(x.shape[0], -1))
image_mean = pure("mean", lambda x: jnp.mean(x, axis=(2, 3)))


def dense(width: int, bias: bool = True) -> Layer:
    def params(x: Abstract) -> Tree:
        weight = {"weight": f32(x.shape[-1], width)}
        return weight | {"bias": f32(width)} if bias else weight

    def apply(params: Tree, x: jax.Array) -> jax.Array:
        product = x @ params["weight"]
        return product + params["bias"] if bias else product

    return Layer("dense", params, apply)


def conv(width: int, window: int | Pair, stride: int = 1, padding: int | Pair = 0, groups: int = 1, *, bias: bool = True) -> Layer:
    """Convolution; the kernel is [width, channels / groups, *window]."""
    size, pad = _pair(window), _pair(padding)

    def params(x: Abstract) -> Tree:
        kernel = {"kernel": f32(width, x.shape[1] // groups, *size)}
        return kernel | {"bias": f32(width)} if bias else kernel

    def apply(params: Tree, x: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, params["kernel"], (stride, stride), [(p, p) for p in pad], feature_group_count=groups)
        return y + params["bias"][:, None, None] if bias else y

    return Layer("conv", params, apply)


def batch_norm(epsilon: float = 1e-5) -> Layer:
    """Normalization by the batch's own statistics, as in training; running averages are not part of a loss."""

    def params(x: Abstract) -> Tree:
        return {"gain": f32(x.shape[1]), "bias": f32(x.shape[1])}

    def apply(params: Tree, x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, axis=(0, 2, 3), keepdims=True)
        variance = jnp.var(x, axis=(0, 2, 3), keepdims=True)
        normal = (x - mean) * lax.rsqrt(variance + epsilon)
        return normal * params["gain"][:, None, None] + params["bias"][:, None, None]

    return Layer("norm", params, apply)


def max_pool(window: int, stride: int, padding: int = 0) -> Layer:
    return pure("pool", lambda x: _windows(x, -jnp.inf, lax.max, window, stride, padding))


def mean_pool(window: int, stride: int, padding: int = 0) -> Layer:
    """Mean over windows; the padding counts as zeros."""
    return pure("pool", lambda x: _windows(x, 0.0, lax.add, window, stride, padding) / window**2)


def serial(*layers: Layer) -> Layer:
    """One layer after the other. A layer's parameters lie under its name and its number among its namesakes."""

    def params(x: Abstract) -> Tree:
        found = {}
        for name, layer in _numbered(layers):
            own = layer.params(x)
            x = jax.eval_shape(layer.apply, own, x)
            found |= {name: own} if own else {}
        return found

    def apply(params: Tree, x: jax.Array) -> jax.Array:
        for name, layer in _numbered(layers):
            x = layer.apply(params.get(name, {}), x)
        return x

    return Layer("serial", params, apply)


def branches(merge: Callable[[list[jax.Array]], jax.Array], *layers: Layer) -> Layer:
    """Layers that read the same input, and what becomes of their results."""

    def params(x: Abstract) -> Tree:
        every = {name: layer.params(x) for name, layer in _numbered(layers)}
        return {name: own for name, own in every.items() if own}

    def apply(params: Tree, x: jax.Array) -> jax.Array:
        return merge([layer.apply(params.get(name, {}), x) for name, layer in _numbered(layers)])

    return Layer("branches", params, apply)


def concat(*layers: Layer) -> Layer:
    return branches(lambda results: jnp.concatenate(results, axis=1), *layers)


def add(*layers: Layer) -> Layer:
    return branches(lambda results: reduce(operator.add, results), *layers)


identity = pure("identity", lambda x: x)


def image_classifier(network: Layer, batch: int, image: tuple[int, int, int], classes: int) -> Model:
    """Cross-entropy of a network from images [batch, *image] to logits [batch, classes]."""

    def loss(params: Tree, data: Tree) -> jax.Array:
        return cross_entropy(network.apply(params, data["image"]), data["label"])

    pictures = f32(batch, *image)
    data = {"image": pictures, "label": i32(batch)}
    return Model(network.name, loss, network.params(pictures), data, below={"image": 0, "label": classes})


def _numbered(layers: tuple[Layer, ...]) -> Iterator[tuple[str, Layer]]:
    seen = Counter[str]()
    for layer in layers:
        yield f"{layer.name}{seen[layer.name]}", layer
        seen[layer.name] += 1


def _pair(size: int | Pair) -> Pair:
    return (size, size) if isinstance(size, int) else size


def _windows(x: jax.Array, start: float, combine: Callable[..., jax.Array], window: int, stride: int, padding: int) -> jax.Array:
    around = [(0, 0), (0, 0), (padding, padding), (padding, padding)]
    return lax.reduce_window(x, start, combine, (1, 1, window, window), (1, 1, stride, stride), around)
