"""A primitive for rotation: the rows of an array move along a dimension, and those that leave at one end return at the other.

As slices and a concatenation no dimension that is cut could be divided. As one operator, neighbours exchange the rows that move.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

ROTATION = "rotate"


def rotated(x: jax.Array, *, shift: int, dimension: int) -> jax.Array:
    """Return slices of an array, joined in the other order: result index `i + shift` is operand index `i`."""
    n = x.shape[dimension]
    cut = (n - shift) % n if n else 0
    return lax.concatenate([lax.slice_in_dim(x, cut, n, axis=dimension), lax.slice_in_dim(x, 0, cut, axis=dimension)], dimension)


_primitive = core.Primitive(ROTATION)
_primitive.def_impl(rotated)
_primitive.def_abstract_eval(lambda x, *, shift, dimension: x)
mlir.register_lowering(_primitive, mlir.lower_fun(rotated, multiple_results=False))


def _transposed(cotangent: Any, _: Any, *, shift: int, dimension: int) -> list[Any]:
    return [rotate(cotangent, -shift, dimension)]


def _batched(operands: Any, dims: Any, *, shift: int, dimension: int) -> tuple[jax.Array, int]:
    (x,), (batch,) = operands, dims
    return rotate(x, shift, dimension + (batch <= dimension)), batch


ad.deflinear2(_primitive, _transposed)
batching.primitive_batchers[_primitive] = _batched


def rotate(x: jax.Array, shift: int, dimension: int) -> jax.Array:
    """Rotate an array along a dimension."""
    n = x.shape[dimension]
    return _primitive.bind(x, shift=shift % n, dimension=dimension) if n and shift % n else x
