"""Collectives: moving and adding along the leading, device dimensions of stacked arrays."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from unity.verify.semantics.domains import Array
from unity.verify.semantics.primitives.core import Application, Run, Value, meaning
from unity.verify.semantics.primitives.elementwise import same
from unity.verify.semantics.primitives.reductions import reduced


def places(run: Run, app: Application, names: Any) -> list[int]:
    """The leading dimensions of the named axes."""
    if app.params.get("axis_index_groups") is not None:
        raise app.refuse("axis_index_groups")
    known = [axis.name for axis in run.axes]
    return [known.index(n) for n in (names if isinstance(names, (tuple, list)) else (names,))]


def whole(run: Run, x: Array, axes: Sequence[int]) -> Array:
    """`x` with its full size along device dimensions."""
    shape = list(x.shape)
    for i in axes:
        shape[i] = run.axes[i].size
    return np.broadcast_to(x, shape)


def to_local(run: Run, x: Array, axes: Sequence[int]) -> Array:
    """The devices along some axes as one local dimension, the first; those leading dimensions have size one then."""
    x = np.moveaxis(whole(run, x, axes), axes, range(len(axes)))
    x = x.reshape(-1, *x.shape[len(axes) :])
    rest = run.lead - len(axes)
    x = np.moveaxis(x, 0, rest)
    return np.expand_dims(x, sorted(axes))


def to_devices(run: Run, x: Array, axes: Sequence[int]) -> Array:
    """The inverse: the first local dimension goes to devices along axes where the leading dimensions have size one."""
    x = np.moveaxis(x, run.lead, 0)
    x = np.squeeze(x, tuple(1 + i for i in axes))
    x = x.reshape((*(run.axes[i].size for i in axes), *x.shape[1:]))
    return np.moveaxis(x, range(len(axes)), axes)


meaning("pvary", "pcast", "pbroadcast", "unreplicate")(same)


@meaning("psum", "psum_invariant", "pmax", "pmin", "pmax_invariant", "pmin_invariant")
def all_reduce(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Afterwards all devices along the axes hold the same."""
    axes = places(run, app, app.params["axes"])
    kind = {"psum": "sum", "pmax": "max", "pmin": "min"}[app.name.removesuffix("_invariant")]
    found = []
    for value, aval in zip(values, app.results, strict=True):
        domain, (x,) = run.together([value])
        found.append(Value(reduced(domain, kind, to_local(run, x, axes), run.lead, aval.dtype), value.known))
    return found


@meaning("axis_index")
def axis_index(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """The device's own coordinate, the first axis most major."""
    index = np.zeros((1,) * run.lead, np.int32)
    for i in places(run, app, app.params["axis_name"]):
        n = run.axes[i].size
        index = index * n + np.arange(n, dtype=np.int32).reshape([-1 if k == i else 1 for k in range(run.lead)])
    return [Value(index, True)]


def merged(run: Run, x: Array, dim: int) -> Array:
    """The first local dimension put before dimension `dim` (counted without it), and made one with it."""
    x = np.moveaxis(x, run.lead, run.lead + dim)
    at = run.lead + dim
    return x.reshape((*x.shape[:at], -1, *x.shape[at + 2 :]))


def chunks(run: Run, x: Array, dim: int, n: int, tiled: bool) -> Array:
    """Dimension `dim` taken apart in n chunks, which are the first local dimension."""
    at = run.lead + dim
    if tiled:
        x = x.reshape((*x.shape[:at], n, x.shape[at] // n, *x.shape[at + 1 :]))
    return np.moveaxis(x, at, run.lead)


@meaning("all_gather", "all_gather_invariant")
def all_gather(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Pieces side by side, in the order of devices."""
    dim = app.params["all_gather_dimension"]
    x = to_local(run, values[0].array, places(run, app, app.params["axis_name"]))
    x = merged(run, x, dim) if app.params["tiled"] else np.moveaxis(x, run.lead, run.lead + dim)
    return [Value(x, values[0].known)]


@meaning("reduce_scatter")
def reduce_scatter(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Of the sum, each device keeps its own chunk."""
    domain, (x,) = run.together(values)
    axes = places(run, app, app.params["axis_name"])
    x = domain.total(to_local(run, x, axes), run.lead)
    n = prod(run.axes[i].size for i in axes)
    x = chunks(run, x, app.params["scatter_dimension"], n, app.params["tiled"])
    return [Value(to_devices(run, x, axes), values[0].known)]


@meaning("all_to_all")
def all_to_all(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Device j gets every device's j-th chunk. (Where it is not tiled, JAX has added and will remove dimensions of one.)"""
    axes = places(run, app, app.params["axis_name"])
    split, concat = app.params["split_axis"], app.params["concat_axis"]
    n = prod(run.axes[i].size for i in axes)
    x = to_local(run, values[0].array, axes)  # [source, *local]
    x = chunks(run, x, split + 1, n, True)  # [target, source, *rest]
    x = to_devices(run, x, axes)  # [source, *rest]
    return [Value(merged(run, x, concat), values[0].known)]


@meaning("ppermute")
def permute(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """From device to device as `perm` says; zero where nothing arrives."""
    axes = places(run, app, app.params["axis_name"])
    (value,) = values
    x = to_local(run, value.array, axes)
    zero = np.zeros((), x.dtype) if value.known else run.domain.constant(np.zeros(()))
    result = np.array(np.broadcast_to(zero, x.shape))
    for source, target in app.params["perm"]:
        result[(slice(None),) * run.lead + (target,)] = x[(slice(None),) * run.lead + (source,)]
    return [Value(to_devices(run, result, axes), value.known)]
