"""What every device holds of a tensor, read from its type by plain indexing: the witness for whatever runs in `shard_map`.

Nothing here uses the library's own slicing. Pieces travel stacked: `[devices that may hold different ones, *piece]`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, Type, digits

DUAL = {"R": PARTIAL, "S": REPLICATED}


def mesh_of(sizes: Sequence[int]) -> tuple[Mesh, tuple[Axis, ...]]:
    axes = tuple(Axis(f"a{k}", n, 0) for k, n in enumerate(sizes))
    devices = np.asarray(jax.devices()[: prod(sizes)]).reshape(*sizes)
    return Mesh(devices, tuple(a.name for a in axes), axis_types=(AxisType.Auto,) * len(axes)), axes


def dual(type_: Type) -> Type:
    """The type of a cotangent."""
    return tuple(DUAL.get(s.kind, s) for s in type_)


def differing(type_: Type, axes: Sequence[Axis]) -> list[Axis]:
    return [a for a, s in zip(axes, type_, strict=True) if s != UNUSED]


def stack_spec(type_: Type, axes: Sequence[Axis]) -> PartitionSpec:
    """How stacked pieces lie: what is the same along an axis is known to JAX to be."""
    return PartitionSpec(tuple(a.name for a in differing(type_, axes)))


def places(type_: Type, axes: Sequence[Axis]) -> list[dict[int, int]]:
    """For every stacked piece, the index along every axis (by its number in the mesh)."""
    used = [k for k, s in enumerate(type_) if s != UNUSED]
    return [dict(zip(used, at, strict=True)) for at in itertools.product(*(range(axes[k].size) for k in used))]


def indices(shape: Sequence[int], type_: Type, axes: Sequence[Axis], at: dict[int, int]) -> tuple[np.ndarray, ...]:
    """For every dimension, which of its indices the device holds."""
    kept = [np.arange(n) for n in shape]
    for k, d in enumerate(digits(type_, axes)):
        if d is not None:
            i = kept[d.dim]
            kept[d.dim] = i[i // (shape[d.dim] // (d.outer * d.size)) % d.size == at[k]]
    return tuple(kept)


def take(whole: np.ndarray, type_: Type, axes: Sequence[Axis], rng: np.random.Generator, extra: int = 0) -> np.ndarray:
    """The stacked pieces; parts of a partial sum are random. The type says nothing of the last `extra` dimensions."""
    parts: dict[tuple, np.ndarray] = {(): whole}
    for k, s in enumerate(type_):
        if s == PARTIAL:
            parts = {(*key, (k, i)): p for key, x in parts.items() for i, p in enumerate(split(x, axes[k].size, rng))}
    found = []
    for at in places(type_, axes):
        part = parts[tuple((k, at[k]) for k, s in enumerate(type_) if s == PARTIAL)]
        shape = whole.shape[: whole.ndim - extra]
        found.append(part[np.ix_(*indices(shape, type_, axes, at))] if shape else part)
    return np.stack(found)


def split(x: np.ndarray, n: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Random parts whose sum is x."""
    if np.issubdtype(x.dtype, np.integer):
        parts = [rng.integers(-9, 9, x.shape).astype(x.dtype) for _ in range(n - 1)]
    else:
        parts = [normal(rng, x.shape, x.dtype) for _ in range(n - 1)]
    return [*parts, (x - sum(parts)).astype(x.dtype)]


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    value = rng.normal(size=tuple(shape))
    if np.issubdtype(dtype, np.complexfloating):
        value = value + 1j * rng.normal(size=tuple(shape))
    return np.asarray(value).astype(dtype)


def join(stacked: np.ndarray, shape: Sequence[int], type_: Type, axes: Sequence[Axis], same: float) -> np.ndarray:
    """The tensor that stacked pieces make up. Copies must agree: exactly, or within `same`."""
    partial = [k for k, s in enumerate(type_) if s == PARTIAL]
    wide = {"c": np.complex128, "b": np.bool_, "i": np.int64, "u": np.uint64}.get(stacked.dtype.kind, np.float64)
    extra = stacked.shape[1 + len(shape) :]
    whole = np.zeros((*shape, *extra), wide)
    seen: dict[tuple, np.ndarray] = {}
    for at, piece in zip(places(type_, axes), stacked, strict=True):
        index = indices(shape, type_, axes, at)
        held = (tuple(at[k] for k in partial), *(i.tobytes() for i in index))
        if held in seen:
            np.testing.assert_allclose(piece.astype(wide), seen[held], rtol=0, atol=same)
            continue
        seen[held] = piece.astype(wide)
        where = np.ix_(*index) if shape else ()
        if partial:
            whole[where] += piece.astype(wide)
        else:
            whole[where] = piece.astype(wide)
    return whole
