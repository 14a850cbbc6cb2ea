"""Reductions, cumulative reductions, arg-reductions and sorting, over any domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from unity.verify.semantics.domains import Array, ElementDomain
from unity.verify.semantics.primitives.core import (
    PLAIN,
    InterpreterRun,
    PrimitiveCall,
    StackedValue,
    evaluate,
    meaning,
)
from unity.verify.semantics.primitives.unknown_functions import rowwise, run_on_each_device

Operation = Callable[[Array, Array], Array]
OPERATIONS: Mapping[str, Callable[[ElementDomain], Operation]] = {
    "sum": lambda d: d.add,
    "prod": lambda d: d.mul,
    "max": lambda d: d.maximum,
    "min": lambda d: d.minimum,
    "or": lambda d: np.bitwise_or if d is PLAIN else d.maximum,
    "and": lambda d: np.bitwise_and if d is PLAIN else d.minimum,
    "xor": lambda d: np.bitwise_xor,
}


def flatten_to_end(run: InterpreterRun, x: Array, axes: Sequence[int]) -> Array:
    """Return an array with some local dimensions flattened into one, the last."""
    others = [i for i in range(run.lead, x.ndim) if i - run.lead not in axes]
    x = x.transpose(*range(run.lead), *others, *(run.lead + i for i in axes))
    return x.reshape((*x.shape[: x.ndim - len(axes)], -1))


def identity(domain: ElementDomain, kind: str, dtype: Any) -> Array:
    """Return the identity element of a reduction, shape `()`."""
    if domain is PLAIN:
        if kind == "and":
            return np.invert(np.zeros((), dtype))
        if np.dtype(dtype) == bool or kind not in ("max", "min"):
            return np.asarray(kind in ("min", "prod"), dtype)
        return np.asarray((np.iinfo(dtype).min if kind == "max" else np.iinfo(dtype).max), dtype)
    value = {"sum": 0.0, "prod": 1.0, "max": -np.inf, "min": np.inf, "or": 0.0, "and": 1.0}[kind]
    return domain.constant(np.asarray(value))


def reduced(domain: ElementDomain, kind: str, x: Array, axis: int, dtype: Any) -> Array:
    """Reduce an array along one axis."""
    if not x.shape[axis]:
        return np.broadcast_to(identity(domain, kind, dtype), np.delete(x.shape, axis))
    return domain.total(x, axis) if kind == "sum" else domain.fold(OPERATIONS[kind](domain), x, axis)


@meaning(*(f"reduce_{kind}" for kind in OPERATIONS))
def reduction(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """A reduction over `axes`."""
    domain, (x,) = run.together(values)
    dtype, kind = call.results[0].dtype, call.name.removeprefix("reduce_")
    if domain is not PLAIN and kind in ("or", "and") and np.dtype(dtype).kind != "b":
        raise call.refuse("it combines the bits of integers that depend on floating values")
    result = reduced(domain, kind, flatten_to_end(run, x, call.params["axes"]), -1, dtype)
    return [run.typed(result, domain is PLAIN, dtype)]


@meaning("reduce")
def general_reduction(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The operands (the first half of `values`) folded by `jaxpr`, from their initial values (the second half)."""
    n = len(values) // 2
    dims = call.params["dimensions"]
    rows = [StackedValue(flatten_to_end(run, v.array, dims), v.known) for v in values[:n]]
    return fold_in_order(run, call.params["jaxpr"], list(values[n:]), rows)


def fold_in_order(
    run: InterpreterRun, program: core.ClosedJaxpr, start: list[StackedValue], rows: Sequence[StackedValue]
) -> list[StackedValue]:
    """Fold the last dimension of `rows` by a program over scalars, from the first element to the last."""
    rank = max(v.array.ndim for v in rows) - 1
    scalars = InterpreterRun(run.domain, run.axes, rank)
    carry = [StackedValue(v.array.reshape((*v.array.shape[: run.lead], *(1,) * (rank - run.lead))), v.known) for v in start]
    for k in range(rows[0].array.shape[-1]):
        carry = evaluate(scalars, program, [*carry, *(StackedValue(v.array[..., k], v.known) for v in rows)])
    return carry


@meaning("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """A cumulative reduction along `axis`, possibly from its end."""
    domain, (x,) = run.together(values)
    kind, axis = call.name.removeprefix("cum"), run.lead + call.params["axis"]
    if kind == "logsumexp":
        kind, x = "sum", domain.function("exp", x)
    parts = list(np.moveaxis(x, axis, 0))
    parts = parts[::-1] if call.params["reverse"] else parts
    for k in range(1, len(parts)):
        parts[k] = OPERATIONS[kind](domain)(parts[k - 1], parts[k])
    result = np.stack(parts[::-1] if call.params["reverse"] else parts, axis)
    if call.name == "cumlogsumexp":
        result = domain.function("log", result)
    return [run.typed(result, domain is PLAIN, call.results[0].dtype)]


@meaning("argmax", "argmin")
def arg_reduction(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The first index of the extreme element; where elements have no order, an unknown function of them all."""
    domain, (x,) = run.together(values)
    (axis,) = call.params["axes"]
    parts = np.moveaxis(x, run.lead + axis, 0)
    if domain is not PLAIN and not domain.decides:
        return [StackedValue(domain.function(call.name, *parts), False)]
    pick = domain.maximum if call.name == "argmax" else domain.minimum
    best, index = parts[0], np.zeros(parts.shape[1:], np.int64)
    for k, part in enumerate(parts[1:], 1):
        better = domain.compare("ne", pick(best, part), best)
        best, index = np.where(better, part, best), np.where(better, k, index)
    return [StackedValue(index.astype(call.params["index_dtype"]), True)]


@meaning("sort")
def sort(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Operands of one shape, sorted together along `dimension`."""
    if all(v.known for v in values):
        return run_on_each_device(run, call, values)
    axis = run.lead + call.params["dimension"]
    rows = [np.moveaxis(run.lift(v), axis, -1) for v in values]
    results = rowwise(run, f"sort by {call.params['num_keys']}", rows, [(rows[0].shape[-1],)] * len(rows))
    return [StackedValue(np.moveaxis(x, -1, axis), False) for x in results]


@meaning("top_k", "approx_top_k")
def top_k(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The largest values along one dimension, and their indices."""
    if values[0].known:
        return run_on_each_device(run, call, values)
    dim = call.params.get("axis", call.params.get("reduction_dimension", -1)) % len(call.operands[0].shape)
    rows = np.moveaxis(values[0].array, run.lead + dim, -1)
    results = rowwise(run, call.function_name, [rows], [call.results[0].shape[dim : dim + 1]] * 2)
    return [StackedValue(np.moveaxis(x, -1, run.lead + dim), False) for x in results]
