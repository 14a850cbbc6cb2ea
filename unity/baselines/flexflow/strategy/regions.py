"""Which devices hold the same part of a weight, when several operators each cut it in their own way."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unity.baselines.flexflow.strategy.pieces import Slices, members

Readers = tuple[tuple[Slices, tuple[int, ...]], ...]  # how each cuts the weight, and its pieces' devices


class Shared(NamedTuple):
    """The parts of a weight that several devices read.

    Args:
        devices: those of each part, in order, part after part.
        counts: how many devices each part has.
        elements: how many elements it has.
    """

    devices: NDArray[np.int64]
    counts: NDArray[np.int64]
    elements: NDArray[np.int64]


def shared(readers: Readers) -> Shared:
    """The parts of a weight that the same devices read, where these are more than one."""
    found = shared_by_number(numbered(readers))
    chosen = np.array(list(dict.fromkeys(d for _, on in readers for d in on)), np.int64)[found.devices]
    part = np.repeat(np.arange(len(found.counts)), found.counts)
    return found._replace(devices=chosen[np.lexsort((chosen, part))])


def numbered(readers: Readers) -> Readers:
    """The same, of devices that are numbered in the order in which they are named."""
    number: dict[int, int] = {}
    return tuple([(cut, tuple([number.setdefault(d, len(number)) for d in on])) for cut, on in readers])


def shared_by_number(readers: Readers) -> Shared:
    """The same, of devices that are `numbered`: which they are makes no difference to parts."""
    readers = tuple(dict.fromkeys(readers))
    if len(readers) == 1 and len(set(readers[0][1])) == len(readers[0][1]):
        return _sliced(readers[0][0])
    shape = readers[0][0].shape
    units = tuple(
        gcd(n, *(n // (outer * degree) for cut, _ in readers for outer, degree, _ in cut.cuts[dim])) for dim, n in enumerate(shape)
    )
    cells = tuple(n // u for n, u in zip(shape, units, strict=True))  # of every dimension: finer than any cut of it
    holds = np.zeros((1 + max(d for _, on in readers for d in on), prod(cells)), bool)
    for cut, on in readers:
        found = _cells(cut, cells, units)
        for i, device in enumerate(on):
            holds[device] |= found[i]
    packed = np.ascontiguousarray(np.packbits(holds, axis=0).T)
    cell_counts = Counter(packed.view((np.void, packed.shape[1])).ravel().tolist())
    parts = [(on, cell_counts[pattern]) for pattern in sorted(cell_counts) if len(on := _members(pattern, len(holds))) > 1]
    return Shared(
        np.array([d for on, _ in parts for d in on], np.int64),
        np.array([len(on) for on, _ in parts], np.int64),
        np.array([count * prod(units) for _, count in parts], np.int64),
    )


def _sliced(cut: Slices) -> Shared:
    """The same of one reader, on as many devices as it has pieces: parts are its slices, in the same order as elsewhere."""
    if not cut.copied:
        return Shared(*np.empty((3, 0), np.int64))
    found = np.argsort(cut.slice_of, kind="stable").reshape(cut.slices, -1)
    devices = found[np.argsort(-found[:, 0])]
    return Shared(devices.ravel(), np.full(cut.slices, devices.shape[1]), np.full(cut.slices, prod(cut.local)))


def _members(pattern: bytes, devices: int) -> list[int]:
    """Which of so many devices have their bits set, the first of them the highest."""
    bits, last = int.from_bytes(pattern, "big"), 8 * len(pattern) - 1
    return [k for k in range(devices) if bits >> (last - k) & 1]


@lru_cache(maxsize=4096)
def _cells(cut: Slices, cells: tuple[int, ...], units: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which cells each piece reads, [pieces, cells]. Not to be written to."""
    n = prod(cut.degrees)
    found = np.ones((n, 1), bool)
    for dim, (count, unit) in enumerate(zip(cells, units, strict=True)):
        where = members(count * unit, tuple((outer, degree) for outer, degree, _ in cut.cuts[dim]))[::unit]
        own = cut.parts(dim)[:, None] == where
        found = (found[:, :, None] & own[:, None, :]).reshape(n, -1)
    return found
