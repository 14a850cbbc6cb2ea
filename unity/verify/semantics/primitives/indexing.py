"""Gather, scatter and dynamic slices. Where indices are concrete, an access is a table of flat positions.

Where they are elements (pivots, the order of a sort), it is a sum over all places that they may name: of what an access there
gives, times an element that is 1 where the indices name that place, and otherwise 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import product
from math import prod

import numpy as np
from jax import lax
from jax.extend import core

from unity.pcg.operators.table.indexing import fill_value
from unity.verify.semantics.domains import Array, Domain
from unity.verify.semantics.primitives.core import PLAIN, Application, Run, Value, evaluate, meaning

Mode = lax.GatherScatterMode
PLACES = 4_096  # that indices may name; beyond that, smaller sizes say the same


def indices_of(app: Application, value: Value) -> Array:
    """Concrete indices as int64."""
    if not value.known:
        raise app.refuse("its indices depend on floating values")
    return value.array.astype(np.int64)


def named_places(
    run: Run, app: Application, indices: Sequence[Array], ends: Sequence[int], moved: bool
) -> Iterator[tuple[tuple[int, ...], Array]]:
    """All places from 0 to `ends`, one number for each of the indices; and the element that is 1 where they name it, like an index.

    `moved`: indices outside name the nearest place; otherwise none.
    """
    if prod(ends) > PLACES:
        raise app.refuse("its indices depend on floating values, and they may name too many places")
    domain = run.domain
    number = {n: domain.constant(np.asarray(n)) for n in range(max(ends, default=0))}
    one = domain.constant(np.asarray(1))
    if moved:
        inside = [(domain.maximum(i, number[0]), number[n - 1]) for i, n in zip(indices, ends, strict=True)]
        indices = [domain.minimum(i, last) for i, last in inside]
    for place in product(*map(range, ends)):
        named = [domain.compare("eq", i, number[k]) for i, k in zip(indices, place, strict=True)]
        yield place, reduce(domain.mul, [domain.constant(n) if domain.decides else n for n in named], one)


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


def _dynamic(run: Run, shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Array]) -> Array:
    """Flat positions `[*lead, *sizes]` of a box that is moved inside."""
    begin = [np.clip(at, 0, n - size) for n, size, at in zip(shape, sizes, starts, strict=True)]
    return boxes(shape, begin, sizes, range(len(shape))) if begin else np.zeros((1,) * run.lead, np.int64)


def _boxes_named(
    run: Run, app: Application, shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Value]
) -> Iterator[tuple[Array, Array | None]]:
    """Flat positions of all boxes that may be meant, with the element that says whether (None: there is only this one)."""
    if all(s.known for s in starts):
        yield _dynamic(run, shape, sizes, [s.array.astype(np.int64) for s in starts]), None
        return
    ends = [n - size + 1 for n, size in zip(shape, sizes, strict=True)]
    for place, weight in named_places(run, app, [run.lift(s) for s in starts], ends, moved=True):
        at = [np.full((1,) * run.lead, k) for k in place]
        yield _dynamic(run, shape, sizes, at), weight.reshape(weight.shape + (1,) * len(shape))


@meaning("dynamic_slice")
def dynamic_slice(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Operand, and one index for each dimension."""
    x, *starts = values
    found = []
    for flat, weight in _boxes_named(run, app, run.shape(x.array), app.params["slice_sizes"], starts):
        if weight is None:
            return [Value(take_flat(run, x.array, flat), x.known)]
        found.append(run.domain.mul(weight, take_flat(run, run.lift(x), flat)))
    return [Value(reduce(run.domain.add, found), False)]


@meaning("dynamic_update_slice")
def dynamic_update_slice(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Operand, update, and one index for each dimension."""
    x, update, *starts = values
    known = all(v.known for v in values)
    array, new = run.together([x, update])[1] if all(s.known for s in starts) else (run.lift(x), run.lift(update))
    result, domain = array, run.domain
    for flat, weight in _boxes_named(run, app, run.shape(array), run.shape(new), starts):
        put = put_flat(run, array, flat, new, lambda old, new: new, None)
        result = put if weight is None else domain.add(result, domain.mul(weight, domain.sub(put, array)))
    return [Value(result, known)]


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
    run: Run,
    indices: Array,
    shape: Sequence[int],
    sizes: Sequence[int],
    where: Sequence[int],
    paired: Mapping[int, int],
    moved: bool,
) -> tuple[list[Array], Array]:
    """Where windows begin along each dimension, `[*lead, *groups]`, and which of them lie inside.

    `where[k]` is the dimension of the k-th index; `paired` maps a batching dimension to its dimension of the indices; `moved`
    says that windows which do not lie inside are moved there.
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
    return begin, np.ones_like(valid) if moved else valid


@meaning("gather")
def gather(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Table and indices `[*groups, index]` → `[groups and windows]`, windows at `offset_dims`."""
    table, indices = values
    numbers, sizes, shape = app.params["dimension_numbers"], app.params["slice_sizes"], run.shape(table.array)
    kept = [d for d in range(len(shape)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    known = table.known and indices.known
    take = partial(_windows, run, app, table.array if indices.known else run.lift(table), kept)
    if indices.known:
        found, valid = take(indices.array.astype(np.int64))
        if not valid.all():
            fill = np.asarray(fill_value(app.params, app.results[0].dtype))
            found = np.where(valid, found, fill if known else run.domain.constant(fill))
    else:
        ends = [shape[d] - sizes[d] + 1 for d in numbers.start_index_map]
        found = _summed(run, app, indices.array, ends, len(kept), lambda at: take(at)[0])
    rank = len(app.results[0].shape)
    spread = [i for i in range(rank) if i not in numbers.offset_dims]
    order = [0] * rank
    for k, i in enumerate((*spread, *numbers.offset_dims)):
        order[i] = run.lead + k
    return [Value(found.transpose(*range(run.lead), *order), known)]


def _windows(run: Run, app: Application, table: Array, kept: Sequence[int], indices: Array) -> tuple[Array, Array]:
    """Windows `[*lead, *groups, *kept]` at concrete indices, and whether they lie inside."""
    numbers, sizes, shape = app.params["dimension_numbers"], app.params["slice_sizes"], run.shape(table)
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    moved = app.params["mode"] != Mode.FILL_OR_DROP  # a promise too: what is read is clamped
    begin, valid = _starts(run, indices, shape, sizes, numbers.start_index_map, paired, moved)
    found = take_flat(run, table, boxes(shape, begin, sizes, kept) if begin else valid * 0)
    return found, valid.reshape((*valid.shape, *(1,) * len(kept)))


def _summed(run: Run, app: Application, indices: Array, ends: Sequence[int], kept: int, take: Callable[[Array], Array]) -> Array:
    """The sum over all places that indices `[*lead, *groups, index]` may name; what they name outside is the value to fill with."""
    domain, groups = run.domain, indices.shape[run.lead : -1]
    one, found, inside = domain.constant(np.asarray(1)), domain.constant(np.asarray(0)), domain.constant(np.asarray(0))
    parts = [indices[..., k] for k in range(len(ends))]
    for place, weight in named_places(run, app, parts, ends, moved=app.params["mode"] != Mode.FILL_OR_DROP):
        weight = weight.reshape((*weight.shape, *(1,) * kept))
        at = np.broadcast_to(np.asarray(place), (*(1,) * run.lead, *groups, len(place)))
        found, inside = domain.add(found, domain.mul(weight, take(at))), domain.add(inside, weight)
    if app.params["mode"] == Mode.FILL_OR_DROP:
        fill = domain.replaceable(domain.constant(np.asarray(fill_value(app.params, app.results[0].dtype))))
        found = domain.add(found, domain.mul(domain.sub(one, inside), fill))
    return found


SCATTERS: Mapping[str, Callable[[Domain], Callable[[Array, Array], Array]]] = {
    "scatter": lambda d: lambda old, new: new,
    "scatter-add": lambda d: d.add,
    "scatter-sub": lambda d: d.sub,
    "scatter-mul": lambda d: d.mul,
    "scatter-min": lambda d: d.minimum,
    "scatter-max": lambda d: d.maximum,
}


ADDED = ("scatter-add", "scatter-sub")


def putting(run: Run, app: Application, domain: Domain) -> Callable[[Array, Array], Array]:
    """What an element becomes, of what it was and what comes: by a function of the user's own, if there is one."""
    if app.name != "scatter" or app.params["update_jaxpr"] is None:
        return SCATTERS[app.name](domain)
    program = core.ClosedJaxpr(app.params["update_jaxpr"], app.params["update_consts"])

    def applied(old: Array, new: Array) -> Array:
        scalars = Run(run.domain, run.axes, old.ndim)
        return evaluate(scalars, program, [Value(x, domain is PLAIN) for x in (old, new)])[0].array

    return applied


@meaning(*SCATTERS)
def scatter(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Operand, indices `[*groups, index]`, updates `[groups and windows]`, windows at `update_window_dims`."""
    operand, indices, updates = values
    domain, (x, new) = run.together([operand, updates]) if indices.known else (run.domain, [run.lift(operand), run.lift(updates)])
    numbers, shape = app.params["dimension_numbers"], run.shape(x)
    kept = [d for d in range(len(shape)) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
    window = dict(zip(kept, numbers.update_window_dims, strict=True))
    sizes = [run.shape(new)[window[d]] if d in window else 1 for d in range(len(shape))]
    spread = [i for i in range(len(run.shape(new))) if i not in numbers.update_window_dims]
    new = new.transpose(*range(run.lead), *(run.lead + i for i in (*spread, *numbers.update_window_dims)))
    paired = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    where = numbers.scatter_dims_to_operand_dims

    def put(x: Array, new: Array, at: Array) -> Array:
        moved = app.params["mode"] == Mode.CLIP  # not a promise: what is written outside is dropped
        begin, valid = _starts(run, at, shape, sizes, where, paired, moved)
        flat = boxes(shape, begin, sizes, kept)
        allowed = np.broadcast_to(valid.reshape((*valid.shape, *(1,) * len(kept))), flat.shape)
        return put_flat(run, x, flat, new, putting(run, app, domain), allowed)

    if indices.known or app.name not in ADDED:  # in any order, at any of the places that are named
        return [Value(put(x, new, indices_of(app, indices)), domain is PLAIN)]
    parts, ends = [indices.array[..., k] for k in range(len(where))], [shape[d] - sizes[d] + 1 for d in where]
    for place, weight in named_places(run, app, parts, ends, moved=app.params["mode"] == Mode.CLIP):
        at = np.broadcast_to(np.asarray(place), (*(1,) * run.lead, *run.shape(indices.array)))
        x = put(x, domain.mul(weight.reshape((*weight.shape, *(1,) * len(kept))), new), at)
    return [Value(x, False)]
