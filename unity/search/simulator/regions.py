"""Which devices hold the same part of a weight, when several operators each cut it in their own way."""

from __future__ import annotations

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
    units = [
        gcd(n, *(n // (outer * degree) for cut, _ in readers for outer, degree, _ in cut.cuts[dim])) for dim, n in enumerate(shape)
    ]
    cells = [n // u for n, u in zip(shape, units, strict=True)]  # of every dimension: finer than any cut of it
    devices = sorted({d for _, on in readers for d in on})
    row = {d: k for k, d in enumerate(devices)}
    holds = np.zeros((len(devices), prod(cells)), bool)
    for cut, on in readers:
        found = _cells(cut, cells, units)
        for i, device in enumerate(on):
            holds[row[device]] |= found[i]
    patterns, counts = np.unique(holds, axis=1, return_counts=True)
    return tuple(
        (tuple(devices[k] for k in np.flatnonzero(pattern)), int(count) * prod(units))
        for pattern, count in zip(patterns.T, counts, strict=True)
    )


def _cells(cut: Slices, cells: list[int], units: list[int]) -> NDArray[np.bool_]:
    """Which cells each piece reads, [pieces, cells]."""
    n = prod(cut.degrees)
    found = np.ones((n, 1), bool)
    for dim, (count, unit) in enumerate(zip(cells, units, strict=True)):
        where = members(count * unit, tuple((outer, degree) for outer, degree, _ in cut.cuts[dim]))[::unit]
        own = cut.parts(dim)[:, None] == where
        found = (found[:, :, None] & own[:, None, :]).reshape(n, -1)
    return found
