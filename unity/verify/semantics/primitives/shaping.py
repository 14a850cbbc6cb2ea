"""Primitives that move elements about without looking at them: on the trailing, local dimensions of stacked arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from unity.verify.semantics.domains import Array
from unity.verify.semantics.primitives.core import Application, Run, Value, floating, meaning, structural


@structural("reshape")
def reshape(run: Run, app: Application, x: Array) -> Array:
    """To `new_sizes`."""
    if app.params.get("dimensions") is not None:
        x = transposed(run, x, app.params["dimensions"])
    return x.reshape((*x.shape[: run.lead], *app.params["new_sizes"]))


def transposed(run: Run, x: Array, permutation: Sequence[int]) -> Array:
    """Local dimensions permuted."""
    return x.transpose(*range(run.lead), *(run.lead + i for i in permutation))


@structural("transpose")
def transpose(run: Run, app: Application, x: Array) -> Array:
    """Result dimension k is operand dimension `permutation[k]`."""
    return transposed(run, x, app.params["permutation"])


@structural("broadcast_in_dim")
def broadcast_in_dim(run: Run, app: Application, x: Array) -> Array:
    """Operand dimension i becomes `broadcast_dimensions[i]` of `shape`."""
    shape, lead = app.params["shape"], x.shape[: run.lead]
    inner = [1] * len(shape)
    for n, d in zip(run.shape(x), app.params["broadcast_dimensions"], strict=True):
        inner[d] = n
    return np.broadcast_to(x.reshape((*lead, *inner)), (*lead, *shape))


@structural("squeeze")
def squeeze(run: Run, app: Application, x: Array) -> Array:
    """Without some dimensions of size one."""
    return np.squeeze(x, tuple(run.lead + i % (x.ndim - run.lead) for i in app.params["dimensions"]))


@structural("rev")
def reverse(run: Run, app: Application, x: Array) -> Array:
    """Some dimensions backwards."""
    return np.flip(x, tuple(run.lead + i for i in app.params["dimensions"]))


@structural("slice")
def slice_(run: Run, app: Application, x: Array) -> Array:
    """From start to limit, in strides."""
    starts, limits = app.params["start_indices"], app.params["limit_indices"]
    strides = app.params["strides"] or (1,) * len(starts)
    return x[(..., *(slice(a, b, s) for a, b, s in zip(starts, limits, strides, strict=True)))]


@structural("tile")
def tile(run: Run, app: Application, x: Array) -> Array:
    """Repeated whole along each dimension."""
    return np.tile(x, (*(1,) * run.lead, *app.params["reps"]))


@meaning("split")
def split(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Consecutive parts of the given sizes."""
    (value,) = values
    at = np.cumsum(app.params["sizes"])[:-1]
    return [Value(x, value.known) for x in np.split(value.array, at, run.lead + app.params["axis"])]


@meaning("unstack")
def unstack(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """One result for each index of a dimension."""
    (value,) = values
    return [Value(x, value.known) for x in np.moveaxis(value.array, run.lead + app.params["axis"], 0)]


def same_lead(run: Run, values: Sequence[Value]) -> tuple[list[Array], bool]:
    """Arrays with one leading shape, as elements unless all are known."""
    _, arrays = run.together(values)
    lead = np.broadcast_shapes(*(x.shape[: run.lead] for x in arrays))
    return [np.broadcast_to(x, lead + run.shape(x)) for x in arrays], all(v.known for v in values)


@meaning("concatenate")
def concatenate(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """One after another along `dimension`."""
    arrays, known = same_lead(run, values)
    return [Value(np.concatenate(arrays, run.lead + app.params["dimension"]), known)]


@meaning("stack")
def stack(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Along a new dimension."""
    arrays, known = same_lead(run, values)
    return [Value(np.stack(arrays, run.lead + app.params["axis"]), known)]


@meaning("pad")
def pad(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Operand and padding value; `(low, high, interior)` for each dimension, negative ones cut."""
    _, (x, value) = run.together(values)
    return [Value(padded(run, x, value, app.params["padding_config"]), all(v.known for v in values))]


def padded(run: Run, x: Array, value: Array, config: Sequence[tuple[int, int, int]]) -> Array:
    """`value` has local shape `()`."""
    spread = [(n - 1) * (inside + 1) + 1 if n else 0 for n, (_, _, inside) in zip(run.shape(x), config, strict=True)]
    sizes = [max(low, 0) + n + max(high, 0) for n, (low, high, _) in zip(spread, config, strict=True)]
    lead = np.broadcast_shapes(x.shape[: run.lead], value.shape[: run.lead])
    filled = value.reshape((*value.shape[: run.lead], *(1,) * len(sizes)))
    result = np.array(np.broadcast_to(filled, (*lead, *sizes)), np.result_type(filled, x))  # a real number around complex ones
    places = [slice(max(low, 0), max(low, 0) + n, i + 1) for n, (low, _, i) in zip(spread, config, strict=True)]
    result[(..., *places)] = x
    return result[(..., *(slice(max(-low, 0), n - max(-high, 0)) for n, (low, high, _) in zip(sizes, config, strict=True)))]


@meaning("iota")
def iota(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Counts along one dimension."""
    shape, dim = app.params["shape"], app.params["dimension"]
    line = np.arange(shape[dim]).reshape([-1 if i == dim else 1 for i in range(len(shape))])
    array = np.broadcast_to(line, (*(1,) * run.lead, *shape))
    dtype = app.params["dtype"]
    return [Value(run.domain.constant(array), False) if floating(dtype) else Value(array.astype(dtype), True)]
