"""The product of two tables in the (min, +) semiring: the inner loop of every search over strategies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from unity.search.problem import Array

# Terms that are simply added up, all at once or row by row: below, looking for structure costs more than it saves.
DIRECT = 200_000
# Numbers in a temporary: small enough to stay in the second-level cache, and far below any limit on memory.
BLOCK = 100_000
# Terms of a row that are computed first, for an upper bound on the row, and between two looks at the bounds.
PROBE = 12
CHUNK = 64
# Relative to the numbers compared: far above rounding, far below what prunes.
SLACK = 1e-9


def product(a: Array, middle: Array, b: Array) -> Array:
    """The table `c[w, i, j] = min over k of (a[w, i, k] + middle[w, k]) + b[w, k, j]`.

    This is node elimination (OptCNN, section 5.2; TensorOpt, equation 4) for a batch of objectives w. The result is
    exact: only what provably cannot change it is left out. Rows of `a` that are equal give equal rows of the result;
    so do columns of `b`; and all k with equal rows in `b` (or columns in `a`) count as one, once the minimum over them
    is taken on the other side. Tables of redistribution costs are full of these, since a cost depends on the layouts
    of one tensor, not on all that an operator may choose.
    """
    if a.shape[1] * a.shape[2] * b.shape[2] <= DIRECT:
        return np.stack([_direct(x + m, y) for x, m, y in zip(a, middle, b, strict=True)])
    rows, row_of = twins(a)
    columns, column_of = twins(b.swapaxes(1, 2))
    a, b = _take(a, rows, 1), _take(b, columns, 2)
    a, b = _grouped(a, middle, b)
    c = np.stack([_pruned(np.ascontiguousarray(x), np.ascontiguousarray(y)) for x, y in zip(a, b, strict=True)])
    return _take(_take(c, row_of, 1), column_of, 2)


def twins(table: Array) -> tuple[Array, Array]:
    """Representatives of the classes of equal `table[:, i]`, and the class of every i."""
    count = table.shape[1]
    # Equal rows have equal fingerprints; the converse is checked, for every weight.
    shades = np.random.default_rng(0).random(table.shape[2])
    fingerprint = (np.where(np.isfinite(table[0]), table[0], -1.0) * shades).sum(1)
    _, first, group = np.unique(fingerprint, return_index=True, return_inverse=True)
    if len(first) == count or any(not np.array_equal(x, x[first[group]]) for x in table):
        return np.arange(count), np.arange(count)
    return first, group


def _grouped(a: Array, middle: Array, b: Array) -> tuple[Array, Array]:
    """The two factors without the middle's own cost, and with as few values of it as there are equal rows or columns."""
    _, left = twins(a.swapaxes(1, 2))
    rows, right = twins(b)
    if left.max(initial=-1) < right.max(initial=-1):
        b, a = _grouped(b.swapaxes(1, 2), middle, a.swapaxes(1, 2))
        a, b = a.swapaxes(1, 2), b.swapaxes(1, 2)
    else:
        order = np.argsort(right, kind="stable")
        starts = np.flatnonzero(np.diff(right[order], prepend=-1))
        summed = (np.take(x, order, 1) + m[order] for x, m in zip(a, middle, strict=True))
        a, b = np.stack([np.minimum.reduceat(x, starts, axis=1) for x in summed]), _take(b, rows, 1)
    usable = np.isfinite(a).any((0, 1)) & np.isfinite(b).any((0, 2))
    return _take(a, np.flatnonzero(usable), 2), _take(b, np.flatnonzero(usable), 1)


def _take(table: Array, indices: Array, axis: int) -> Array:
    """`table[indices]` along an axis, contiguous in memory (indexing alone may leave it transposed)."""
    return table if np.array_equal(indices, np.arange(table.shape[axis])) else np.take(table, indices, axis)


def _direct(a: Array, b: Array) -> Array:
    c = np.full((a.shape[0], b.shape[1]), np.inf)
    step = max(1, BLOCK // max(1, b.size))
    for i in range(0, len(c), step):
        np.min(a[i : i + step, :, None] + b, axis=1, out=c[i : i + step], initial=np.inf)
    return c


def _pruned(a: Array, b: Array) -> Array:
    """Adds up, for every row i, only the k whose lower bound is below what some entry of the row already has.

    The bounds do not depend on what is common to a row or to a column: it is subtracted for them. The terms with the
    least bounds come first, and give the upper bounds.
    """
    rows, columns = np.isfinite(a).any(1), np.isfinite(b).any(0)
    if not rows.all() or not columns.all():
        c = np.full((a.shape[0], b.shape[1]), np.inf)
        c[np.ix_(rows, columns)] = _pruned(a[rows], np.ascontiguousarray(b[:, columns]))
        return c
    if a.shape[1] <= CHUNK or b.size == 0:
        return _direct(a, b)
    least_a, least_b = a.min(1), b.min(0)
    bound = (a - least_a[:, None]) + (b - least_b).min(1)
    finite = np.isfinite(a).all() and np.isfinite(b).all()
    possible = None if finite else np.isfinite(a).astype(np.float32) @ np.isfinite(b).astype(np.float32) > 0
    c = np.full((a.shape[0], b.shape[1]), np.inf)
    work = np.empty((CHUNK, b.shape[1]))
    for i, row in enumerate(c):
        reachable = slice(None) if possible is None else possible[i]
        order = np.argsort(bound[i])
        for start, stop in _steps(len(order)):
            terms = order[start:stop]
            summed = np.take(b, terms, axis=0, out=work[: len(terms)], mode="clip")
            summed += a[i, terms, None]
            np.minimum(row, np.minimum.reduce(summed, axis=0), out=row)
            most = np.max(row[reachable] - least_b[reachable]) - least_a[i]
            # rounding in the bounds must not exclude a term that is the least by a last bit
            if stop < len(order) and bound[i, order[stop]] > most + SLACK * abs(most):
                break
    return c


def _steps(count: int) -> Iterator[tuple[int, int]]:
    """A small step for a first upper bound, then larger ones."""
    yield 0, min(PROBE, count)
    for start in range(PROBE, count, CHUNK):
        yield start, min(start + CHUNK, count)
