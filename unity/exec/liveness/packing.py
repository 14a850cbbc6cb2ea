"""Where buffers are put, so that those that are held at once do not overlap: XLA's GlobalDecreasingSizeBestFitHeap.

One buffer after another goes to the smallest hole that takes it, among those that are held at the same time. What is held in
several spans of time lies in one place, and others may lie there in between. Two orders are tried, by size and by time held, and
the better one is taken.
"""

from __future__ import annotations

import numpy as np

ALIGNMENT = 64  # bytes


def aligned(nbytes: int) -> int:
    """Bytes that a buffer takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def packed(sizes: np.ndarray, spans: np.ndarray, owners: np.ndarray | None = None) -> int:
    """The bytes of all buffers. `spans`: the first and the last moment of each; `owners`: which buffer's, ascending, if some have
    several, in the same place."""
    if not len(sizes):
        return 0
    owners = np.arange(len(sizes)) if owners is None else owners
    number = np.arange(len(sizes))
    first = np.searchsorted(owners, number)
    length = np.maximum.reduceat(spans[:, 1], first) - spans[first, 0]
    by_size = np.lexsort((number, -length, -sizes))
    by_time = np.lexsort((number, -sizes, -length))
    return min(int((offsets(sizes, spans, order, owners) + sizes).max()) for order in (by_size, by_time))


def offsets(sizes: np.ndarray, spans: np.ndarray, order: np.ndarray, owners: np.ndarray | None = None) -> np.ndarray:
    """Where each buffer is put, taken in an order."""
    owners = np.arange(len(sizes)) if owners is None else owners
    where = np.zeros(len(sizes), np.int64)
    begin, end = np.searchsorted(owners, order), np.searchsorted(owners, order, "right")
    rows = np.concatenate([np.arange(a, b) for a, b in zip(begin, end, strict=True)])
    first, last = spans[rows, 0], spans[rows, 1]
    low, high = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    k = 0  # of so many spans it is known where they are
    for i, count in zip(order, end - begin, strict=True):
        own = slice(k, k + count)
        at_once = np.zeros(k, bool)
        for a, b in zip(first[own], last[own], strict=True):
            at_once |= (first[:k] <= b) & (last[:k] >= a)
        where[i] = low[own] = _best_fit(low[:k][at_once], high[:k][at_once], int(sizes[i]))
        high[own] = where[i] + sizes[i]
        k += count
    return where


def _best_fit(low: np.ndarray, high: np.ndarray, size: int) -> int:
    """The start of the smallest hole between taken ranges that is large enough; the end of all if there is none."""
    if not len(low):
        return 0
    by_start = np.argsort(low, kind="stable")
    low, ends = low[by_start], np.maximum.accumulate(high[by_start])
    starts = np.concatenate(([0], ends[:-1]))
    holes = low - starts
    fits = np.flatnonzero(holes >= size)
    return int(starts[fits[np.argmin(holes[fits])]]) if len(fits) else int(ends[-1])
