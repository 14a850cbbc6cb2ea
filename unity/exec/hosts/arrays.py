"""Placement of arrays on devices of several processes, from the whole array in every process or from each process's part.

A process can write to its own devices only, so it provides the pieces there. With one process this is `jax.device_put`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from unity.base.errors import PlanError
from unity.base.processes import exchanged, none_failed, shared


def is_global(x: Any) -> bool:
    """Return whether a value is an array on devices of several processes."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def place(x: Any, sharding: NamedSharding) -> Any:
    """Place an array with a sharding. If it is not global yet, every process must pass the whole of it."""
    if sharding.is_fully_addressable or is_global(x):
        return jax.device_put(x, sharding)
    whole = _pieces(x)
    return jax.make_array_from_callback(np.shape(x), sharding, lambda index: whole[index])


def check_whole(leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Raise PlanError in every process if an array that all processes hold as a whole is not equal in all of them."""
    theirs = [one.split() for one in exchanged(" ".join(_checksum(x) for x in leaves))]
    for k, path in enumerate(paths):
        different = [p for p, one in enumerate(theirs) if one[k : k + 1] != theirs[0][k : k + 1]]
        if different:
            raise PlanError(
                f"{path} is not the same in processes 0 and {different[0]}: what plan.shard places, or nobody, must be whole and"
                " equal in every process.\n    Start from the same seed; where every process has its part of a batch, use"
                " plan.shard.local. (docs: hosts#arguments)"
            )


def _checksum(x: Any) -> str:
    """Return a checksum of an array's shape, type and content; a constant for a global array, which all processes share."""
    if is_global(x):
        return "global"
    data = np.asarray(jax.random.key_data(x) if _is_key(x) else x)
    text = f"{data.dtype}{data.shape}".encode()
    return f"{zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data, zlib.crc32(text)):08x}"


def place_parts(
    parts: Sequence[Any], shapes: Sequence[tuple[int, ...]], shardings: Sequence[NamedSharding], paths: Sequence[str], new: bool
) -> list:
    """Place arrays of which every process has an equal part of the rows (dimension 0), in the order of processes, or the whole.

    Args:
        parts: this process's part of each array, or the whole.
        shapes: the shapes of the whole arrays.
        shardings: their shardings.
        paths: their names, for errors.
        new: whether no arrays like these were placed before. Then the processes that share the devices compare their parts, and all
            raise PlanError if one of them is wrong. That takes a round of messages, so it is not done for every batch.
    """
    devices = shardings[0].device_set if shardings else ()
    processes = sorted({d.process_index for d in devices}) or [0]
    problem = next(filter(None, map(partial(_problem_of, len(processes)), parts, shapes, paths)), "")
    if new and shared(devices):
        none_failed(problem)
        whole = [k for k, (x, shape) in enumerate(zip(parts, shapes, strict=True)) if np.shape(x) == shape]
        check_whole([parts[k] for k in whole], [paths[k] for k in whole])
    elif problem:
        raise PlanError(problem)
    return [
        place(x, sharding) if np.shape(x) == shape else _joined(x, shape, sharding, processes)
        for x, shape, sharding in zip(parts, shapes, shardings, strict=True)
    ]


def in_rows(shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return a sharding of an array's rows over the outermost axes of a mesh that divide them evenly."""
    names = list[str]()
    for name in mesh.axis_names if shape else ():
        if shape[0] % prod(mesh.shape[n] for n in (*names, name)):
            break
        names.append(name)
    return NamedSharding(mesh, PartitionSpec(tuple(names)) if names else PartitionSpec())


def _problem_of(processes: int, part: Any, shape: tuple[int, ...], path: str) -> str:
    """Return the reason why a value is neither a process's part of an array of this shape nor the whole, or "" if it is one."""
    shape_here = np.shape(part)
    if shape_here == shape:
        return ""
    if not shape or shape[0] % processes:
        return f"{path} is planned as {list(shape)}, which {processes} processes cannot have equal parts of: give all the whole"
    expected = [shape[0] // processes, *shape[1:]]
    if list(shape_here) == expected:
        return ""
    return (
        f"{path} is {list(shape_here)}; of the {list(shape)} that the plan is for, each of {processes} processes has {expected}"
        " (docs: hosts#arguments)"
    )


def _joined(part: Any, shape: tuple[int, ...], sharding: NamedSharding, processes: Sequence[int]) -> Any:
    """Return the array whose rows are distributed over the processes, after sending rows to where the plan places them."""
    rows = shape[0] // len(processes)
    start = processes.index(jax.process_index()) * rows
    row_sharding, pieces = _row_sharding(shape, sharding, processes), _pieces(part)

    def piece(index: Any) -> Any:
        first, last, _ = index[0].indices(shape[0])
        return pieces[(slice(first - start, last - start), *index[1:])]

    array = jax.make_array_from_callback(shape, row_sharding, piece)
    return array if row_sharding is sharding else jax.device_put(array, sharding)


def _row_sharding(shape: tuple[int, ...], planned: NamedSharding, processes: Sequence[int]) -> NamedSharding:
    """Return the sharding in which processes provide their rows: the plan's if no row must be sent, else one by rows."""
    rows = shape[0] // len(processes)
    for device, index in planned.devices_indices_map(shape).items():
        first, last, _ = index[0].indices(shape[0])
        own = processes.index(device.process_index)
        if first < own * rows or last > (own + 1) * rows:
            break
    else:
        return planned
    devices = sorted(planned.device_set, key=lambda d: (d.process_index, d.id))
    mesh = Mesh(np.array(devices).reshape(len(processes), -1), ("process", "device"))
    names = ("process", "device") if shape[0] % len(devices) == 0 else "process"
    return NamedSharding(mesh, PartitionSpec(names))


def _pieces(x: Any) -> Any:
    """Return the array on the host, from which pieces are sliced, so that no device holds the whole."""
    return x if _is_key(x) else np.asarray(x, jax.typeof(x).dtype)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
