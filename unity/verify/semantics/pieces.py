"""What devices hold of a tensor, in symbols: parts of partial sums are free."""

from __future__ import annotations

import numpy as np

from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, Type
from unity.verify.semantics.domains import Array
from unity.verify.semantics.primitives.core import PLAIN, Value
from unity.verify.semantics.stacks import spread
from unity.verify.semantics.symbolic import Symbolic


def pieces(value: Value, type_: Type, axes: tuple[Axis, ...], domain: Symbolic, name: str, rng: np.random.Generator) -> Array:
    """`[*devices, *piece]` of a whole value: parts of partial sums are fresh symbols (random, if it is concrete)."""
    parts, shape = None, (*(a.size for a in axes), *value.array.shape)
    if PARTIAL in type_:
        parts = rng.integers(-4, 5, shape).astype(value.array.dtype) if value.known else domain.symbols(f"{name}@", shape)
    return spread(value.array, value.array.ndim, type_, axes, PLAIN if value.known else domain, parts)


def summed(array: Array, type_: Type, known: bool, domain: Symbolic) -> Array:
    """`[*devices, *piece]` with partial sums put together, on every device."""
    for i, state in enumerate(type_):
        if state == PARTIAL:
            total = np.sum(array, i, dtype=array.dtype) if known else domain.total(array, i)
            array = np.broadcast_to(np.expand_dims(total, i), array.shape)
    return array
