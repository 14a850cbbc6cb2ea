"""Reductions, running ones, arg-reductions and windows, over any domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from jax.extend import core

from unity.verify.semantics.domains import Array, Domain
from unity.verify.semantics.primitives.core import PLAIN, Application, Run, Value, evaluate, meaning
from unity.verify.semantics.primitives.elementwise import as_result
from unity.verify.semantics.primitives.products import flat_windows, windows
from unity.verify.semantics.primitives.shaping import padded

Operation = Callable[[Array, Array], Array]
OPERATIONS: Mapping[str, Callable[[Domain], Operation]] = {
    "sum": lambda d: d.add,
    "prod": lambda d: d.mul,
    "max": lambda d: d.maximum,
    "min": lambda d: d.minimum,
    "or": lambda d: np.bitwise_or if d is PLAIN else d.maximum,
    "and": lambda d: np.bitwise_and if d is PLAIN else d.minimum,
    "xor": lambda d: np.bitwise_xor,
}


def flattened(run: Run, x: Array, axes: Sequence[int]) -> Array:
    """The given local dimensions as one, at the end."""
    kept = [i for i in range(run.lead, x.ndim) if i - run.lead not in axes]
    x = x.transpose(*range(run.lead), *kept, *(run.lead + i for i in axes))
    return x.reshape((*x.shape[: x.ndim - len(axes)], -1))


def identity(domain: Domain, kind: str, dtype: Any) -> Array:
    """What changes nothing, shape `()`."""
    if domain is PLAIN:
        if kind == "and":
            return np.invert(np.zeros((), dtype))
        if np.dtype(dtype) == bool or kind not in ("max", "min"):
            return np.asarray(kind in ("min", "prod"), dtype)
        return np.asarray((np.iinfo(dtype).min if kind == "max" else np.iinfo(dtype).max), dtype)
    value = {"sum": 0.0, "prod": 1.0, "max": -np.inf, "min": np.inf, "or": 0.0, "and": 1.0}[kind]
    return domain.constant(np.asarray(value))


def reduced(domain: Domain, kind: str, x: Array, axis: int, dtype: Any) -> Array:
    """A reduction along one axis."""
    if not x.shape[axis]:
        return np.broadcast_to(identity(domain, kind, dtype), np.delete(x.shape, axis))
    return domain.total(x, axis) if kind == "sum" else domain.fold(OPERATIONS[kind](domain), x, axis)


@meaning(*(f"reduce_{kind}" for kind in OPERATIONS))
def reduction(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Over `axes`."""
    domain, (x,) = run.together(values)
    dtype, kind = app.results[0].dtype, app.name.removeprefix("reduce_")
    if domain is not PLAIN and kind in ("or", "and") and np.dtype(dtype).kind != "b":
        raise app.refuse("it is of the bits of integers that depend on floating values")
    result = reduced(domain, kind, flattened(run, x, app.params["axes"]), -1, dtype)
    return [as_result(run, app, result, domain is PLAIN)]


@meaning("argmax", "argmin")
def arg_reduction(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """The first index of the largest; of elements that are not ordered, a function of them all."""
    domain, (x,) = run.together(values)
    (axis,) = app.params["axes"]
    parts = np.moveaxis(x, run.lead + axis, 0)
    if domain is not PLAIN and not domain.decides:
        return [Value(domain.function(app.name, *parts), False)]
    pick = domain.maximum if app.name == "argmax" else domain.minimum
    best, index = parts[0], np.zeros(parts.shape[1:], np.int64)
    for k, part in enumerate(parts[1:], 1):
        better = domain.compare("ne", pick(best, part), best)
        best, index = np.where(better, part, best), np.where(better, k, index)
    return [Value(index.astype(app.params["index_dtype"]), True)]


@meaning("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Along `axis`, possibly from its end."""
    domain, (x,) = run.together(values)
    kind, axis = app.name.removeprefix("cum"), run.lead + app.params["axis"]
    if kind == "logsumexp":
        kind, x = "sum", domain.function("exp", x)
    parts = list(np.moveaxis(x, axis, 0))
    parts = parts[::-1] if app.params["reverse"] else parts
    for k in range(1, len(parts)):
        parts[k] = OPERATIONS[kind](domain)(parts[k - 1], parts[k])
    result = np.stack(parts[::-1] if app.params["reverse"] else parts, axis)
    if app.name == "cumlogsumexp":
        result = domain.function("log", result)
    return [as_result(run, app, result, domain is PLAIN)]


@meaning("reduce")
def general(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Operands, then their initial values; `jaxpr` puts two of each together."""
    n = len(values) // 2
    dims = app.params["dimensions"]
    rows = [Value(flattened(run, v.array, dims), v.known) for v in values[:n]]
    return in_order(run, app.params["jaxpr"], list(values[n:]), rows)


def in_order(run: Run, program: core.ClosedJaxpr, start: list[Value], rows: Sequence[Value]) -> list[Value]:
    """Folds the last dimension of `rows` by a program over scalars, from the first to the last."""
    rank = max(v.array.ndim for v in rows) - 1
    scalars = Run(run.domain, run.axes, rank)
    carry = [Value(v.array.reshape((*v.array.shape[: run.lead], *(1,) * (rank - run.lead))), v.known) for v in start]
    for k in range(rows[0].array.shape[-1]):
        carry = evaluate(scalars, program, [*carry, *(Value(v.array[..., k], v.known) for v in rows)])
    return carry


# Windows


def spread_out(run: Run, app: Application, value: Value, fill: Array, dtype: Any) -> Array:
    """`[*lead, positions, window]`: what lies under each position of the window."""
    params = app.params
    rank = len(run.shape(value.array))
    base = params.get("base_dilation") or (1,) * rank
    moved = params.get("window_dilation") or (1,) * rank
    config = [(low, high, d - 1) for (low, high), d in zip(params["padding"], base, strict=True)]
    x = padded(run, value.array, fill, config)
    space = run.shape(x)
    grids = [windows(*m) for m in zip(space, params["window_dimensions"], params["window_strides"], moved, strict=True)]
    return np.take(x.reshape((*x.shape[: run.lead], -1)), flat_windows(space, grids), -1)


def in_place(run: Run, x: Array, shape: Sequence[int]) -> Array:
    """Flat positions as the result's local shape."""
    return x.reshape((*x.shape[: run.lead], *shape))


@meaning("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def window_reduction(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """One operand, and what lies outside of it changes nothing."""
    kind, dtype = app.name.removeprefix("reduce_window_"), app.results[0].dtype
    domain = PLAIN if values[0].known else run.domain
    fill = identity(domain, kind, dtype).reshape((1,) * run.lead)
    result = reduced(domain, kind, spread_out(run, app, values[0], fill, dtype), -1, dtype)
    return [as_result(run, app, in_place(run, result, app.results[0].shape), domain is PLAIN)]


@meaning("reduce_window")
def general_window(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Operands, then their initial values, which lie outside too; `jaxpr` puts two of each together."""
    n = len(values) // 2
    rows = []
    for value, start, result in zip(values[:n], values[n:], app.results, strict=True):
        fill = start.array if value.known == start.known else run.lift(start)
        rows.append(Value(spread_out(run, app, value, fill, result.dtype), value.known))
    jaxpr: Any = app.params["jaxpr"]
    program = jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else core.ClosedJaxpr(jaxpr, app.params.get("consts", ()))
    found = in_order(run, program, list(values[n:]), rows)
    return [Value(in_place(run, v.array, r.shape), v.known) for v, r in zip(found, app.results, strict=True)]


def selected(domain: Domain, select: str, rows: Array) -> list[Array]:
    """For each place of a window, an element that says whether it is the one that is selected."""
    places = list(np.moveaxis(rows, -1, 0))
    return [domain.function(f"selected by {select} of {len(places)}, {k}", *places) for k in range(len(places))]


@meaning("select_and_gather_add")
def select_and_gather(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Tangents and operand: in each window, the tangent of the selected element."""
    domain, select = run.domain, str(app.params["select_prim"])
    extreme = domain.constant(np.full((1,) * run.lead, -np.inf if select == "ge" else np.inf))
    tangents, operand = (Value(run.lift(v), False) for v in values)
    rows = spread_out(run, app, operand, extreme, None)
    given = spread_out(run, app, tangents, domain.constant(np.zeros((1,) * run.lead)), None)
    terms = [domain.mul(w, g) for w, g in zip(selected(domain, select, rows), np.moveaxis(given, -1, 0), strict=True)]
    return [Value(in_place(run, reduce(domain.add, terms), app.results[0].shape), False)]


@meaning("select_and_scatter_add")
def select_and_scatter(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Source and operand: each window's source is added where its element is selected."""
    domain, select = run.domain, str(app.params["select_prim"])
    source, operand = (Value(run.lift(v), False) for v in values)
    extreme = domain.constant(np.full((1,) * run.lead, -np.inf if select == "ge" else np.inf))
    rows = spread_out(run, app, operand, extreme, None)
    shape = run.shape(operand.array)
    places = np.arange(np.prod(shape)).reshape((1,) * run.lead + shape)
    flat = spread_out(run, app, Value(places, True), np.full((1,) * run.lead, -1), None).reshape(rows.shape[-2:])
    given = source.array.reshape((*source.array.shape[: run.lead], -1))
    lead = np.broadcast_shapes(rows.shape[: run.lead], given.shape[: run.lead])
    result = np.array(np.broadcast_to(domain.constant(np.zeros(())), (*lead, int(np.prod(shape)))))
    for k, chosen in enumerate(selected(domain, select, rows)):
        for position in np.flatnonzero(flat[:, k] >= 0):
            at = flat[position, k]
            result[..., at] = domain.add(result[..., at], domain.mul(chosen[..., position], given[..., position]))
    return [Value(in_place(run, result, shape), False)]
