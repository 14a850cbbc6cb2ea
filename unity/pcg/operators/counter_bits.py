"""Random bits of some elements of a tensor, from their numbers in the whole tensor.

    bits(key)[number]  =  threefry(key, number)

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; JAX's default,
`jax_threefry_partitionable`) computes the bits of each element independently. A device therefore draws the bits of its part alone,
and all parts together equal the bits that one device would draw, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from unity.pcg.types.varying_axes import aligned

WORD = 1 << 32


def is_counter_based(dtype: Any) -> bool:
    """Return whether the bits of keys of a type are a function of each element's number."""
    return str(dtype) == "key<fry>" and bool(jax.config.jax_threefry_partitionable)  # pyright: ignore[reportAttributeAccessIssue]


def bits(keys: jax.Array, width: int, shape: Sequence[int], positions: Sequence[jax.Array]) -> jax.Array:
    """Return `jax.random.bits(key, shape)` of every key, at some positions along each dimension.

    Args:
        keys: shape `[*k]`, of a counter-based type.
        width: bits of an element of the result: 8, 16, 32 or 64.
        shape: the shape of the whole tensor that one key draws, fewer than 2⁴⁸ elements.
        positions: for each dimension of `shape` the positions to draw, int32 or uint32, shape `[n]`.

    Returns:
        Unsigned integers, shape `[*k, *n]`.
    """
    numbers = _numbers(shape, positions)
    words = jnp.moveaxis(jax.random.key_data(keys), -1, 0)
    if keys.ndim:  # the words of a single key are not broadcast
        whole = (*keys.shape, *numbers[0].shape)
        words = (jnp.broadcast_to(x.reshape(*keys.shape, *(1,) * len(shape)), whole) for x in words)
        numbers = (jnp.broadcast_to(x, whole) for x in numbers)
    # JAX loops over threefry's rounds: a constant key must vary over the mesh axes over which the numbers of elements do.
    high, low = threefry2x32_p.bind(*aligned([*words, *numbers]))
    if width == 64:
        return high.astype(jnp.uint64) << np.uint64(32) | low.astype(jnp.uint64)
    return (high ^ low).astype(f"uint{width}")


def _numbers(shape: Sequence[int], positions: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return the row-major numbers of elements in the whole tensor, as high and low words."""
    high = low = jnp.zeros(tuple(p.size for p in positions), jnp.uint32)
    for dim, along in enumerate(positions):
        stride, column = prod(shape[dim + 1 :]), (-1, *(1,) * (len(shape) - dim - 1))
        offset_high, offset_low = (x.reshape(column) for x in _product(along.astype(jnp.uint32), stride))
        low = low + offset_low
        if prod(shape) > WORD:
            high = high + offset_high + (low < offset_low).astype(jnp.uint32)
    return high, low


def _product(numbers: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Return numbers times a size as high and low words, multiplied sixteen bits at a time."""
    a, b = numbers >> 16, numbers & 0xFFFF
    c, d = np.uint32(size >> 16), np.uint32(size & 0xFFFF)
    middle = a * d + (b * d >> 16)
    rest = b * c + (middle & 0xFFFF)
    return a * c + (middle >> 16) + (rest >> 16), numbers * np.uint32(size % WORD)
