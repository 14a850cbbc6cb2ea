"""Where buffers are put, so that those that are held at once do not overlap: XLA's GlobalDecreasingSizeBestFitHeap.

One buffer after another goes to the smallest hole that takes it, among those that are held at the same time; two orders are tried,
by size and by time held, and the better one is taken.
"""

from __future__ import annotations

import numpy as np

ALIGNMENT = 64  # bytes


def aligned(nbytes: int) -> int:
    """Bytes that a buffer takes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def packed(sizes: np.ndarray, spans: np.ndarray) -> int:
    """The bytes of all buffers. `spans`: the first and the last moment of each."""
    if not len(sizes):
        return 0
    length, number = spans[:, 1] - spans[:, 0], np.arange(len(sizes))
    by_size = np.lexsort((number, -length, -sizes))
    by_time = np.lexsort((number, -sizes, -length))
    return min(_ends(sizes, offsets(sizes, spans, order)) for order in (by_size, by_time))


def _ends(sizes: np.ndarray, where: np.ndarray) -> int:
    return int((where + sizes).max())


def offsets(sizes: np.ndarray, spans: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Where each buffer is put, taken in an order."""
    where = np.zeros(len(sizes), np.int64)
    first, last = spans[order, 0], spans[order, 1]
    low, high = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    for k, i in enumerate(order):
        at_once = (first[:k] <= last[k]) & (last[:k] >= first[k])
        where[i] = low[k] = _best_fit(low[:k][at_once], high[:k][at_once], int(sizes[i]))
        high[k] = low[k] + sizes[i]
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
