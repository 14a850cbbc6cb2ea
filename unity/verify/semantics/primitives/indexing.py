"""Gather, scatter and dynamic slices. With concrete indices, an access is a table of flat positions.

With indices that are elements (pivots, the order of a sort), it is a sum over all places that they may name: the access at each
place, weighted by an element that is 1 where the indices name that place, and otherwise 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import product
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from unity.pcg.operators.promised_reads import PROMISED
from unity.verify.semantics.domains import Array, ElementDomain
from unity.verify.semantics.primitives.core import (
    PLAIN,
    InterpreterRun,
    PrimitiveCall,
    StackedValue,
    evaluate,
    meaning,
)

Mode = lax.GatherScatterMode
LARGEST = 4_096  # places that indices may name; for more of them, smaller sizes prove as much


# Flat positions


def box_positions(shape: Sequence[int], starts: Sequence[Array], sizes: Sequence[int], kept: Sequence[int]) -> Array:
    """Return the flat positions of boxes in a tensor.

    Args:
        shape: of the tensor.
        starts: where each box begins, for every dimension an array `[*where]`.
        sizes: of the boxes, for every dimension.
        kept: the dimensions that the result has; in the others, boxes have size one.

    Returns:
        Indices `[*where, *sizes of the kept dimensions]`.
    """
    flat = np.zeros((1,) * (starts[0].ndim if starts else 0) + (1,) * len(kept), np.int64)
    for d, (n, start) in enumerate(zip(shape, starts, strict=True)):
        place = start.reshape(start.shape + (1,) * len(kept))
        if d in kept:
            place = place + np.arange(sizes[d]).reshape([-1 if k == d else 1 for k in kept])
        flat = flat * n + place
    return flat


def read_flat(run: InterpreterRun, x: Array, flat: Array) -> Array:
    """Read `x` `[*lead, *shape]` at flat positions `[*lead, *positions]`."""
    lead = np.broadcast_shapes(x.shape[: run.lead], flat.shape[: run.lead])
    x = np.broadcast_to(x.reshape((*x.shape[: run.lead], -1)), (*lead, prod(run.shape(x))))
    rows = np.broadcast_to(flat, lead + run.shape(flat)).reshape((*lead, -1))
    return np.take_along_axis(x, rows, -1).reshape((*lead, *run.shape(flat)))


def update_flat(
    run: InterpreterRun, x: Array, flat: Array, new: Array, combine: Callable[[Array, Array], Array], valid: Array | None = None
) -> Array:
    """Write `combine(old, new)` into `x` at flat positions, one after another, where `valid` (shaped like `flat`) allows it."""
    lead = np.broadcast_shapes(x.shape[: run.lead], flat.shape[: run.lead], new.shape[: run.lead])
    result = np.array(np.broadcast_to(x, lead + run.shape(x))).reshape((*lead, -1))
    positions = np.broadcast_to(flat, lead + run.shape(flat)).reshape((*lead, -1))
    updates = np.broadcast_to(new, lead + run.shape(new)).reshape((*lead, -1))
    if valid is None:
        allowed = np.ones(positions.shape, bool)
    else:
        allowed = np.broadcast_to(valid, lead + run.shape(flat)).reshape(positions.shape)
    for k in range(positions.shape[-1]):
        at = np.where(allowed[..., k], positions[..., k], 0)[..., None]
        old = np.take_along_axis(result, at, -1)
        np.put_along_axis(result, at, np.where(allowed[..., k, None], combine(old, updates[..., k, None]), old), -1)
    return result.reshape(lead + run.shape(x))


# Indices that are elements


def weighted_places(
    run: InterpreterRun, call: PrimitiveCall, indices: Sequence[Array], ends: Sequence[int], clamped: bool
) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Yield every place that indices may name, and the element, shaped like an index, that is 1 where they name it.

    Args:
        run: the interpretation.
        call: named by an error.
        indices: elements, one array for each coordinate.
        ends: the number of places along each coordinate, from 0 on.
        clamped: whether indices outside name the nearest place; otherwise they name none.
    """
    if prod(ends) > LARGEST:
        raise call.refuse("its indices depend on floating values, and they may name too many places")
    domain = run.domain
    number = {n: domain.constant(np.asarray(n)) for n in range(max(ends, default=0))}
    one = domain.constant(np.asarray(1))
    if clamped:
        bounded = [(domain.maximum(i, number[0]), number[n - 1]) for i, n in zip(indices, ends, strict=True)]
        indices = [domain.minimum(i, last) for i, last in bounded]
    for place in product(*map(range, ends)):
        equal = [domain.compare("eq", i, number[k]) for i, k in zip(indices, place, strict=True)]
        yield place, reduce(domain.mul, [domain.constant(e) if domain.decides else e for e in equal], one)


# Dynamic slices


def _clamped_box(run: InterpreterRun, shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Array]) -> Array:
    """Return the flat positions `[*lead, *sizes]` of a box that is moved inside the tensor."""
    inside = [np.clip(at, 0, n - size) for n, size, at in zip(shape, sizes, starts, strict=True)]
    return box_positions(shape, inside, sizes, range(len(shape))) if inside else np.zeros((1,) * run.lead, np.int64)


def _weighted_boxes(
    run: InterpreterRun, call: PrimitiveCall, shape: Sequence[int], sizes: Sequence[int], starts: Sequence[StackedValue]
) -> Iterator[tuple[Array, Array | None]]:
    """Yield the flat positions of every box that may be meant, with its weight. A single box has none."""
    if all(s.known for s in starts):
        yield _clamped_box(run, shape, sizes, [s.array.astype(np.int64) for s in starts]), None
        return
    ends = [n - size + 1 for n, size in zip(shape, sizes, strict=True)]
    for place, weight in weighted_places(run, call, [run.lift(s) for s in starts], ends, clamped=True):
        at = [np.full((1,) * run.lead, k) for k in place]
        yield _clamped_box(run, shape, sizes, at), weight.reshape(weight.shape + (1,) * len(shape))


@meaning("dynamic_slice")
def dynamic_slice(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The box of `slice_sizes` that begins at the given indices, one for each dimension; it is moved inside the operand."""
    x, *starts = values
    terms = []
    for flat, weight in _weighted_boxes(run, call, run.shape(x.array), call.params["slice_sizes"], starts):
        if weight is None:
            return [StackedValue(read_flat(run, x.array, flat), x.known)]
        terms.append(run.domain.mul(weight, read_flat(run, run.lift(x), flat)))
    return [StackedValue(reduce(run.domain.add, terms), False)]


@meaning("dynamic_update_slice")
def dynamic_update_slice(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The operand with an update written into the box that begins at the given indices, one for each dimension."""
    x, update, *starts = values
    known = all(v.known for v in values)
    array, new = run.together([x, update])[1] if all(s.known for s in starts) else (run.lift(x), run.lift(update))
    result, domain = array, run.domain
    for flat, weight in _weighted_boxes(run, call, run.shape(array), run.shape(new), starts):
        updated = update_flat(run, array, flat, new, lambda old, new: new)
        result = updated if weight is None else domain.add(result, domain.mul(weight, domain.sub(updated, array)))
    return [StackedValue(result, known)]


# Gather and scatter


def _window_starts(
    run: InterpreterRun,
    indices: Array,
    shape: Sequence[int],
    sizes: Sequence[int],
    index_map: Sequence[int],
    batching: Mapping[int, int],
    clamped: bool,
) -> tuple[list[Array], Array]:
    """Return where windows begin along each dimension, `[*lead, *groups]`, and which of them may be accessed.

    Args:
        run: the interpretation.
        indices: `[*lead, *groups, index]`, concrete.
        shape: of the tensor that is indexed.
        sizes: of a window, for every dimension.
        index_map: the dimension of each index.
        batching: the dimension of the groups that belongs to a batching dimension of the tensor.
        clamped: whether windows that do not lie inside are moved there.
    """
    groups = indices.shape[run.lead : -1]
    zero = np.zeros(indices.shape[:-1], np.int64)
    valid, starts = np.ones(indices.shape[:-1], bool), [zero] * len(shape)
    for k, d in enumerate(index_map):
        at, last = indices[..., k], shape[d] - sizes[d]
        valid = valid & (at >= 0) & (at <= last)
        starts[d] = np.clip(at, 0, last)
    for d, j in batching.items():
        starts[d] = zero + np.arange(groups[j]).reshape([-1 if i == j else 1 for i in range(len(groups))])
    return starts, np.ones_like(valid) if clamped else valid


def _fill_value(params: Any, dtype: Any) -> Array:
    """Return the value that a gather reads outside: `fill_value`, else NaN, True, the least or the largest integer."""
    value = params["fill_value"]
    if value is None:
        if jnp.issubdtype(dtype, np.inexact):
            value = np.nan
        elif np.dtype(dtype).kind == "b":
            value = True
        else:
            value = np.iinfo(dtype).min if np.dtype(dtype).kind == "i" else np.iinfo(dtype).max
    return np.asarray(value).astype(dtype)


@meaning("gather")
def gather(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Table and indices `[*groups, index]` → `[groups and windows]`, windows at `offset_dims`."""
    table, indices = values
    numbers, sizes, shape = call.params["dimension_numbers"], call.params["slice_sizes"], run.shape(table.array)
    window_dims = [d for d in range(len(shape)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    known = table.known and indices.known
    read = partial(_read_windows, run, call, table.array if indices.known else run.lift(table), window_dims)
    if indices.known:
        windows, valid = read(indices.array.astype(np.int64))
        if not valid.all():
            fill = _fill_value(call.params, call.results[0].dtype)
            windows = np.where(valid, windows, fill if known else run.domain.constant(fill))
    else:
        ends = [shape[d] - sizes[d] + 1 for d in numbers.start_index_map]
        windows = _weighted_reads(run, call, indices.array, ends, len(window_dims), lambda at: read(at)[0])
    rank = len(call.results[0].shape)
    group_dims = [i for i in range(rank) if i not in numbers.offset_dims]
    order = [0] * rank
    for k, i in enumerate((*group_dims, *numbers.offset_dims)):
        order[i] = run.lead + k
    return [StackedValue(windows.transpose(*range(run.lead), *order), known)]


def _read_windows(
    run: InterpreterRun, call: PrimitiveCall, table: Array, window_dims: Sequence[int], indices: Array
) -> tuple[Array, Array]:  # fmt: skip
    """Return the windows `[*lead, *groups, *window_dims]` at concrete indices, and whether each is valid."""
    numbers, sizes, shape = call.params["dimension_numbers"], call.params["slice_sizes"], run.shape(table)
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    clamped = call.params["mode"] != Mode.FILL_OR_DROP  # with a promise too, JAX reads the nearest place
    starts, valid = _window_starts(run, indices, shape, sizes, numbers.start_index_map, batching, clamped)
    windows = read_flat(run, table, box_positions(shape, starts, sizes, window_dims) if starts else valid * 0)
    return windows, valid.reshape((*valid.shape, *(1,) * len(window_dims)))


def _weighted_reads(
    run: InterpreterRun, call: PrimitiveCall, indices: Array, ends: Sequence[int], window_rank: int, read: Callable[[Array], Array]
) -> Array:
    """Return the sum over all places that indices `[*lead, *groups, index]` may name; outside they name the fill value."""
    domain, groups = run.domain, indices.shape[run.lead : -1]
    one, total, inside = domain.constant(np.asarray(1)), domain.constant(np.asarray(0)), domain.constant(np.asarray(0))
    fills = call.params["mode"] == Mode.FILL_OR_DROP
    coordinates = [indices[..., k] for k in range(len(ends))]
    for place, weight in weighted_places(run, call, coordinates, ends, clamped=not fills):
        weight = weight.reshape((*weight.shape, *(1,) * window_rank))
        at = np.broadcast_to(np.asarray(place), (*(1,) * run.lead, *groups, len(place)))
        total, inside = domain.add(total, domain.mul(weight, read(at))), domain.add(inside, weight)
    if fills:
        fill = domain.replaceable(domain.constant(_fill_value(call.params, call.results[0].dtype)))
        total = domain.add(total, domain.mul(domain.sub(one, inside), fill))
    return total


SCATTERS: Mapping[str, Callable[[ElementDomain], Callable[[Array, Array], Array]]] = {
    "scatter": lambda d: lambda old, new: new,
    "scatter-add": lambda d: d.add,
    "scatter-sub": lambda d: d.sub,
    "scatter-mul": lambda d: d.mul,
    "scatter-min": lambda d: d.minimum,
    "scatter-max": lambda d: d.maximum,
}
ADDITIVE = ("scatter-add", "scatter-sub")  # updates may be written in any order, at every place that is named


def _combination(run: InterpreterRun, call: PrimitiveCall, domain: ElementDomain) -> Callable[[Array, Array], Array]:
    """Return how a scatter combines an element with an update: for `scatter_apply`, by the user's function."""
    if call.name != "scatter" or call.params["update_jaxpr"] is None:
        return SCATTERS[call.name](domain)
    program = core.ClosedJaxpr(call.params["update_jaxpr"], call.params["update_consts"])

    def combine(old: Array, new: Array) -> Array:
        scalars = InterpreterRun(run.domain, run.axes, old.ndim)
        return evaluate(scalars, program, [StackedValue(x, domain is PLAIN) for x in (old, new)])[0].array

    return combine


@meaning(*SCATTERS)
def scatter(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Operand, indices `[*groups, index]`, updates `[groups and windows]`, windows at `update_window_dims`."""
    operand, indices, updates = values
    domain, (x, new) = run.together([operand, updates]) if indices.known else (run.domain, [run.lift(operand), run.lift(updates)])
    numbers, shape = call.params["dimension_numbers"], run.shape(x)
    window_dims = [d for d in range(len(shape)) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
    window = dict(zip(window_dims, numbers.update_window_dims, strict=True))
    sizes = [run.shape(new)[window[d]] if d in window else 1 for d in range(len(shape))]
    group_dims = [i for i in range(len(run.shape(new))) if i not in numbers.update_window_dims]
    new = new.transpose(*range(run.lead), *(run.lead + i for i in (*group_dims, *numbers.update_window_dims)))
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    index_map = numbers.scatter_dims_to_operand_dims
    clamped = call.params["mode"] == Mode.CLIP  # in spite of a promise, JAX drops an update outside

    def write(x: Array, new: Array, at: Array) -> Array:
        starts, valid = _window_starts(run, at, shape, sizes, index_map, batching, clamped)
        flat = box_positions(shape, starts, sizes, window_dims)
        allowed = np.broadcast_to(valid.reshape((*valid.shape, *(1,) * len(window_dims))), flat.shape)
        return update_flat(run, x, flat, new, _combination(run, call, domain), allowed)

    if indices.known:
        return [StackedValue(write(x, new, indices.array.astype(np.int64)), domain is PLAIN)]
    if call.name not in ADDITIVE:
        raise call.refuse("its indices depend on floating values")
    coordinates, ends = [indices.array[..., k] for k in range(len(index_map))], [shape[d] - sizes[d] + 1 for d in index_map]
    for place, weight in weighted_places(run, call, coordinates, ends, clamped):
        at = np.broadcast_to(np.asarray(place), (*(1,) * run.lead, *run.shape(indices.array)))
        x = write(x, domain.mul(weight.reshape((*weight.shape, *(1,) * len(window_dims))), new), at)
    return [StackedValue(x, False)]


@meaning(PROMISED)
def promised_rows(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The rows that were read, unchanged: only their gradient depends on the indices."""
    return list(values[:1])
