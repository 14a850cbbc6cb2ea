"""Linear algebra and Fourier transforms.

Decompositions are unknown functions of their matrices. Solvers and Fourier transforms are linear, with unknown coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from unity.verify.semantics.primitives.core import InterpreterRun, PrimitiveCall, StackedValue, meaning
from unity.verify.semantics.primitives.unknown_functions import flatten_last, rowwise


@meaning("cholesky", "eig", "eigh", "geqrf", "hessenberg", "lu", "qr", "schur", "svd", "tridiagonal")
def decomposition(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Factors of matrices in the last two dimensions: unknown functions of the whole matrix."""
    rows = [flatten_last(run.lift(v), 2) for v in values]
    shared = len(call.operands[0].shape) - 2
    shapes = [tuple(r.shape[shared:]) for r in call.results]
    return [StackedValue(x, False) for x in rowwise(run, call.function_name, rows, shapes)]


@meaning("symmetric_product")
def symmetric_product(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Alpha times the product of matrices and their transposes, plus beta times other matrices."""
    a, c = (run.lift(v) for v in values)
    alpha, beta = (run.domain.constant(np.full((1,) * a.ndim, call.params[name])) for name in ("alpha", "beta"))
    product = run.domain.dot(a, np.swapaxes(a, -1, -2))
    return [StackedValue(run.domain.add(run.domain.mul(alpha, product), run.domain.mul(beta, c)), False)]


@meaning("lu_pivots_to_permutation")
def pivot_permutation(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The order of rows that pivots `[..., k]` lead to: a function of all pivots."""
    results = rowwise(run, call.function_name, [run.lift(values[0])], [call.results[0].shape[-1:]])
    return [StackedValue(x, False) for x in results]


@meaning("householder_product")
def householder_product(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Matrices as functions of reflectors `[..., m, n]` and their scalars `[..., k]`."""
    rows = [flatten_last(run.lift(v), k) for v, k in zip(values, (2, 1), strict=True)]
    return [StackedValue(x, False) for x in rowwise(run, call.function_name, rows, [call.results[0].shape[-2:]])]


@meaning("ormqr")
def reflect(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Linear in the matrices; the factor that they are multiplied by is a function of reflectors and scalars."""
    a, scalars, c = (run.lift(v) for v in values)
    (matrix,) = rowwise(run, call.function_name, [flatten_last(a, 2), scalars], [(a.shape[-2], a.shape[-2])])
    return [StackedValue(run.domain.dot(matrix, c) if call.params["left"] else run.domain.dot(c, matrix), False)]


@meaning("tridiagonal_solve")
def tridiagonal_solve(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Linear in the right-hand sides; the elements of the inverse are functions of the diagonals."""
    *diagonals, b = (run.lift(v) for v in values)
    n = b.shape[-2]
    (inverse,) = rowwise(run, call.function_name, diagonals, [(n, n)])
    return [StackedValue(run.domain.dot(inverse, b), False)]


@meaning("triangular_solve")
def triangular_solve(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Linear in the right-hand sides; the elements of the inverse are functions of the matrix."""
    a, b = (run.lift(v) for v in values)
    n = a.shape[-1]
    (inverse,) = rowwise(run, call.function_name, [flatten_last(a, 2)], [(n, n)])
    return [StackedValue(run.domain.dot(inverse, b) if call.params["left_side"] else run.domain.dot(b, inverse), False)]


@meaning("fft")
def fourier(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Linear over the last dimensions. A real result is the real part."""
    k = len(call.params["fft_lengths"])
    x, shape = flatten_last(run.lift(values[0]), k), call.results[0].shape
    n, m = x.shape[-1], prod(shape[len(shape) - k :])
    coefficients = np.asarray([[run.domain.function(f"{call.function_name} {i} {j}") for j in range(m)] for i in range(n)])
    result = run.domain.dot(x[..., None, :], coefficients.reshape(n, m))[..., 0, :]
    if not np.issubdtype(call.results[0].dtype, np.complexfloating):
        result = run.domain.additive("real", result)
    return [StackedValue(result.reshape((*x.shape[:-1], *shape[len(shape) - k :])), False)]
