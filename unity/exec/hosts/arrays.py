"""Arrays on devices of several processes: made from the whole on each of them, or from each one's part.

A process can write to its own devices only, so it gives the pieces that lie there. With one process this is `jax.device_put`.
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
from unity.base.processes import exchanged, none_failed, several


def is_global(x: Any) -> bool:
    """Whether it is an array that already lies on devices of several processes."""
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def place(x: Any, sharding: NamedSharding) -> Any:
    """An array placed so. Of one that is not global yet, every process has the whole."""
    if sharding.is_fully_addressable or is_global(x):
        return jax.device_put(x, sharding)
    whole = _pieces(x)
    return jax.make_array_from_callback(np.shape(x), sharding, lambda index: whole[index])


def check_whole(leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Raises PlanError in every process if an array that all have whole is not the same in all of them."""
    theirs = [one.split() for one in exchanged(" ".join(_print_of(x) for x in leaves))]
    for k, path in enumerate(paths):
        different = [p for p, one in enumerate(theirs) if one[k : k + 1] != theirs[0][k : k + 1]]
        if different:
            raise PlanError(
                f"{path} is not the same in processes 0 and {different[0]}: what plan.shard places, or nobody, must be whole and"
                " equal in every process.\n    Start from the same seed; where every process has its part of a batch, use"
                " plan.shard_local. (docs: hosts#arguments)"
            )


def _print_of(x: Any) -> str:
    """Stands for an array's shape and content; global arrays are one array to all processes."""
    if is_global(x):
        return "global"
    data = np.asarray(jax.random.key_data(x) if _is_key(x) else x)
    text = f"{data.dtype}{data.shape}".encode()
    return f"{zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data, zlib.crc32(text)):08x}"


def place_parts(
    parts: Sequence[Any], shapes: Sequence[tuple[int, ...]], shardings: Sequence[NamedSharding], paths: Sequence[str], new: bool
) -> list:
    """Arrays of which every process has an equal part of the rows (along dimension 0), in the order of processes, or the whole.

    `new`: whether nothing like them was placed before. Then all processes compare what they were given, and if anything is wrong
    in one of them, all raise PlanError. That takes a message to and fro, so it is not done for every batch.
    """
    processes = sorted({d.process_index for d in shardings[0].device_set}) if shardings else [0]
    problem = next(filter(None, map(partial(_wrong, len(processes)), parts, shapes, paths)), "")
    if new and several():
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
    """An array's rows on as many devices of a mesh as can have equal parts of them: those along its outermost axes."""
    names = list[str]()
    for name in mesh.axis_names if shape else ():
        if shape[0] % prod(mesh.shape[n] for n in (*names, name)):
            break
        names.append(name)
    return NamedSharding(mesh, PartitionSpec(tuple(names)) if names else PartitionSpec())


def _wrong(processes: int, part: Any, shape: tuple[int, ...], path: str) -> str:
    """Why something is not a process's part of an array of this shape; nothing if it is one, or the whole."""
    given = np.shape(part)
    if given == shape:
        return ""
    if not shape or shape[0] % processes:
        return f"{path} is planned as {list(shape)}, which {processes} processes cannot have equal parts of: give all the whole"
    wanted = [shape[0] // processes, *shape[1:]]
    if list(given) == wanted:
        return ""
    return (
        f"{path} is {list(given)}; of the {list(shape)} that the plan is for, each of {processes} processes has {wanted}"
        " (docs: hosts#arguments)"
    )


def _joined(part: Any, shape: tuple[int, ...], sharding: NamedSharding, processes: Sequence[int]) -> Any:
    """The array whose rows the processes have. Where the plan wants rows in another process, or in all, they are sent there."""
    rows = shape[0] // len(processes)
    start = processes.index(jax.process_index()) * rows
    held, pieces = _held(shape, sharding, processes), _pieces(part)

    def piece(index: Any) -> Any:
        first, last, _ = index[0].indices(shape[0])
        return pieces[(slice(first - start, last - start), *index[1:])]

    array = jax.make_array_from_callback(shape, held, piece)
    return array if held is sharding else jax.device_put(array, sharding)


def _held(shape: tuple[int, ...], wanted: NamedSharding, processes: Sequence[int]) -> NamedSharding:
    """How the rows lie before anything is sent: as wanted, if that leaves every process its own. All processes find the same."""
    rows = shape[0] // len(processes)
    for device, index in wanted.devices_indices_map(shape).items():
        first, last, _ = index[0].indices(shape[0])
        own = processes.index(device.process_index)
        if first < own * rows or last > (own + 1) * rows:
            break
    else:
        return wanted
    devices = sorted(wanted.device_set, key=lambda d: (d.process_index, d.id))
    mesh = Mesh(np.array(devices).reshape(len(processes), -1), ("process", "device"))
    names = ("process", "device") if shape[0] % len(devices) == 0 else "process"
    return NamedSharding(mesh, PartitionSpec(names))


def _pieces(x: Any) -> Any:
    """What slices are taken from: on the host, so that no device holds the whole."""
    return x if _is_key(x) else np.asarray(x, jax.typeof(x).dtype)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
