"""Micro-batches of samples: of M, number m has the samples m, m + M, m + 2 M and so on.

A device with a slice of the samples thus has a slice of each micro-batch. A dimension of n samples, as `[n / M, M]`, is divided in
its inner digit. Whether a program works on each micro-batch by itself is therefore whether it works along an axis with that state:
operators that work on slices of samples may still join neighbours, such as pairs or ghost batches, which are in different
micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from unity.pcg.ir.program import Body
from unity.pcg.parallel.stages import Mixed
from unity.pcg.propagation.placement import along_axis
from unity.pcg.propagation.propagation import Unmatched
from unity.pcg.propagation.solved_prefix import longest_solved_prefix
from unity.pcg.types.parallel_type import State, partitioned
from unity.transforms.splice import operator_at


class Uneven(Mixed):
    """Raised for an operator that cannot work on micro-batches separately, but may be able to if there are fewer of them."""


def sample_state(dim: int, size: int, count: int) -> State:
    """Return the state of a dimension with `size` samples along the axis of `count` micro-batches.

    Each sample may have several adjacent indices.
    """
    return partitioned(dim) if count == 1 else State("P", dim, size // count)


def check_separable(body: Body, operands: Sequence[State], results: Sequence[State], count: int) -> None:
    """Raise Mixed unless a program works on each of `count` micro-batches by itself, with these states along their axis."""
    try:
        alone = along_axis(body, tuple(operands), tuple(results))
    except Unmatched:
        raise _refusal(body, operands, count) from None
    reduced = set() if alone is None else alone.reduced.keys()
    for e in body.equations:
        if not reduced.isdisjoint(e.results):
            raise Mixed(f"{operator_at(e)} reduces over samples of several of {count} micro-batches")
    if alone is None or alone.changes or alone.results != tuple(results):
        raise _refusal(body, operands, count)
    for e, match in zip(body.equations, alone.matches, strict=False):
        if match.communicates:  # such as a loop that goes on until all samples have converged
            raise Mixed(f"{operator_at(e)} does not work on each sample by itself")
        if match.size % count:  # such as x[::2], or the reshaping of samples into pairs
            raise Uneven(f"{operator_at(e)} does not work on each of {count} micro-batches by itself")


def _refusal(body: Body, operands: Sequence[State], count: int) -> Mixed:
    """Return the refusal of a program that has no solution, or one in which devices would communicate."""
    _, good = longest_solved_prefix(body, dict(zip(body.inputs, operands, strict=True)))
    if good == len(body.equations):
        return Mixed(f"the samples cannot be divided into {count} micro-batches that add up")
    return Mixed(f"{operator_at(body.equations[good])} does not work on each of {count} micro-batches by itself")


def split(x: jax.Array, dim: int, parts: int, size: int | None = None) -> jax.Array:
    """Split a dimension of n indices into strided parts, as `[parts, ..., n / parts, ...]`.

    `size` is the number of samples, if each has several adjacent indices, which then stay together.
    """
    n = x.shape[dim]
    block = n // (size or n)
    shape = (*x.shape[:dim], n // block // parts, parts, block, *x.shape[dim + 1 :])
    parts_first = jnp.moveaxis(x.reshape(shape), dim + 1, 0)
    return parts_first.reshape(parts, *x.shape[:dim], n // parts, *x.shape[dim + 1 :])


def joined(x: jax.Array, dim: int, size: int | None = None) -> jax.Array:
    """Invert `split`."""
    parts, n = x.shape[0], x.shape[0] * x.shape[dim + 1]
    block = n // (size or n)
    shape = (parts, *x.shape[1 : dim + 1], n // block // parts, block, *x.shape[dim + 2 :])
    x = jnp.moveaxis(x.reshape(shape), 0, dim + 1)
    return x.reshape(*x.shape[:dim], n, *x.shape[dim + 3 :])
