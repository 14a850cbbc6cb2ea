"""Halos as they run inside `shard_map`: the edges of neighbours' slices, by `ppermute`; backward, their gradients go back."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.operators.layout import Placed
from unity.pcg.propagation.halos import Message, messages
from unity.pcg.types.factors import Halo
from unity.pcg.types.varying_axes import vary, varying


def exchanged(x: jax.Array, placed: Placed, dim: int, halo: Halo) -> jax.Array:
    """A piece with what its neighbours hold before and after it along a dimension. `x` may be extended along others."""
    names = tuple(name for name, _ in placed.along(dim))
    devices, piece = prod(digit.size for _, digit in placed.along(dim)), x.shape[dim]
    parts = {0: x}
    for message in messages(halo, piece, devices):
        start = piece - message.indices if message.ahead > 0 else 0
        edge = lax.slice_in_dim(x, start, start + message.indices, axis=dim)
        parts[-message.ahead] = _arrived(edge, names, devices, message, halo.outside)
    # a halo may be larger than all other pieces together: the rest lies outside for every device
    short = [wanted - (devices - 1) * piece for wanted in (halo.before, halo.after)]
    for k, rows in zip((-devices, devices), short, strict=True):
        if rows > 0:
            shape = (*x.shape[:dim], rows, *x.shape[dim + 1 :])
            parts[k] = vary(jnp.broadcast_to(nothing(halo.outside, x.dtype), shape), varying(x))
    return jnp.concatenate([parts[k] for k in sorted(parts)], dim)


def _arrived(edge: jax.Array, names: tuple[str, ...], devices: int, message: Message, outside: str) -> jax.Array:
    """What comes from a neighbour; where there is none, what lies outside of the tensor."""
    ahead = message.ahead
    pairs = [(k, k + ahead) for k in range(devices) if 0 <= k + ahead < devices]
    found = lax.ppermute(edge, names, pairs)
    if outside == "sum":  # zeros are what arrives where nothing does
        return found
    sender = lax.axis_index(names) - ahead
    return jnp.where((sender >= 0) & (sender < devices), found, nothing(outside, edge.dtype))


def nothing(outside: str, dtype: Any) -> jax.Array:
    """What changes nothing in a sum, max or min."""
    if outside == "sum":
        return jnp.zeros((), dtype)
    low = outside == "max"
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(-jnp.inf if low else jnp.inf, dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return jnp.asarray(not low)
    return jnp.asarray(jnp.iinfo(dtype).min if low else jnp.iinfo(dtype).max, dtype)
