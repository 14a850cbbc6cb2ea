"""Gather, scatter and dynamic slices: indices are concrete, so an access is a table of flat positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from jax import lax

from unity.pcg.table.indexing import fill_value
from unity.verify.domains import Array, Domain
from unity.verify.primitives.core import PLAIN, Application, Run, Value, meaning

Mode = lax.GatherScatterMode


def indices_of(app: Application, value: Value) -> Array:
    """Concrete indices as int64."""
    if not value.known:
        raise app.refuse("its indices depend on floating values")
    return value.array.astype(np.int64)


def take_flat(run: Run, x: Array, flat: Array) -> Array:
    """`x` `[*lead, *shape]` at `flat` `[*lead, *positions]`."""
    lead = np.broadcast_shapes(x.shape[: run.lead], flat.shape[: run.lead])
    x = np.broadcast_to(x.reshape((*x.shape[: run.lead], -1)), (*lead, prod(run.shape(x))))
    rows = np.broadcast_to(flat, lead + run.shape(flat)).reshape((*lead, -1))
    return np.take_along_axis(x, rows, -1).reshape((*lead, *run.shape(flat)))


def boxes(shape: Sequence[int], starts: Sequence[Array], sizes: Sequence[int], kept: Sequence[int]) -> Array:
    """Flat positions `[*where, *sizes of the kept dimensions]` of boxes that begin at `starts` `[*where]`, one a dimension."""
    flat = np.zeros((1,) * (starts[0].ndim if starts else 0) + (1,) * len(kept), np.int64)
    for d, (n, start) in enumerate(zip(shape, starts, strict=True)):
        place = start.reshape(start.shape + (1,) * len(kept))
        if d in kept:
            place = place + np.arange(sizes[d]).reshape([-1 if k == d else 1 for k in kept])
        flat = flat * n + place
    return flat


def _dynamic(run: Run, app: Application, x: Array, sizes: Sequence[int], starts: Sequence[Value]) -> Array:
    """Flat positions `[*lead, *sizes]` of a box that is moved inside."""
    shape = run.shape(x)
    begin = []
    for n, size, value in zip(shape, sizes, starts, strict=True):
        at = indices_of(app, value)
        begin.append(np.clip(at, 0, n - size))
    if not begin:
        return np.zeros((1,) * run.lead, np.int64)
    return boxes(shape, begin, sizes, range(len(shape)))


@meaning("dynamic_slice")
def dynamic_slice(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Operand, and one index for each dimension."""
    x, *starts = values
    flat = _dynamic(run, app, x.array, app.params["slice_sizes"], starts)
    return [Value(take_flat(run, x.array, flat), x.known)]


@meaning("dynamic_update_slice")
def dynamic_update_slice(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Operand, update, and one index for each dimension."""
    x, update, *starts = values
    _, (array, new) = run.together([x, update])
    flat = _dynamic(run, app, array, run.shape(new), starts)
    return [Value(put_flat(run, array, flat, new, lambda old, new: new, None), x.known and update.known)]


def put_flat(run: Run, x: Array, flat: Array, new: Array, operation: Callable[[Array, Array], Array], valid: Array | None) -> Array:
    """`x` with `operation(old, new)` at flat positions, one after another; where `valid` (like `flat`) does not forbid it."""
    lead = np.broadcast_shapes(x.shape[: run.lead], flat.shape[: run.lead], new.shape[: run.lead])
    result = np.array(np.broadcast_to(x, lead + run.shape(x))).reshape((*lead, -1))
    places = np.broadcast_to(flat, lead + run.shape(flat)).reshape((*lead, -1))
    given = np.broadcast_to(new, lead + run.shape(new)).reshape((*lead, -1))
    allowed = np.ones(places.shape, bool) if valid is None else np.broadcast_to(valid, lead + run.shape(flat)).reshape(places.shape)
    for k in range(places.shape[-1]):
        at = np.where(allowed[..., k], places[..., k], 0)[..., None]
        old = np.take_along_axis(result, at, -1)
        changed = np.where(allowed[..., k, None], operation(old, given[..., k, None]), old)
        np.put_along_axis(result, at, changed, -1)
    return result.reshape(lead + run.shape(x))


def _starts(
    run: Run, indices: Array, shape: Sequence[int], sizes: Sequence[int], where: Sequence[int], paired: Mapping[int, int], mode: Any
) -> tuple[list[Array], Array]:
    """Where windows begin along each dimension, `[*lead, *groups]`, and which of them lie inside.

    `where[k]` is the dimension of the k-th index; `paired` maps a batching dimension to its dimension of the indices.
    """
    groups = indices.shape[run.lead : -1]
    zero = np.zeros(indices.shape[:-1], np.int64)
    valid, begin = np.ones(indices.shape[:-1], bool), [zero] * len(shape)
    for k, d in enumerate(where):
        at, last = indices[..., k], shape[d] - sizes[d]
        valid = valid & (at >= 0) & (at <= last)
        begin[d] = np.clip(at, 0, last)
    for d, j in paired.items():
        begin[d] = zero + np.arange(groups[j]).reshape([-1 if i == j else 1 for i in range(len(groups))])
    return begin, valid if mode == Mode.FILL_OR_DROP else np.ones_like(valid)


@meaning("gather")
def gather(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Table and indices `[*groups, index]` → `[groups and windows]`, windows at `offset_dims`."""
    table, indices = values
    numbers, sizes, shape = app.params["dimension_numbers"], app.params["slice_sizes"], run.shape(table.array)
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    begin, valid = _starts(run, indices_of(app, indices), shape, sizes, numbers.start_index_map, paired, app.params["mode"])
    kept = [d for d in range(len(shape)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    found = take_flat(run, table.array, boxes(shape, begin, sizes, kept) if begin else valid * 0)
    if not valid.all():
        fill = np.asarray(fill_value(app.params, app.results[0].dtype))
        fill = fill if table.known else run.domain.constant(fill)
        found = np.where(valid.reshape((*valid.shape, *(1,) * len(kept))), found, fill)
    rank = len(app.results[0].shape)
    spread = [i for i in range(rank) if i not in numbers.offset_dims]
    order = [0] * rank
    for k, i in enumerate((*spread, *numbers.offset_dims)):
        order[i] = run.lead + k
    return [Value(found.transpose(*range(run.lead), *order), table.known)]


SCATTERS: Mapping[str, Callable[[Domain], Callable[[Array, Array], Array]]] = {
    "scatter": lambda d: lambda old, new: new,
    "scatter-add": lambda d: d.add,
    "scatter-sub": lambda d: d.sub,
    "scatter-mul": lambda d: d.mul,
    "scatter-min": lambda d: d.minimum,
    "scatter-max": lambda d: d.maximum,
}


@meaning(*SCATTERS)
def scatter(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Operand, indices `[*groups, index]`, updates `[groups and windows]`, windows at `update_window_dims`."""
    operand, indices, updates = values
    domain, (x, new) = run.together([operand, updates])
    numbers, shape = app.params["dimension_numbers"], run.shape(x)
    kept = [d for d in range(len(shape)) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
    window = dict(zip(kept, numbers.update_window_dims, strict=True))
    sizes = [run.shape(new)[window[d]] if d in window else 1 for d in range(len(shape))]
    paired = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    where = numbers.scatter_dims_to_operand_dims
    begin, valid = _starts(run, indices_of(app, indices), shape, sizes, where, paired, app.params["mode"])
    flat = boxes(shape, begin, sizes, kept)
    spread = [i for i in range(len(run.shape(new))) if i not in numbers.update_window_dims]
    new = new.transpose(*range(run.lead), *(run.lead + i for i in (*spread, *numbers.update_window_dims)))
    allowed = np.broadcast_to(valid.reshape((*valid.shape, *(1,) * len(kept))), flat.shape)
    return [Value(put_flat(run, x, flat, new, SCATTERS[app.name](domain), allowed), domain is PLAIN)]
