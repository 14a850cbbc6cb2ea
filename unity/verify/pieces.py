"""What devices hold of a tensor, in symbols: parts of partial sums are free."""

from __future__ import annotations

import numpy as np

from unity.pcg.axis import Axis
from unity.pcg.state import PARTIAL, Type
from unity.verify.domains import Array
from unity.verify.primitives.core import Value
from unity.verify.stacks import cut
from unity.verify.symbolic import Symbolic


def pieces(value: Value, type_: Type, axes: tuple[Axis, ...], domain: Symbolic, name: str, rng: np.random.Generator) -> Array:
    """`[*devices, *piece]` of a whole value: parts of partial sums are fresh symbols (random, if it is concrete)."""
    whole = np.broadcast_to(value.array, (*(a.size for a in axes), *value.array.shape))
    for i, (state, axis) in enumerate(zip(type_, axes, strict=True)):
        if state == PARTIAL:
            whole = _parts(whole, i, value.known, f"{name}@{axis.name}", type_, domain, rng)
    return cut(whole, whole.ndim - len(axes), type_, axes)


def _parts(whole: Array, i: int, known: bool, name: str, type_: Type, domain: Symbolic, rng: np.random.Generator) -> Array:
    """Parts along device dimension i that add up to `whole`, which is the same all along it."""
    moved = np.moveaxis(whole, i, 0)
    shape = (len(moved) - 1, *moved.shape[1:])
    free = rng.integers(-4, 5, shape).astype(whole.dtype) if known else domain.symbols(name, shape)
    for position, k in enumerate((k for k in range(len(type_)) if k != i), 1):
        if type_[k] != PARTIAL or k > i:  # devices along other axes hold the same part
            free = np.broadcast_to(np.take(free, [0], position), free.shape)
    last = moved[0] - free.sum(0, dtype=whole.dtype) if known else domain.sub(moved[0], domain.total(free, 0))
    return np.moveaxis(np.concatenate([free, last[None]]), 0, i)


def summed(array: Array, type_: Type, known: bool, domain: Symbolic) -> Array:
    """`[*devices, *piece]` with partial sums put together, on every device."""
    for i, state in enumerate(type_):
        if state == PARTIAL:
            total = np.sum(array, i, dtype=array.dtype) if known else domain.total(array, i)
            array = np.broadcast_to(np.expand_dims(total, i), array.shape)
    return array
