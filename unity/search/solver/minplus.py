"""The product of two tables in the (min, +) semiring, the inner loop of every search over strategies."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from unity.base.compiled_loops import compiled, pays
from unity.search.solver.problem import Array

# The number of terms up to which searching for equal rows costs more than it saves: with NumPy, and with the compiled loop.
DIRECT, LOOPED = 200_000, 100_000_000
# Numbers in a temporary: small enough to stay in the second-level cache, and far below any limit on memory.
BLOCK = 64_000
TERM = 1e-9  # seconds of a term with NumPy; the compiled loop takes a quarter of that, for small tables a tenth


def product(a: Array, middle: Array, b: Array) -> Array:
    """Return the table `c[w, i, j] = min over k of (a[w, i, k] + middle[w, k]) + b[w, k, j]`.

    This is node elimination (OptCNN, section 5.2; TensorOpt, equation 4) for a batch of objectives w. The result is exact: only
    terms that provably cannot change it are left out. Equal rows of `a` give equal rows of the result, and equal columns of `b`
    equal columns; and all k with equal rows in `b` (or columns in `a`) count as one, once the minimum over them is taken on the
    other side. Tables of redistribution costs have many equal rows and columns, because a cost depends on the layouts of one
    tensor, not on all the choices of an operator.
    """
    terms = a.shape[1] * a.shape[2] * b.shape[2]
    looped = pays(len(a) * terms * TERM)
    if terms <= (LOOPED if looped else DIRECT):
        return _stacked([_direct(x + m, y, looped) for x, m, y in zip(a, middle, b, strict=True)])
    rows, row_of = twins(a)
    columns, column_of = twins(b.swapaxes(1, 2))
    a, b = _take(a, rows, 1), _take(b, columns, 2)
    a, b = _grouped(a, middle, b)
    c = _stacked([_direct(x, y, looped) for x, y in zip(a, b, strict=True)])
    return _take(_take(c, row_of, 1), column_of, 2)


def _stacked(tables: list[Array]) -> Array:
    """Stack tables as [weights, …]; a single one is not copied."""
    return np.stack(tables) if len(tables) > 1 else tables[0][None]


def twins(table: Array) -> tuple[Array, Array]:
    """Return representatives of the classes of equal `table[:, i]`, and the class of every i."""
    count = table.shape[1]
    # Equal rows have equal fingerprints; the converse is checked, for every weight.
    shades = _shades(table.shape[2])
    fingerprint = (np.where(np.isfinite(table[0]), table[0], -1.0) * shades).sum(1)
    _, first, group = np.unique(fingerprint, return_index=True, return_inverse=True)
    if len(first) == count or any(not np.array_equal(x, x[first[group]]) for x in table):
        return np.arange(count), np.arange(count)
    return first, group


@lru_cache(maxsize=1024)
def _shades(count: int) -> Array:
    """Return random factors, the same every time."""
    return np.random.default_rng(0).random(count)


def _grouped(a: Array, middle: Array, b: Array) -> tuple[Array, Array]:
    """Add the middle's own cost to one factor, and merge the values of the middle that have equal rows or columns."""
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
    """Return `table[indices]` along an axis, contiguous in memory (plain indexing may leave it transposed)."""
    return table if np.array_equal(indices, np.arange(table.shape[axis])) else np.take(table, indices, axis)


def _direct(a: Array, b: Array, looped: bool) -> Array:
    """Compute the product by its definition, with the compiled loop or with NumPy.

    Leaving out terms by bounds on them, row by row, was slower on the tables of real problems: a term takes less than a nanosecond
    here, and checking a bound is not vectorized.
    """
    if not a.shape[1]:
        return np.full((a.shape[0], b.shape[1]), np.inf)
    if looped:
        c = np.empty((a.shape[0], b.shape[1]))
        _loop(np.ascontiguousarray(a), np.ascontiguousarray(b), c)
        return c
    return _tiled(np.ascontiguousarray(a), np.ascontiguousarray(b.T))


def _tiled(a: Array, columns: Array) -> Array:
    """Compute the product in tiles. `columns` are the columns of the second table."""
    c = np.empty((a.shape[0], len(columns)))
    wide = max(1, min(len(columns), BLOCK // a.shape[1]))
    high = max(1, BLOCK // (a.shape[1] * wide))
    work = np.empty(high * wide * a.shape[1])
    for j in range(0, len(columns), wide):
        for i in range(0, len(a), high):
            x, y = a[i : i + high, None], columns[j : j + wide]
            terms = work[: len(x) * y.size].reshape(len(x), *y.shape)
            np.minimum.reduce(np.add(x, y, out=terms), axis=2, out=c[i : i + high, j : j + wide])
    return c


@compiled
def _loop(a: Array, b: Array, c: Array) -> None:
    """Compute the product and write it to `c`, four rows of `b` for each time that a row of `c` is read."""
    last = len(b) - len(b) % 4
    for i in range(len(a)):
        x, best = a[i], c[i]
        for j in range(len(best)):
            best[j] = np.inf
        for k in range(0, last, 4):
            p, q, r, s = b[k], b[k + 1], b[k + 2], b[k + 3]
            for j in range(len(best)):
                one, other = min(x[k] + p[j], x[k + 1] + q[j]), min(x[k + 2] + r[j], x[k + 3] + s[j])
                best[j] = min(best[j], min(one, other))
        for k in range(last, len(b)):
            for j in range(len(best)):
                best[j] = min(best[j], x[k] + b[k][j])
