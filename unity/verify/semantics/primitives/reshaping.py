"""Primitives that rearrange elements without reading them, on the trailing, local dimensions of stacked arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unity.verify.semantics.domains import Array
from unity.verify.semantics.primitives.core import (
    InterpreterRun,
    PrimitiveCall,
    StackedValue,
    is_inexact,
    meaning,
    structural,
)


@structural("reshape")
def reshape(run: InterpreterRun, call: PrimitiveCall, x: Array) -> Array:
    """Reshape to `new_sizes`, row by row or in the order of `dimensions`."""
    if call.params.get("dimensions") is not None:
        x = transposed(run, x, call.params["dimensions"])
    return x.reshape((*x.shape[: run.lead], *call.params["new_sizes"]))


def transposed(run: InterpreterRun, x: Array, permutation: Sequence[int]) -> Array:
    """Permute local dimensions."""
    return x.transpose(*range(run.lead), *(run.lead + i for i in permutation))


@structural("transpose")
def transpose(run: InterpreterRun, call: PrimitiveCall, x: Array) -> Array:
    """Make operand dimension `permutation[k]` result dimension k."""
    return transposed(run, x, call.params["permutation"])


@structural("broadcast_in_dim")
def broadcast_in_dim(run: InterpreterRun, call: PrimitiveCall, x: Array) -> Array:
    """Make operand dimension i dimension `broadcast_dimensions[i]` of `shape`."""
    shape, lead = call.params["shape"], x.shape[: run.lead]
    inner = [1] * len(shape)
    for n, d in zip(run.shape(x), call.params["broadcast_dimensions"], strict=True):
        inner[d] = n
    return np.broadcast_to(x.reshape((*lead, *inner)), (*lead, *shape))


@structural("squeeze")
def squeeze(run: InterpreterRun, call: PrimitiveCall, x: Array) -> Array:
    """Remove some dimensions of size one."""
    return np.squeeze(x, tuple(run.lead + i % (x.ndim - run.lead) for i in call.params["dimensions"]))


@structural("rev")
def reverse(run: InterpreterRun, call: PrimitiveCall, x: Array) -> Array:
    """Reverse some dimensions."""
    return np.flip(x, tuple(run.lead + i for i in call.params["dimensions"]))


@structural("rotate")
def rotate(run: InterpreterRun, call: PrimitiveCall, x: Array) -> Array:
    """Move index i of a dimension of n indices to i + shift modulo n."""
    return np.roll(x, call.params["shift"], run.lead + call.params["dimension"])


@structural("slice")
def slice_(run: InterpreterRun, call: PrimitiveCall, x: Array) -> Array:
    """Slice every dimension from start to limit with a stride."""
    starts, limits = call.params["start_indices"], call.params["limit_indices"]
    strides = call.params["strides"] or (1,) * len(starts)
    return x[(..., *(slice(a, b, s) for a, b, s in zip(starts, limits, strides, strict=True)))]


@structural("tile")
def tile(run: InterpreterRun, call: PrimitiveCall, x: Array) -> Array:
    """Repeat the operand along each dimension."""
    return np.tile(x, (*(1,) * run.lead, *call.params["reps"]))


@meaning("split")
def split(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Consecutive slices of the given sizes."""
    (value,) = values
    ends = np.cumsum(call.params["sizes"])[:-1]
    return [StackedValue(x, value.known) for x in np.split(value.array, ends, run.lead + call.params["axis"])]


@meaning("unstack")
def unstack(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """One result for each index of a dimension."""
    (value,) = values
    return [StackedValue(x, value.known) for x in np.moveaxis(value.array, run.lead + call.params["axis"], 0)]


def with_equal_leads(run: InterpreterRun, values: Sequence[StackedValue]) -> tuple[list[Array], bool]:
    """Return arrays that have one leading shape, and whether all are known; they are elements unless all are."""
    _, arrays = run.together(values)
    lead = np.broadcast_shapes(*(x.shape[: run.lead] for x in arrays))
    return [np.broadcast_to(x, lead + run.shape(x)) for x in arrays], all(v.known for v in values)


@meaning("concatenate")
def concatenate(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Operands one after another along `dimension`."""
    arrays, known = with_equal_leads(run, values)
    return [StackedValue(np.concatenate(arrays, run.lead + call.params["dimension"]), known)]


@meaning("stack")
def stack(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Operands side by side along a new dimension."""
    arrays, known = with_equal_leads(run, values)
    return [StackedValue(np.stack(arrays, run.lead + call.params["axis"]), known)]


@meaning("pad")
def pad(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The operand with a padding value around and between its elements; negative padding crops."""
    _, (x, value) = run.together(values)
    return [StackedValue(padded(run, x, value, call.params["padding_config"]), all(v.known for v in values))]


def padded(run: InterpreterRun, x: Array, value: Array, config: Sequence[tuple[int, int, int]]) -> Array:
    """Pad an array by `(low, high, interior)` for each dimension. `value` has the local shape `()`."""
    extents = [(n - 1) * (inner + 1) + 1 if n else 0 for n, (_, _, inner) in zip(run.shape(x), config, strict=True)]
    sizes = [max(low, 0) + n + max(high, 0) for n, (low, high, _) in zip(extents, config, strict=True)]
    lead = np.broadcast_shapes(x.shape[: run.lead], value.shape[: run.lead])
    fill = value.reshape((*value.shape[: run.lead], *(1,) * len(sizes)))
    result = np.array(np.broadcast_to(fill, (*lead, *sizes)), np.result_type(fill, x))  # a real number around complex ones
    places = [slice(max(low, 0), max(low, 0) + n, i + 1) for n, (low, _, i) in zip(extents, config, strict=True)]
    result[(..., *places)] = x
    return result[(..., *(slice(max(-low, 0), n - max(-high, 0)) for n, (low, high, _) in zip(sizes, config, strict=True)))]


@meaning("iota")
def iota(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Indices along one dimension."""
    shape, dim, dtype = call.params["shape"], call.params["dimension"], call.params["dtype"]
    line = np.arange(shape[dim]).reshape([-1 if i == dim else 1 for i in range(len(shape))])
    array = np.broadcast_to(line, (*(1,) * run.lead, *shape))
    return [StackedValue(run.domain.constant(array), False) if is_inexact(dtype) else StackedValue(array.astype(dtype), True)]
