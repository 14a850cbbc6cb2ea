"""Look-ups in padded tables: an index that lies outside of the table must not reach its padding.

An index that JAX clamps is clamped to the last row first; one for which JAX reads a fill value is moved behind the padding; and for
one that is promised to be inside, which JAX clamps without a gradient, the gradient of what it reads is dropped (`promised`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.ir.program import Equation, Tensor
from unity.pcg.operators.promised_reads import promised

Mode = lax.GatherScatterMode


def can_look_up(e: Equation, indices: Tensor, sizes: Mapping[int, int]) -> bool:
    """Return whether a gather can read a table that is padded along looked-up dimensions.

    Args:
        e: The gather.
        indices: Its indices.
        sizes: The padded sizes of these dimensions.
    """
    numbers, params = e.params["dimension_numbers"], e.params
    if any(d not in numbers.start_index_map or params["slice_sizes"][d] != 1 for d in sizes):
        return False
    if any(size > jnp.iinfo(indices.dtype).max for size in sizes.values()):
        return False
    if params["mode"] == Mode.PROMISE_IN_BOUNDS:  # the mask of dropped gradients belongs to one index for each read row
        spread = indices.ndim - 1
        return len(numbers.start_index_map) == 1 and all(d >= spread for d in numbers.offset_dims)
    return params["mode"] in (Mode.CLIP, Mode.FILL_OR_DROP)


def looked_up(e: Equation, true: Mapping[int, int], params: Mapping[str, Any], table: jax.Array, indices: jax.Array) -> jax.Array:
    """Return the result of a gather from a padded table.

    Args:
        e: The gather.
        true: The true sizes of the padded dimensions that it looks up.
        params: Its parameters for the padded table.
        table: The padded table.
        indices: The indices.
    """
    columns = {k: true[d] for k, d in enumerate(e.params["dimension_numbers"].start_index_map) if d in true}
    safe = indices
    for k, rows in columns.items():
        single = indices.shape[-1] == 1
        column = safe if single else lax.slice_in_dim(safe, k, k + 1, axis=-1)
        if e.params["mode"] == Mode.FILL_OR_DROP:
            read = column.astype(jnp.int32) if column.dtype.itemsize > 4 else column  # JAX reads the lower half of 64 bits
            behind = jnp.asarray(jnp.iinfo(column.dtype).max, column.dtype)
            column = jnp.where(read >= jnp.asarray(rows, read.dtype), behind, column)
        else:
            column = lax.min(column, jnp.full(column.shape, rows - 1, column.dtype))
        safe = column if single else lax.dynamic_update_slice_in_dim(safe, column, k, indices.ndim - 1)
    result = e.primitive.bind(table, safe, **params)
    if e.params["mode"] == Mode.PROMISE_IN_BOUNDS and jnp.issubdtype(table.dtype, jnp.inexact):
        (rows,) = true.values()
        return promised(result, indices.reshape(indices.shape[:-1]), rows)
    return result
