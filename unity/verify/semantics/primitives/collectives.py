"""Collectives: they move and combine elements along the leading, device dimensions of stacked arrays."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from unity.verify.semantics.domains import Array
from unity.verify.semantics.primitives.core import InterpreterRun, PrimitiveCall, StackedValue, meaning
from unity.verify.semantics.primitives.elementwise import identity
from unity.verify.semantics.primitives.reduction import reduced


def device_dimensions(run: InterpreterRun, call: PrimitiveCall, names: Any) -> list[int]:
    """Return the leading dimensions of the named axes."""
    if call.params.get("axis_index_groups") is not None:
        raise call.refuse("axis_index_groups are not supported")
    positions = [axis.name for axis in run.axes]
    return [positions.index(n) for n in (names if isinstance(names, (tuple, list)) else (names,))]


def devices_to_local(run: InterpreterRun, x: Array, axes: Sequence[int]) -> Array:
    """Make the devices along some axes the first local dimension, and leave size one in their leading dimensions."""
    shape = list(x.shape)
    for i in axes:
        shape[i] = run.axes[i].size
    x = np.moveaxis(np.broadcast_to(x, shape), axes, range(len(axes)))
    x = x.reshape(-1, *x.shape[len(axes) :])
    x = np.moveaxis(x, 0, run.lead - len(axes))
    return np.expand_dims(x, sorted(axes))


def local_to_devices(run: InterpreterRun, x: Array, axes: Sequence[int]) -> Array:
    """Undo `devices_to_local`: distribute the first local dimension over the devices along some axes."""
    x = np.moveaxis(x, run.lead, 0)
    x = np.squeeze(x, tuple(1 + i for i in axes))
    x = x.reshape((*(run.axes[i].size for i in axes), *x.shape[1:]))
    return np.moveaxis(x, range(len(axes)), axes)


meaning("pvary", "pcast", "pbroadcast", "unreplicate")(identity)


@meaning("psum", "psum_invariant", "pmax", "pmin", "pmax_invariant", "pmin_invariant")
def all_reduce(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The reduction over all devices along the axes, the same on each of them."""
    axes = device_dimensions(run, call, call.params["axes"])
    kind = {"psum": "sum", "pmax": "max", "pmin": "min"}[call.name.removesuffix("_invariant")]
    results = []
    for value, aval in zip(values, call.results, strict=True):
        domain, (x,) = run.together([value])
        total = reduced(domain, kind, devices_to_local(run, x, axes), run.lead, aval.dtype)
        results.append(StackedValue(total, value.known))
    return results


@meaning("axis_index")
def axis_index(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Each device's own coordinate along the axes, the first of which is the most major."""
    index = np.zeros((1,) * run.lead, np.int32)
    for i in device_dimensions(run, call, call.params["axis_name"]):
        n = run.axes[i].size
        index = index * n + np.arange(n, dtype=np.int32).reshape([-1 if k == i else 1 for k in range(run.lead)])
    return [StackedValue(index, True)]


def merge_first_into(run: InterpreterRun, x: Array, dim: int) -> Array:
    """Move the first local dimension before dimension `dim` (counted without it), and merge the two."""
    x = np.moveaxis(x, run.lead, run.lead + dim)
    at = run.lead + dim
    return x.reshape((*x.shape[:at], -1, *x.shape[at + 2 :]))


def chunks_first(run: InterpreterRun, x: Array, dim: int, n: int, tiled: bool) -> Array:
    """Split dimension `dim` into n chunks, and make these the first local dimension."""
    at = run.lead + dim
    if tiled:
        x = x.reshape((*x.shape[:at], n, x.shape[at] // n, *x.shape[at + 1 :]))
    return np.moveaxis(x, at, run.lead)


@meaning("all_gather", "all_gather_invariant")
def all_gather(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The pieces of all devices side by side, in the order of devices."""
    dim = call.params["all_gather_dimension"]
    x = devices_to_local(run, values[0].array, device_dimensions(run, call, call.params["axis_name"]))
    x = merge_first_into(run, x, dim) if call.params["tiled"] else np.moveaxis(x, run.lead, run.lead + dim)
    return [StackedValue(x, values[0].known)]


@meaning("reduce_scatter")
def reduce_scatter(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The sum over all devices, of which each device keeps its own chunk."""
    domain, (x,) = run.together(values)
    axes = device_dimensions(run, call, call.params["axis_name"])
    x = domain.total(devices_to_local(run, x, axes), run.lead)
    n = prod(run.axes[i].size for i in axes)
    x = chunks_first(run, x, call.params["scatter_dimension"], n, call.params["tiled"])
    return [StackedValue(local_to_devices(run, x, axes), values[0].known)]


@meaning("all_to_all")
def all_to_all(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """On device j, every device's j-th chunk. (Where it is not tiled, JAX has added and will remove dimensions of one.)"""
    axes = device_dimensions(run, call, call.params["axis_name"])
    split, concat = call.params["split_axis"], call.params["concat_axis"]
    n = prod(run.axes[i].size for i in axes)
    x = devices_to_local(run, values[0].array, axes)  # [source, *local]
    x = chunks_first(run, x, split + 1, n, True)  # [target, source, *rest]
    x = local_to_devices(run, x, axes)  # [source, *rest]
    return [StackedValue(merge_first_into(run, x, concat), values[0].known)]


@meaning("ppermute")
def permute(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The piece of the device that `perm` pairs with each device; zero where nothing arrives."""
    axes = device_dimensions(run, call, call.params["axis_name"])
    (value,) = values
    x = devices_to_local(run, value.array, axes)
    zero = np.zeros((), x.dtype) if value.known else run.domain.constant(np.zeros(()))
    result = np.array(np.broadcast_to(zero, x.shape))
    for source, target in call.params["perm"]:
        result[(slice(None),) * run.lead + (target,)] = x[(slice(None),) * run.lead + (source,)]
    return [StackedValue(local_to_devices(run, result, axes), value.known)]
