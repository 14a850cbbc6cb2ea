"""Random bits of some elements, by their numbers in the whole tensor.

    bits(key)[number]  =  threefry(key, number)

A generator whose bits are those of a counter (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; JAX's default,
`jax_threefry_partitionable`) gives every element its own. So whoever has a part of a tensor draws that part's bits, and no others;
together they are those that one device would draw, bit by bit.
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


def counted(dtype: Any) -> bool:
    """Whether keys of a type give each element bits by its number."""
    return str(dtype) == "key<fry>" and bool(jax.config.jax_threefry_partitionable)  # pyright: ignore[reportAttributeAccessIssue]


def bits(keys: jax.Array, width: int, shape: Sequence[int], positions: Sequence[jax.Array]) -> jax.Array:
    """`jax.random.bits(key, shape)` of every key, at some positions along each dimension.

    Args:
        keys: shape `[*k]`, of a type that is `counted`.
        width: of the result, in bits: 8, 16, 32 or 64.
        shape: what one key draws as a whole, fewer than 2⁴⁸ elements.
        positions: for each of its dimensions those that are wanted, int32 or uint32, shape `[n]`.

    Returns:
        Unsigned integers, shape `[*k, *n]`.
    """
    numbers = _numbers(shape, positions)
    words = jnp.moveaxis(jax.random.key_data(keys), -1, 0)
    if keys.ndim:  # a key's words are not made as large as what it draws unless there are several
        whole = (*keys.shape, *numbers[0].shape)
        words = (jnp.broadcast_to(x.reshape(*keys.shape, *(1,) * len(shape)), whole) for x in words)
        numbers = (jnp.broadcast_to(x, whole) for x in numbers)
    # JAX loops over threefry's rounds: a key that is a constant must differ between devices as the numbers of elements do.
    one, other = threefry2x32_p.bind(*aligned([*words, *numbers]))
    if width == 64:
        return one.astype(jnp.uint64) << np.uint64(32) | other.astype(jnp.uint64)
    return (one ^ other).astype(f"uint{width}")


def _numbers(shape: Sequence[int], positions: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The numbers of elements in the whole tensor, row by row, in two words."""
    high = low = jnp.zeros(tuple(p.size for p in positions), jnp.uint32)
    for dim, along in enumerate(positions):
        stride, place = prod(shape[dim + 1 :]), (-1, *(1,) * (len(shape) - dim - 1))
        up, down = (x.reshape(place) for x in _product(along.astype(jnp.uint32), stride))
        low = low + down
        if prod(shape) > WORD:
            high = high + up + (low < down).astype(jnp.uint32)
    return high, low


def _product(numbers: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Numbers times a size, in two words: sixteen bits at a time."""
    a, b = numbers >> 16, numbers & 0xFFFF
    c, d = np.uint32(size >> 16), np.uint32(size & 0xFFFF)
    middle = a * d + (b * d >> 16)
    rest = b * c + (middle & 0xFFFF)
    return a * c + (middle >> 16) + (rest >> 16), numbers * np.uint32(size % WORD)
