"""A primitive for the rows that a look-up read, with gradients only for indices inside the table.

For an index that breaks the promise to lie inside the table, JAX reads the nearest row and drops its gradient. If a rewritten
program changed the indices (because tables were stacked or padded), this primitive drops the gradients by the original indices. It
is linear, and its derivatives of any order are those of JAX's look-up.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

PROMISED = "promised"


def drop_outside_gradients(rows: jax.Array, ids: jax.Array, *, size: int) -> jax.Array:
    """Return the rows, as a linear solve of the identity whose transpose drops the cotangents of indices outside the table.

    Args:
        rows: the rows read, shape `[*ids, h]`.
        ids: indices, of a type that can represent `size - 1`.
        size: the number of rows of the table.
    """
    inside = (ids >= 0) & (ids <= jnp.asarray(size - 1, ids.dtype))
    mask = lax.broadcast_in_dim(inside, rows.shape, range(ids.ndim))

    def transpose(_: Any, cotangent: jax.Array) -> jax.Array:
        return lax.select(mask, cotangent, jnp.zeros_like(cotangent))

    return lax.custom_linear_solve(lambda x: x, rows, lambda _, x: x, transpose)


_primitive = core.Primitive(PROMISED)
_primitive.def_impl(drop_outside_gradients)
_primitive.def_abstract_eval(lambda rows, ids, *, size: rows)
mlir.register_lowering(_primitive, mlir.lower_fun(drop_outside_gradients, multiple_results=False))


def _derivative(primals: Any, tangents: Any, *, size: int) -> tuple[Any, Any]:
    return jax.jvp(
        lambda rows: drop_outside_gradients(rows, primals[1], size=size), primals[:1], (ad.instantiate_zeros(tangents[0]),)
    )


def _batched(operands: Any, dims: Any, *, size: int) -> tuple[jax.Array, int]:
    return jax.vmap(partial(drop_outside_gradients, size=size), dims)(*operands), 0


ad.primitive_jvps[_primitive] = _derivative
batching.primitive_batchers[_primitive] = _batched


def promised(rows: jax.Array, ids: jax.Array, size: int) -> jax.Array:
    """Return the rows read, without gradients for those whose index lies outside a table of `size` rows."""
    return _primitive.bind(rows, ids, size=size)
