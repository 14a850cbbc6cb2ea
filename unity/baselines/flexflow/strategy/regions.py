"""The parts of a weight that several devices hold, where several operators each cut it in their own way."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import gcd, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unity.baselines.flexflow.strategy.pieces import Slices, members

Readers = tuple[tuple[Slices, tuple[int, ...]], ...]  # how each cuts the weight, and its pieces' devices


class SharedParts(NamedTuple):
    """The parts of a weight that several devices read.

    Args:
        devices: the devices of each part, ascending, part after part.
        counts: how many devices each part has.
        elements: how many elements each part has.
    """

    devices: NDArray[np.int64]
    counts: NDArray[np.int64]
    elements: NDArray[np.int64]


def shared(readers: Readers) -> SharedParts:
    """Return the parts of a weight that more than one device reads."""
    by_number = shared_by_number(numbered(readers))
    chosen = np.array(list(dict.fromkeys(d for _, on in readers for d in on)), np.int64)[by_number.devices]
    part = np.repeat(np.arange(len(by_number.counts)), by_number.counts)
    return by_number._replace(devices=chosen[np.lexsort((chosen, part))])


def numbered(readers: Readers) -> Readers:
    """Replace the devices of readers by numbers, in order of appearance."""
    number: dict[int, int] = {}
    return tuple([(cut, tuple([number.setdefault(d, len(number)) for d in on])) for cut, on in readers])


def shared_by_number(readers: Readers) -> SharedParts:
    """Return the shared parts of readers that are `numbered`. The parts do not depend on which devices these are."""
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
        reads = _cells(cut, cells, units)
        for i, device in enumerate(on):
            holds[device] |= reads[i]
    packed = np.ascontiguousarray(np.packbits(holds, axis=0).T)
    cell_counts = Counter(packed.view((np.void, packed.shape[1])).ravel().tolist())
    parts = [(on, cell_counts[pattern]) for pattern in sorted(cell_counts) if len(on := _members(pattern, len(holds))) > 1]
    return SharedParts(
        np.array([d for on, _ in parts for d in on], np.int64),
        np.array([len(on) for on, _ in parts], np.int64),
        np.array([count * prod(units) for _, count in parts], np.int64),
    )


def _sliced(cut: Slices) -> SharedParts:
    """Return the shared parts for one reader with a device for each piece: its slices, in the order of `shared_by_number`."""
    if not cut.copied:
        return SharedParts(*np.empty((3, 0), np.int64))
    pieces = np.argsort(cut.slice_of, kind="stable").reshape(cut.slices, -1)
    devices = pieces[np.argsort(-pieces[:, 0])]
    return SharedParts(devices.ravel(), np.full(cut.slices, devices.shape[1]), np.full(cut.slices, prod(cut.local)))


def _members(pattern: bytes, devices: int) -> list[int]:
    """Return which of some devices have their bits set; the first device has the highest bit."""
    bits, last = int.from_bytes(pattern, "big"), 8 * len(pattern) - 1
    return [k for k in range(devices) if bits >> (last - k) & 1]


@lru_cache(maxsize=4096)
def _cells(cut: Slices, cells: tuple[int, ...], units: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return which cells each piece reads, [pieces, cells]. Do not write to it."""
    n = prod(cut.degrees)
    reads = np.ones((n, 1), bool)
    for dim, (count, unit) in enumerate(zip(cells, units, strict=True)):
        where = members(count * unit, tuple((outer, degree) for outer, degree, _ in cut.cuts[dim]))[::unit]
        own = cut.parts(dim)[:, None] == where
        reads = (reads[:, :, None] & own[:, None, :]).reshape(n, -1)
    return reads
