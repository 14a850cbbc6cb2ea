"""Linear algebra on stacks of matrices, and Fourier transforms: leading dimensions are parallel, trailing ones blocked."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from unity.pcg.operators.layout import Layout as Pieces
from unity.pcg.types.factors import NONE, NOTHING, RESULT, Factor, Facts, Reads, Slot, Spec, at, operator
from unity.pcg.types.parallel_type import PARTIAL

ALONE = Facts(alone=True)


def stacked(blocked: int, shape: tuple[int, ...], n_operands: int, n_results: int) -> tuple[Factor, ...]:
    """Return a factor for each dimension but the last `blocked` ones, at the same place in all operands and results."""
    lead = ((i, n) for i, n in enumerate(shape[: len(shape) - blocked]) if n > 1)
    return tuple(Factor(f"b{i}", n, (Slot(i),) * n_operands, (Slot(i),) * n_results) for i, n in lead)


@operator("eig", "geqrf", "hessenberg", "schur", "svd", "tridiagonal", facts=ALONE)
@operator("cholesky", "eigh", "qr", facts=Facts(RESULT, alone=True))
@operator("lu", facts=Facts((Reads(NONE, at(0, 2)),), alone=True))
def decomposition(params: Any, operands: Any, results: Any) -> Spec:
    """Matrices `[..., m, n]` to be factorized."""
    shape = operands[0].shape
    return Spec(stacked(2, shape, 1, len(results)), (), 2.0 * prod(shape) * min(shape[-2:]))


@operator("symmetric_product", facts=Facts(product=True, reads_buffers=True, alone=True))
def symmetric_product(params: Any, operands: Any, results: Any) -> Spec:
    """Matrices `[..., m, n]` times their transposes, plus beta times others `[..., m, m]`. Parts of n yield partial sums."""
    shape = operands[0].shape
    last = len(shape) - 1
    summed = Factor("n", shape[last], (Slot(last), PARTIAL if params["beta"] else None), (None,), "sum")
    return Spec((*stacked(2, shape, 2, 1), summed), (), 2.0 * prod(shape) * shape[-2])


@operator("lu_pivots_to_permutation", facts=Facts(NOTHING, alone=True))
def permutation(params: Any, operands: Any, results: Any) -> Spec:
    """Pivots `[..., k]`, converted to permutations `[..., m]` of rows."""
    return Spec(stacked(1, operands[0].shape, 1, 1), (), 1.0 * prod(results[0].shape))


@operator("householder_product", facts=ALONE)
def reflectors(params: Any, operands: Any, results: Any) -> Spec:
    """Reflectors `[..., m, n]` and their scalars `[..., k]`, multiplied to matrices."""
    shape = operands[0].shape
    return Spec(stacked(2, shape, 2, 1), (), 2.0 * prod(shape) * min(shape[-2:]))


@operator("ormqr", facts=ALONE)
def reflected(params: Any, operands: Any, results: Any) -> Spec:
    """Reflectors, their scalars `[..., k]`, and matrices to be multiplied by their product. Linear in the matrices."""
    shape, lead = operands[2].shape, len(operands[2].shape) - 2
    side = lead + params["left"]
    sides = Factor("sides", shape[side], (None, None, Slot(side)), (Slot(side),))
    return Spec((*stacked(2, shape, 3, 1), sides), (frozenset({2}),), 4.0 * prod(shape) * operands[1].shape[-1])


@operator("tridiagonal_solve", facts=Facts((Reads(at(0, 1, 2), at(0)),), alone=True))
def tridiagonal_solve(params: Any, operands: Any, results: Any) -> Spec:
    """Diagonals `[..., m]` and right-hand sides `[..., m, n]`. Linear in the latter."""
    shape = operands[3].shape
    last = len(shape) - 1
    sides = Factor("sides", shape[last], (None, None, None, Slot(last)), (Slot(last),))
    return Spec((*stacked(2, shape, 4, 1), sides), (frozenset({3}),), 8.0 * prod(shape))


@operator("triangular_solve", facts=Facts((Reads(at(0), at(0)),), alone=True))
def triangular_solve(params: Any, operands: Any, results: Any) -> Spec:
    """Matrices and right-hand sides. Linear in the latter."""
    shape = operands[1].shape
    side = len(shape) - (1 if params["left_side"] else 2)
    sides = Factor("sides", shape[side], (None, Slot(side)), (Slot(side),))
    flops = 1.0 * prod(shape) * operands[0].shape[-1]
    return Spec((*stacked(2, shape, 2, 1), sides), (frozenset({1}),), flops)


def _row_major(x: jax.Array) -> jax.Array:
    """Return `x` with its last dimension innermost in memory."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if x.ndim > 1 else x


def _fourier_pieces(operands: list, layout: Pieces) -> list:
    """Transform pieces with row-major operands and results, forward and backward.

    XLA's CPU runtime refuses any other layout, which XLA nevertheless chooses for an operand that is a transposed product.
    """
    (x,) = operands
    (result,) = layout.bind(_row_major(x))
    return [_row_major(result)]


@operator("fft", local=_fourier_pieces, facts=ALONE)
def fourier(params: Any, operands: Any, results: Any) -> Spec:
    """One operand, whose trailing dimensions are transformed. Linear."""
    return Spec(stacked(len(params["fft_lengths"]), operands[0].shape, 1, 1), (frozenset({0}),), 10.0 * prod(results[0].shape))
