"""The values that a look-up read, with a gradient only where its index lies inside of the table.

JAX reads the nearest row for an index that breaks the promise to lie inside, and drops its gradient. A program whose indices were
computed with before (because tables were stacked, or filled up) says so by this primitive. It is linear, and not its transpose's
transpose alone: derivatives of any order are those of JAX's own look-up.
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


def kept(rows: jax.Array, ids: jax.Array, *, size: int) -> jax.Array:
    """Expresses `promised` in JAX's own terms: a linear solve of the identity, whose transpose drops cotangents of indices outside.

    Args:
        rows: what was read, shape `[*ids, h]`.
        ids: indices, of a type that holds `size - 1`.
        size: the number of the table's rows.
    """
    inside = (ids >= 0) & (ids <= jnp.asarray(size - 1, ids.dtype))
    spread = lax.broadcast_in_dim(inside, rows.shape, range(ids.ndim))

    def dropped(_: Any, cotangent: jax.Array) -> jax.Array:
        return lax.select(spread, cotangent, jnp.zeros_like(cotangent))

    return lax.custom_linear_solve(lambda x: x, rows, lambda _, x: x, dropped)


_primitive = core.Primitive(PROMISED)
_primitive.def_impl(kept)
_primitive.def_abstract_eval(lambda rows, ids, *, size: rows)
mlir.register_lowering(_primitive, mlir.lower_fun(kept, multiple_results=False))


def _derivative(primals: Any, tangents: Any, *, size: int) -> tuple[Any, Any]:
    return jax.jvp(lambda rows: kept(rows, primals[1], size=size), primals[:1], (ad.instantiate_zeros(tangents[0]),))


def _batched(operands: Any, dims: Any, *, size: int) -> tuple[jax.Array, int]:
    return jax.vmap(partial(kept, size=size), dims)(*operands), 0


ad.primitive_jvps[_primitive] = _derivative
batching.primitive_batchers[_primitive] = _batched


def promised(rows: jax.Array, ids: jax.Array, size: int) -> jax.Array:
    """The rows read, without the gradient of those whose index lies outside of a table of `size` rows."""
    return _primitive.bind(rows, ids, size=size)
