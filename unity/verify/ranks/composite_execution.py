"""Composite operators as a program calls them: by the functions of JAX, where it has one.

The definitions (`composites.py`) are compared with these."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Axes = tuple[int, ...]
Dimension = tuple[str, int]
Ran = tuple[Any, tuple[Dimension, ...]]


def _standardized(axes: Axes, x: Any, e: Any) -> Any:
    return jax.nn.standardize(x, axes, jnp.mean(x, axes, keepdims=True), jnp.var(x, axes, keepdims=True), e)


def _rms_norm(axes: Axes, x: Any, w: Any, e: Any) -> Any:
    """Normalize by the root mean square, for which JAX has no function."""
    return x / jnp.sqrt(jnp.mean(x**2, axes, keepdims=True) + e) * w


def _cross_entropy(axes: Axes, x: Any, i: Any) -> Any:
    (axis,) = axes
    places = jnp.broadcast_to(i, [1 if k == axis else n for k, n in enumerate(x.shape)])
    return -jnp.squeeze(jnp.take_along_axis(jax.nn.log_softmax(x, axis), places, axis, mode="clip"), axis)


# Functions of axes, and of operands of one rank: a dimension that an operand lacks has size 1.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mean": lambda axes, x: jnp.mean(x, axes),
    "variance": lambda axes, x: jnp.var(x, axes),
    "logsumexp": lambda axes, x: jax.nn.logsumexp(x, axes),
    "softmax": lambda axes, x: jax.nn.softmax(x, axes),
    "log_softmax": lambda axes, x: jax.nn.log_softmax(x, axes),
    "masked_softmax": lambda axes, p, x: jax.nn.softmax(x, axes, where=p),
    "masked_logsumexp": lambda axes, p, x: jax.nn.logsumexp(x, axes, where=p),
    "rms_norm": _rms_norm,
    "layer_norm": lambda axes, x, w, b, e: _standardized(axes, x, e) * w + b,
    "batch_norm": lambda axes, x, w, b, e: _standardized(axes, x, e) * w + b,
    "standardize": _standardized,
    "trained_batch_norm": lambda axes, x, m, v, w, b, e: jax.nn.standardize(x, (), m, v, e) * w + b,
    "over_sum": lambda axes, x: x / jnp.sum(x, axes, keepdims=True),
    "less_logarithm": lambda axes, x: x - jnp.log(jnp.sum(jnp.exp(x), axes, keepdims=True)),
    "sigmoid": lambda axes, x: jax.nn.sigmoid(x),
    "silu": lambda axes, x: jax.nn.silu(x),
    "tanh": lambda axes, x: jnp.tanh(x),
    "gelu": lambda axes, x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda axes, x: jax.nn.gelu(x, approximate=True),
    "softplus": lambda axes, x: jax.nn.softplus(x),
    "cross_entropy": _cross_entropy,
    "soft_cross_entropy": lambda axes, x, y: -jnp.sum(y * jax.nn.log_softmax(x, axes), axes),
}


def attention(a: Any, k: Any, v: Any, mask: Any) -> Any:
    """Run JAX's attention, with one head.

    Args:
        a: scaled queries `[batch, queries, features]`.
        k: keys `[batch, keys, features]`.
        v: values `[batch, keys, results]`; where there are more results than features, or fewer, zeros are added.
        mask: `[batch, queries, keys]`, or None.
    """
    results = v.shape[2]
    width = max(a.shape[2], results)
    a, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[2])))[:, :, None].astype(jnp.float32) for x in (a, k, v))
    mask = None if mask is None else mask[:, None]
    return jax.nn.dot_product_attention(a, k, v, mask=mask, scale=1.0)[:, :, 0, :results]


def run_composite(name: str, groups: Sequence[str], operands: Sequence[tuple[Any, tuple[Dimension, ...]]]) -> Ran | None:
    """Run a composite by JAX's function.

    Args:
        name: of the composite.
        groups: its groups of dimensions.
        operands: arrays and their dimensions by position.

    Returns:
        The result and its dimensions; None if the function does not take operands of such dimensions.
    """
    if name in ("attention", "masked_attention"):
        return _run_attention(groups, operands)
    dims = max((d for _, d in operands), key=len)
    if any(not set(own) <= set(dims) for _, own in operands):
        return None
    axes = tuple(k for k, (g, _) in enumerate(dims) if g in groups)
    value = FUNCTIONS[name](axes, *(_aligned(x, own, dims) for x, own in operands))
    return value, dims if value.ndim == len(dims) else tuple(d for k, d in enumerate(dims) if k not in axes)


def _aligned(x: Any, own: Sequence[Dimension], dims: Sequence[Dimension]) -> Any:
    """Return an array with a dimension of size 1 for each that it lacks."""
    array = jnp.transpose(x, [own.index(d) for d in dims if d in own])
    return jnp.expand_dims(array, [k for k, d in enumerate(dims) if d not in own])


def _run_attention(groups: Sequence[str], operands: Sequence[tuple[Any, tuple[Dimension, ...]]]) -> Ran | None:
    (features, keys), masked = groups, len(operands) == 5
    (c, scaled), (a, of_a), (k, of_k), (v, of_v) = operands[masked:]
    contracted, summed = (tuple(d for d in of_k if d[0] == g) for g in (features, keys))
    batch = tuple(d for d in of_a if d in of_k and d in of_v and d not in contracted)
    queries = tuple(d for d in of_a if d not in (*batch, *contracted))
    results = tuple(d for d in of_v if d not in (*batch, *summed))
    whole = {*batch, *summed}
    if scaled or {*of_k} != whole | {*contracted} or not {*contracted} <= {*of_a} or {*queries} & {*of_k, *of_v}:
        return None
    if {*results} & {*queries, *batch} or not whole <= {*of_v}:
        return None
    sizes = dict(zip(of_a + of_k + of_v, a.shape + k.shape + v.shape, strict=True))

    def merged(x: Any, own: Sequence[Dimension], *parts: Sequence[Dimension]) -> Any:
        dims = [d for part in parts for d in part]
        array = jnp.broadcast_to(_aligned(x, own, dims), [sizes[d] for d in dims])
        return array.reshape([math.prod(sizes[d] for d in part) for part in parts])

    mask = None
    if masked:
        p, of_p = operands[0]
        if not {*of_p} <= {*batch, *queries, *summed}:
            return None
        mask = merged(p, of_p, batch, queries, summed)
    value = attention(
        merged(a * c, of_a, batch, queries, contracted),
        merged(k, of_k, batch, summed, contracted),
        merged(v, of_v, batch, summed, results),
        mask,
    )
    dims = batch + queries + results
    return value.reshape([sizes[d] for d in dims]), dims
