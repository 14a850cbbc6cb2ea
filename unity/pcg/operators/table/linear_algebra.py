"""Linear algebra on stacks of matrices, and Fourier transforms: leading dimensions are parallel, the last ones blocked."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint

from unity.pcg.operators.layout import Layout as Pieces
from unity.pcg.types.factors import Factor, Facts, Slot, Spec, operator


def stacked(blocked: int, shape: tuple[int, ...], n_operands: int, n_results: int) -> tuple[Factor, ...]:
    """One factor for each dimension but the last `blocked`, which all operands and results have in the same place."""
    lead = ((i, n) for i, n in enumerate(shape[: len(shape) - blocked]) if n > 1)
    return tuple(Factor(f"b{i}", n, (Slot(i),) * n_operands, (Slot(i),) * n_results) for i, n in lead)


@operator("cholesky", "eig", "eigh", "geqrf", "lu", "qr", "svd")
def decomposition(params: Any, operands: Any, results: Any) -> Spec:
    """Matrices `[..., m, n]` into their factors."""
    shape = operands[0].shape
    return Spec(stacked(2, shape, 1, len(results)), (), 2.0 * prod(shape) * min(shape[-2:]))


@operator("lu_pivots_to_permutation")
def permutation(params: Any, operands: Any, results: Any) -> Spec:
    """Pivots `[..., k]` as the order of rows `[..., m]` that they leave."""
    return Spec(stacked(1, operands[0].shape, 1, 1), (), 1.0 * prod(results[0].shape))


@operator("householder_product")
def reflectors(params: Any, operands: Any, results: Any) -> Spec:
    """Reflectors `[..., m, n]` and their scalars `[..., k]` as matrices."""
    shape = operands[0].shape
    return Spec(stacked(2, shape, 2, 1), (), 2.0 * prod(shape) * min(shape[-2:]))


@operator("ormqr")
def reflected(params: Any, operands: Any, results: Any) -> Spec:
    """Matrices times what reflectors, of which there are as many as scalars, make; linear in the matrices."""
    shape, lead = operands[2].shape, len(operands[2].shape) - 2
    apart = lead + params["left"]
    sides = Factor("sides", shape[apart], (None, None, Slot(apart)), (Slot(apart),))
    return Spec((*stacked(2, shape, 3, 1), sides), (frozenset({2}),), 4.0 * prod(shape) * operands[1].shape[-1])


@operator("tridiagonal_solve")
def tridiagonal_solve(params: Any, operands: Any, results: Any) -> Spec:
    """Diagonals `[..., m]` and right-hand sides `[..., m, n]`; linear in the latter."""
    shape = operands[3].shape
    last = len(shape) - 1
    sides = Factor("sides", shape[last], (None, None, None, Slot(last)), (Slot(last),))
    return Spec((*stacked(2, shape, 4, 1), sides), (frozenset({3}),), 8.0 * prod(shape))


@operator("triangular_solve")
def triangular_solve(params: Any, operands: Any, results: Any) -> Spec:
    """Matrices and right-hand sides; linear in the latter."""
    shape = operands[1].shape
    sides = len(shape) - (1 if params["left_side"] else 2)
    apart = Factor("sides", shape[sides], (None, Slot(sides)), (Slot(sides),))
    flops = 1.0 * prod(shape) * operands[0].shape[-1]
    return Spec((*stacked(2, shape, 2, 1), apart), (frozenset({1}),), flops)


def _row_major(x: jax.Array) -> jax.Array:
    """`x`, laid out in memory with its last dimension innermost."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if x.ndim > 1 else x


def _fourier_pieces(operands: list, layout: Pieces) -> list:
    """Keeps operand and result row-major, forward and backward: XLA's CPU runtime refuses any other layout, which XLA chooses where
    an operand is a transposed product."""
    (x,) = operands
    (result,) = layout.bind(_row_major(x))
    return [_row_major(result)]


@operator("fft", local=_fourier_pieces, facts=Facts(alone=True))
def fourier(params: Any, operands: Any, results: Any) -> Spec:
    """A linear transform of the last dimensions."""
    return Spec(stacked(len(params["fft_lengths"]), operands[0].shape, 1, 1), (frozenset({0}),), 10.0 * prod(results[0].shape))
