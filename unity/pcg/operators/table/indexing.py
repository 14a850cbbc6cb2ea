"""Gather, scatter and dynamic slices, which may be partitioned by rows, by columns, or by indices."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unity.pcg.operators.layout import Layout
from unity.pcg.operators.promised_reads import PROMISED, drop_outside_gradients
from unity.pcg.operators.table.reshaping import is_block, part_of
from unity.pcg.types.factors import OPERANDS_AND_RESULT, Factor, Facts, Place, Slot, Spec, at, operator
from unity.pcg.types.parallel_type import PARTIAL, Shape
from unity.pcg.types.varying_axes import position_along

Mode = lax.GatherScatterMode


def _window_pieces(operands: list[jax.Array], layout: Layout) -> list:
    table, *starts = operands
    sizes = layout.results[0].local_shape
    return layout.bind(table, *_clamped(starts, table.shape, sizes), slice_sizes=sizes)


def _updated_pieces(operands: list[jax.Array], layout: Layout) -> list:
    table, update, *starts = operands
    return layout.bind(table, update, *_clamped(starts, table.shape, update.shape))


def _clamped(starts: list[jax.Array], shape: Shape, sizes: Shape) -> list[jax.Array]:
    """Return the starts of a slice as JAX clamps them.

    Before JAX 0.12, XLA joins two slices, such as the user's and that of a device's part of it, and clamps the sum of their starts.
    """
    if jax.__version_info__ >= (0, 12):
        return starts
    return [
        lax.clamp(jnp.zeros((), i.dtype), i, jnp.asarray(min(n - m, int(jnp.iinfo(i.dtype).max)), i.dtype))
        for i, n, m in zip(starts, shape, sizes, strict=True)
    ]


@operator("dynamic_slice", local=_window_pieces, facts=Facts(alone=True))
def dynamic_slice(params: Any, operands: Any, results: Any) -> Spec:
    """Operand and one start index for each dimension. Dimensions of which the slice has all indices are parallel."""
    shape, rest = operands[0].shape, (None,) * (len(operands) - 1)
    whole = [i for i, (n, m) in enumerate(zip(shape, results[0].shape, strict=True)) if n == m and n > 1]
    factors = tuple(Factor(f"d{i}", shape[i], (Slot(i), *rest), (Slot(i),)) for i in whole)
    reads, view = part_of(results[0].shape, shape), is_block(results[0].shape, shape)
    return Spec(factors, (frozenset({0}),), reads=reads, selects=True, view=view)


@operator("dynamic_update_slice", local=_updated_pieces, facts=Facts(alone=True))
def dynamic_update_slice(params: Any, operands: Any, results: Any) -> Spec:
    """Operand, update and start indices. Dimensions of which the update has all indices are parallel."""
    shape, rest = operands[0].shape, (None,) * (len(operands) - 2)
    whole = [i for i, (n, m) in enumerate(zip(shape, operands[1].shape, strict=True)) if n == m and n > 1]
    return Spec(tuple(Factor(f"d{i}", shape[i], (Slot(i), Slot(i), *rest), (Slot(i),)) for i in whole), (frozenset({0, 1}),))


def _gather_pieces(operands: list[jax.Array], layout: Layout) -> list:
    """Gather from a piece of the table, with zeros for rows of other devices, so that the results are partial sums.

    An index outside the table that JAX clamps belongs to the device with the nearest row. If indices are promised to be inside, JAX
    reads the nearest row and drops its gradient; so does the local gather, since such an index is outside the piece, too.
    """
    table, indices = operands
    numbers, here, mode = layout.params["dimension_numbers"], layout.operands[0], layout.params["mode"]
    whole = layout.params["slice_sizes"]
    sizes = tuple(m if k == n else k for k, m, n in zip(whole, here.local_shape, here.shape, strict=True))
    rows = [d for d in _looked_up(layout.params) if here.along(d)]
    if not rows:
        return layout.bind(table, indices, slice_sizes=sizes)
    indices = indices.astype(jnp.int32 if indices.dtype.itemsize < 4 else indices.dtype)  # it must represent the table's size
    fills, promises = mode == Mode.FILL_OR_DROP, mode == Mode.PROMISE_IN_BOUNDS
    outside = ~jnp.zeros((), indices.dtype)  # -1, or the largest
    valid = mine = jnp.ones(indices.shape[:-1], bool)
    local = dict[int, jax.Array]()
    for column, dim in enumerate(numbers.start_index_map):
        index, last = indices[..., column], here.shape[dim] - whole[dim]
        read = _as_filled(index) if fills else index
        low, high, place = read < 0, read > last, jnp.clip(read, 0, last)
        valid &= ~(low | high)
        if dim in rows:
            on_device, place = here.find(place, dim)
            mine &= on_device
        if promises:
            local[column] = jnp.where(low, outside, jnp.where(high, here.local_shape[dim], place)) if dim in rows else index
        else:
            local[column] = place.astype(index.dtype) + (index - read.astype(index.dtype))
    mine = mine & valid if fills else mine
    others = jnp.zeros_like(outside) if promises else outside  # without the promise, indices outside read zeros
    for column, place in local.items():
        indices = indices.at[..., column].set(jnp.where(mine, place, others))
    changed = {} if promises else {"mode": Mode.FILL_OR_DROP, "fill_value": 0}
    unordered = {"indices_are_sorted": False, "unique_indices": False}  # indices of other devices' rows were replaced
    out = layout.bind(table, indices, slice_sizes=sizes, **unordered, **changed)[0]
    spread = [i for i in range(out.ndim) if i not in numbers.offset_dims]
    if promises:
        out = jnp.where(lax.broadcast_in_dim(mine, out.shape, spread), out, jnp.zeros((), out.dtype))
    if fills:  # one device alone supplies the fill value
        first = ~valid
        for axis in {axis for dim in rows for axis, _ in here.along(dim)}:
            first &= position_along(axis) == 0
        out = jnp.where(lax.broadcast_in_dim(first, out.shape, spread), fill_value(layout.params, out.dtype), out)
    return [out]


def _as_filled(index: jax.Array) -> jax.Array:
    """Return an index as JAX reads it with a fill value: the lower half of 64 bits. The gradient uses all bits."""
    return index.astype(jnp.int32) if index.dtype.itemsize > 4 else index


def _looked_up(params: Any) -> list[int]:
    """Return the indexed dimensions from which one position is taken, whether or not the result keeps them with size one."""
    return sorted(i for i in params["dimension_numbers"].start_index_map if params["slice_sizes"][i] == 1)


def fill_value(params: Any, dtype: Any) -> jax.Array:
    """Return the value that a gather reads out of bounds: its parameter, or by default NaN or an extreme integer."""
    value = params["fill_value"]
    if value is None:
        kind = np.dtype(dtype).kind if not jnp.issubdtype(dtype, jnp.inexact) else "f"
        value = jnp.nan if kind == "f" else True if kind == "b" else (jnp.iinfo(dtype).min if kind == "i" else jnp.iinfo(dtype).max)
    return jnp.asarray(value, dtype)


@operator("gather", local=_gather_pieces, exact=True, facts=Facts(linear_in=(at(0),), looks_up=True, extends=True))
def gather(params: Any, operands: Any, results: Any) -> Spec:
    """Table and indices `[..., index]`. Columns, batching dimensions and indices are parallel, rows are a reduction."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    table, indices = operands
    factors: list[Factor] = []
    offsets = [i for i in range(table.ndim) if i not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    for i, out in zip(offsets, numbers.offset_dims, strict=True):
        if sizes[i] == table.shape[i]:
            factors.append(Factor(f"w{i}", sizes[i], (Slot(i), None), (Slot(out),)))
    batch_out = [i for i in range(results[0].ndim) if i not in numbers.offset_dims]
    paired = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    for j, out in enumerate(batch_out):
        in_table: Place = Slot(paired[j]) if j in paired else None
        factors.append(Factor(f"i{j}", indices.shape[j], (in_table, Slot(j)), (Slot(out),)))
    factors += [
        Factor(f"r{i}", table.shape[i], (Slot(i), None), (None,), "or" if table.dtype == bool else "sum")
        for i in _looked_up(params)
        if not jnp.issubdtype(table.dtype, jax.dtypes.extended)  # keys have no sum
    ]
    # a gather with a fill value is not linear in the table: every device would add the value
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP and params["fill_value"] not in (None, 0)
    linear = () if fills or not table.floating else (frozenset({0}),)
    reads = part_of(results[0].shape, table.shape)
    return Spec(tuple(f for f in factors if f.size > 1), linear, prod(results[0].shape), reads=reads, selects=True)


def _scatter_pieces(operands: list[jax.Array], layout: Layout) -> list:
    """Scatter into a piece of the operand; updates of other devices' rows are dropped, as are those outside the operand.

    An index that JAX clamps belongs to the device with the nearest row.
    """
    whole, indices, updates = operands
    numbers, here, mode = layout.params["dimension_numbers"], layout.operands[0], layout.params["mode"]
    rows = [d for d in _row_dimensions(layout.params) if here.along(d)]
    if not rows:
        return layout.bind(whole, indices, updates)
    indices = indices.astype(jnp.int32 if indices.dtype.itemsize < 4 else indices.dtype)  # it must represent the operand's size
    window = dict(zip(_windows(len(here.shape), numbers), numbers.update_window_dims, strict=True))
    mine = jnp.ones(indices.shape[:-1], bool)
    local = dict[int, jax.Array]()
    for column, dim in enumerate(numbers.scatter_dims_to_operand_dims):
        index, last = indices[..., column], here.shape[dim] - (layout.operands[2].shape[window[dim]] if dim in window else 1)
        place = jnp.clip(index, 0, last)
        if dim in rows:
            mine &= place == index if mode != Mode.CLIP else True
            on_device, place = here.find(place, dim)
            mine &= on_device
        if dim in rows or mode == Mode.CLIP:
            local[column] = place
    outside = ~jnp.arange(mine.size, dtype=indices.dtype).reshape(mine.shape)  # negative or the largest, all distinct
    for column, place in local.items():
        indices = indices.at[..., column].set(jnp.where(mine, place, outside))
    return layout.bind(whole, indices, updates, indices_are_sorted=False, mode=Mode.FILL_OR_DROP)


def _windows(ndim: int, numbers: lax.ScatterDimensionNumbers) -> list[int]:
    """Return the dimensions of the operand that updates have, too."""
    return [i for i in range(ndim) if i not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]


def _row_dimensions(params: Any) -> list[int]:
    """Return the indexed dimensions of which an update has one position and lacks the dimension.

    The list is empty if indices are promised to be inside: the gradient of an update outside is that of the nearest of all rows,
    which no piece has.
    """
    numbers = params["dimension_numbers"]
    if params["mode"] == Mode.PROMISE_IN_BOUNDS:
        return []
    return sorted(i for i in numbers.scatter_dims_to_operand_dims if i in numbers.inserted_window_dims)


def scattering(adds: bool) -> Any:
    """Return the specification of a scatter: operand, indices `[..., index]` and updates.

    Columns, batching dimensions and rows are parallel; all devices have the updates of all rows.

    Args:
        adds: whether updates are added to the operand. Then parts of the updates yield partial sums, if the operand is one, too.
            (The parameters do not tell: a function that is applied to the operand may add without being linear.)
    """

    def spec(params: Any, operands: Any, results: Any) -> Spec:
        numbers = params["dimension_numbers"]
        operand, indices, updates = operands
        factors = [Factor(f"r{i}", operand.shape[i], (Slot(i), None, None), (Slot(i),)) for i in _row_dimensions(params)]
        for i, u in zip(_windows(operand.ndim, numbers), numbers.update_window_dims, strict=True):
            if operand.shape[i] == updates.shape[u]:
                factors.append(Factor(f"w{i}", operand.shape[i], (Slot(i), None, Slot(u)), (Slot(i),)))
        spread = [i for i in range(updates.ndim) if i not in numbers.update_window_dims]
        paired = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
        for j, u in enumerate(spread):
            if j in paired:
                factors.append(Factor(f"b{j}", indices.shape[j], (Slot(paired[j]), Slot(j), Slot(u)), (Slot(paired[j]),)))
            elif adds:
                factors.append(Factor(f"i{j}", indices.shape[j], (PARTIAL, Slot(j), Slot(u)), (PARTIAL,), "sum"))
        linear = (frozenset({0, 2}),) if adds else ()
        return Spec(tuple(f for f in factors if f.size > 1), linear, prod(updates.shape))

    return spec


operator("scatter-add", "scatter-sub", local=_scatter_pieces, facts=Facts(alone=True))(scattering(adds=True))
operator("scatter", local=_scatter_pieces, facts=Facts(linear_in=(at(0, 2),), alone=True))(scattering(adds=False))
operator("scatter-mul", local=_scatter_pieces, facts=Facts(linear_in=(at(0), at(2)), alone=True))(scattering(adds=False))
operator("scatter-min", "scatter-max", local=_scatter_pieces, facts=Facts(OPERANDS_AND_RESULT, alone=True))(scattering(adds=False))


@operator(PROMISED, local=lambda operands, layout: [drop_outside_gradients(*operands, **layout.params)])
def promised_rows(params: Any, operands: Any, results: Any) -> Spec:
    """Rows `[*ids, h]` and their indices. Linear in the rows, which only lose some of their gradient."""
    rows, ids = operands[0].shape, operands[1].shape
    places = ((Slot(i), Slot(i) if i < len(ids) else None) for i in range(len(rows)))
    factors = tuple(Factor(f"d{i}", n, p, (Slot(i),)) for i, (n, p) in enumerate(zip(rows, places, strict=True)) if n > 1)
    return Spec(factors, (frozenset({0}),), prod(rows))
