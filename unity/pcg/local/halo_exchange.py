"""Halo exchange inside `shard_map`: `ppermute` sends the edges of slices to neighbours, and their gradients back."""

from __future__ import annotations

from math import prod

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.operators.layout import PlacedTensor
from unity.pcg.propagation.halos import Message, messages
from unity.pcg.types.factors import WRAPPED, Halo
from unity.pcg.types.neutral_elements import neutral_element
from unity.pcg.types.varying_axes import vary, varying


def exchanged(x: jax.Array, placed: PlacedTensor, dim: int, halo: Halo) -> jax.Array:
    """Return a piece extended by its neighbours' indices before and after it along a dimension.

    `x` may already be extended along other dimensions.
    """
    names = tuple(name for name, _ in placed.along(dim))
    devices, piece = prod(digit.size for _, digit in placed.along(dim)), x.shape[dim]
    parts = {0: x}
    for message in messages(halo, piece, devices):
        start = piece - message.indices if message.ahead > 0 else 0
        edge = lax.slice_in_dim(x, start, start + message.indices, axis=dim)
        parts[-message.ahead] = _received(edge, names, devices, message, halo.outside)
    # a halo may be larger than all other pieces together: the rest lies outside for every device
    short = [width - (devices - 1) * piece for width in (halo.before, halo.after)]
    for k, rows in zip((-devices, devices), short, strict=True):
        if rows > 0:
            shape = (*x.shape[:dim], rows, *x.shape[dim + 1 :])
            parts[k] = vary(jnp.full(shape, neutral_element(halo.outside, x.dtype), x.dtype), varying(x))
    return jnp.concatenate([parts[k] for k in sorted(parts)], dim)


def _received(edge: jax.Array, names: tuple[str, ...], devices: int, message: Message, outside: str) -> jax.Array:
    """Return the edge that a neighbour sends, or neutral elements on a device without that neighbour."""
    ahead = message.ahead
    wrapped = outside == WRAPPED
    pairs = [(k, (k + ahead) % devices) for k in range(devices) if wrapped or 0 <= k + ahead < devices]
    received = lax.ppermute(edge, names, pairs)
    if wrapped or outside == "sum":  # a device that receives nothing has zeros
        return received
    sender = lax.axis_index(names) - ahead
    beyond = jnp.asarray(neutral_element(outside, edge.dtype), edge.dtype)
    return jnp.where((sender >= 0) & (sender < devices), received, beyond)
