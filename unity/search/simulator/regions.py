"""Which devices hold the same part of a weight, when several operators each cut it in their own way."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from unity.search.simulator.pieces import Slices, members

Readers = tuple[tuple[Slices, tuple[int, ...]], ...]  # how each cuts the weight, and its pieces' devices


@lru_cache(maxsize=4096)
def shared(readers: Readers) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The parts of a weight that the same devices read: these devices, and how many elements the part has."""
    readers = tuple(dict.fromkeys(readers))
    shape = readers[0][0].shape
    units = tuple(
        gcd(n, *(n // (outer * degree) for cut, _ in readers for outer, degree, _ in cut.cuts[dim])) for dim, n in enumerate(shape)
    )
    cells = tuple(n // u for n, u in zip(shape, units, strict=True))  # of every dimension: finer than any cut of it
    devices = sorted({d for _, on in readers for d in on})
    row = {d: k for k, d in enumerate(devices)}
    holds = np.zeros((len(devices), prod(cells)), bool)
    for cut, on in readers:
        found = _cells(cut, cells, units)
        for i, device in enumerate(on):
            holds[row[device]] |= found[i]
    packed = np.ascontiguousarray(np.packbits(holds, axis=0).T)
    counts = Counter(packed.view((np.void, packed.shape[1])).ravel().tolist())
    return tuple((_members(pattern, devices), counts[pattern] * prod(units)) for pattern in sorted(counts))


def _members(pattern: bytes, devices: list[int]) -> tuple[int, ...]:
    """The devices whose bits are set, the first of them the highest."""
    bits, last = int.from_bytes(pattern, "big"), 8 * len(pattern) - 1
    return tuple(device for k, device in enumerate(devices) if bits >> (last - k) & 1)


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
