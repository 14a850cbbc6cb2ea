"""Operators that rearrange elements: broadcast, reshape, transpose, slice, concatenate, pad, reverse, iota."""

from __future__ import annotations

from math import gcd, prod
from typing import Any

import jax

from unity.pcg.jaxprs.shard_maps.rotation import ROTATION
from unity.pcg.operators.layout import Layout
from unity.pcg.operators.table.elementwise import every_dimension
from unity.pcg.types.factors import NOTHING, WRAPPED, Factor, Facts, Halo, Role, Slot, Spec, operator
from unity.pcg.types.parallel_type import Shape

LINEAR = (frozenset({0}),)
MOVES = Facts(moves=True, role=Role.LAYOUT)
ARRANGES = Facts(role=Role.ARRANGEMENT)


def _broadcast_pieces(operands: list[jax.Array], layout: Layout) -> list:
    return layout.bind(*operands, shape=layout.results[0].local_shape)


@operator("broadcast_in_dim", local=_broadcast_pieces, facts=Facts(moves=True, role=Role.LAYOUT, sizes_follow=True))
def broadcast(params: Any, operands: Any, results: Any) -> Spec:
    """One operand, whose dimensions are parallel. It is replicated for use along new or widened dimensions."""
    shape, source = results[0].shape, dict(zip(params["broadcast_dimensions"], range(operands[0].ndim), strict=True))
    factors = []
    for i, n in enumerate(shape):
        in_operand = i in source and operands[0].shape[source[i]] == n
        if n > 1:
            factors.append(Factor(f"d{i}", n, (Slot(source[i]) if in_operand else None,), (Slot(i),)))
    return Spec(tuple(factors), LINEAR, view=prod(shape) == prod(operands[0].shape))


def common_digits(before: Shape, after: Shape) -> list[tuple[int, Slot, Slot]]:
    """Return the factors that a reshape preserves, as (size, place before, place after).

    Both shapes are read as mixed-radix numbers from the most major digit; as long as the digits can be aligned, each common
    one is a factor. [6, 4] → [4, 6] has one, of size 2; [b, s·d] → [b·s, d] has three.
    """
    common: list[tuple[int, Slot, Slot]] = []
    left, right = [(i, n) for i, n in enumerate(before) if n > 1], [(i, n) for i, n in enumerate(after) if n > 1]
    a = b = 0
    outer_a = outer_b = 1
    while a < len(left) and b < len(right):
        (i, n), (j, m) = left[a], right[b]
        size = gcd(n // outer_a, m // outer_b)
        if size > 1:
            common.append((size, Slot(i, outer_a), Slot(j, outer_b)))
        outer_a, outer_b = outer_a * size, outer_b * size
        ended_a, ended_b = outer_a == n, outer_b == m
        if not (ended_a or ended_b):
            break  # sizes such as 3 and 2: digits cannot be aligned from here on
        a, outer_a = (a + 1, 1) if ended_a else (a, outer_a)
        b, outer_b = (b + 1, 1) if ended_b else (b, outer_b)
    return common


def _common_factors(before: Shape, after: Shape) -> tuple[Factor, ...]:
    """Return the factors of a change of shape."""
    return tuple(Factor(f"d{k}", size, (x,), (y,)) for k, (size, x, y) in enumerate(common_digits(before, after)))


def _reshape_pieces(operands: list[jax.Array], layout: Layout) -> list:
    return layout.bind(*operands, new_sizes=layout.results[0].local_shape)


@operator("reshape", local=_reshape_pieces, facts=MOVES)
def reshape(params: Any, operands: Any, results: Any) -> Spec:
    """One operand. Every digit that both shapes have is parallel, also where dimensions are split or merged."""
    if params.get("dimensions") is not None:
        return Spec((), LINEAR)
    return Spec(_common_factors(operands[0].shape, results[0].shape), LINEAR, view=True)


@operator("squeeze", facts=Facts(moves=True, role=Role.LAYOUT, sizes_follow=True))
def squeeze(params: Any, operands: Any, results: Any) -> Spec:
    """One operand, without some dimensions of size one. The others are parallel."""
    return Spec(_common_factors(operands[0].shape, results[0].shape), LINEAR, view=True)


@operator("transpose", facts=MOVES)
def transpose(params: Any, operands: Any, results: Any) -> Spec:
    """One operand; dimension k of the result is `permutation[k]` of it. A view if only dimensions of size one are permuted."""
    shape = operands[0].shape
    order = [i for i in params["permutation"] if shape[i] > 1]
    factors = (Factor(f"d{i}", shape[i], (Slot(i),), (Slot(k),)) for k, i in enumerate(params["permutation"]) if shape[i] > 1)
    return Spec(tuple(factors), LINEAR, view=order == sorted(order))


@operator("rev", facts=MOVES)
def reverse(params: Any, operands: Any, results: Any) -> Spec:
    """One operand. Reversed dimensions are blocked."""
    return Spec(every_dimension([operands[0].shape], results[0].shape, skip=tuple(params["dimensions"])), LINEAR)


def _rotated_pieces(operands: list[jax.Array], layout: Layout) -> list:
    """Return the part of a piece with its halo that belongs to the result, or rotate a dimension that is not divided."""
    dim, shift = layout.params["dimension"], layout.params["shift"]
    if not layout.operands[0].along(dim):
        return layout.bind(*operands)
    start = rotation_halo(layout.operands[0].shape[dim], shift).after
    return [jax.lax.slice_in_dim(operands[0], start, start + layout.results[0].local_shape[dim], axis=dim)]


def rotation_halo(n: int, shift: int) -> Halo:
    """Return what a device's slice of a rotated dimension reads of its neighbours', on the shorter way."""
    return Halo(shift, 0, WRAPPED) if 2 * shift <= n else Halo(0, n - shift, WRAPPED)


@operator(ROTATION, local=_rotated_pieces, facts=Facts(reads_buffers=True, alone=True))
def rotation(params: Any, operands: Any, results: Any) -> Spec:
    """One operand. Along the rotated dimension, neighbours exchange the rows that move."""
    shape, dim = operands[0].shape, params["dimension"]
    halo = rotation_halo(shape[dim], params["shift"])
    along = Factor(f"d{dim}", shape[dim], (Slot(dim),), (Slot(dim),), halo=halo)
    return Spec((*every_dimension([shape], shape, skip=(dim,)), along), LINEAR)


def _slice_pieces(operands: list[jax.Array], layout: Layout) -> list:
    """Slice a piece: with bounds scaled to its shape; from the same index as the whole where the slice strides."""
    whole, here, params = layout.operands[0].shape, operands[0].shape, layout.params
    strides = params["strides"] or (1,) * len(whole)
    bounds = zip(params["start_indices"], params["limit_indices"], strides, whole, here, strict=True)
    scaled = [(a, min(b, m)) if d > 1 else (a * m // max(1, n), b * m // max(1, n)) for a, b, d, n, m in bounds]
    return layout.bind(*operands, start_indices=tuple(a for a, _ in scaled), limit_indices=tuple(b for _, b in scaled))


@operator("slice", local=_slice_pieces, facts=ARRANGES)
def slice_(params: Any, operands: Any, results: Any) -> Spec:
    """One operand. A dimension is parallel if the slice has all of it, one of several equal parts, or one index of each part.

    Of the one part, each device has a share: it holds its share of every part. Of one index of each part, each device has those of
    some parts, which it holds whole. The latter factor is optional: an associative scan consists of such slices, and would fall
    apart into its steps, as others of its equations cannot be divided so.
    """
    shape, result = operands[0].shape, results[0].shape
    strides = params["strides"] or (1,) * len(shape)
    factors = []
    for i, (n, m, start, stride) in enumerate(zip(shape, result, params["start_indices"], strides, strict=True)):
        if m > 1 and n % m == 0 and start % m == 0 and stride == 1:
            factors.append(Factor(f"d{i}", m, (Slot(i, n // m),), (Slot(i),)))
        elif m > 1 and n == m * stride:
            factors.append(Factor(f"d{i}", m, (Slot(i),), (Slot(i),), optional=True))
    return Spec(tuple(factors), LINEAR, reads=part_of(result, shape), view=is_block(result, shape) and set(strides) <= {1})


def part_of(result: Shape, operand: Shape) -> float:
    """Return the fraction of an operand that a slice of it reads."""
    return prod(result) / max(1, prod(operand))


def is_block(result: Shape, operand: Shape) -> bool:
    """Return whether a slice is contiguous in its operand: no dimension before the last one that is cut has several indices."""
    cut = [i for i, (n, m) in enumerate(zip(operand, result, strict=True)) if n != m]
    return not cut or max(result[: cut[-1]], default=1) <= 1


def _split_pieces(operands: list[jax.Array], layout: Layout) -> list:
    axis = layout.params["axis"]
    return layout.bind(*operands, sizes=tuple(r.local_shape[axis] for r in layout.results))


@operator("split", local=_split_pieces, facts=ARRANGES)
def split(params: Any, operands: Any, results: Any) -> Spec:
    """One operand, split along one dimension, which is parallel if all parts are equal: each device has its share of each."""
    axis, shape = params["axis"], operands[0].shape
    factors = list(every_dimension([shape], shape, len(results), skip=(axis,)))
    sizes = set(params["sizes"])
    if len(sizes) == 1 and max(sizes) > 1:
        factors.append(Factor(f"d{axis}", max(sizes), (Slot(axis, len(results)),), (Slot(axis),) * len(results)))
    return Spec(tuple(factors), LINEAR, view=len(results) == 1 or max(shape[:axis], default=1) <= 1)


@operator("concatenate", facts=ARRANGES)
def concatenate(params: Any, operands: Any, results: Any) -> Spec:
    """Operands. The joined dimension is blocked, unless all operands have the same size: then each device joins its shares."""
    axis, shape = params["dimension"], results[0].shape
    factors = [Factor(f"d{i}", n, (Slot(i),) * len(operands), (Slot(i),)) for i, n in enumerate(shape) if i != axis and n > 1]
    sizes = {o.shape[axis] for o in operands}
    if len(sizes) == 1 and max(sizes) > 1:
        factors.append(Factor(f"d{axis}", max(sizes), (Slot(axis),) * len(operands), (Slot(axis, len(operands)),)))
    return Spec(tuple(factors), (frozenset(range(len(operands))),))


@operator("stack", facts=ARRANGES)
def stack(params: Any, operands: Any, results: Any) -> Spec:
    """Operands of one shape. The new dimension is blocked."""
    axis, shape = params["axis"], operands[0].shape
    pairs = ((i, i + (i >= axis)) for i, n in enumerate(shape) if n > 1)
    factors = tuple(Factor(f"d{i}", shape[i], (Slot(i),) * len(operands), (Slot(k),)) for i, k in pairs)
    return Spec(factors, (frozenset(range(len(operands))),))


@operator("unstack", facts=ARRANGES)
def unstack(params: Any, operands: Any, results: Any) -> Spec:
    """One operand. The dimension that is removed is blocked."""
    axis, shape = params["axis"], operands[0].shape
    pairs = ((i, i - (i > axis)) for i, n in enumerate(shape) if n > 1 and i != axis)
    factors = tuple(Factor(f"d{i}", shape[i], (Slot(i),), (Slot(k),) * len(results)) for i, k in pairs)
    return Spec(factors, LINEAR, view=len(results) == 1 or max(shape[:axis], default=1) <= 1)


@operator("tile")
def tile(params: Any, operands: Any, results: Any) -> Spec:
    """One operand. Each device repeats its share; of a repeated dimension it has its share of every repetition."""
    pairs = zip(operands[0].shape, params["reps"], strict=True)
    return Spec(tuple(Factor(f"d{i}", n, (Slot(i),), (Slot(i, k),)) for i, (n, k) in enumerate(pairs) if n > 1), LINEAR)


@operator("pad", facts=ARRANGES)
def pad(params: Any, operands: Any, results: Any) -> Spec:
    """Operand and padding value. Padded dimensions are blocked."""
    unpadded = [i for i, c in enumerate(params["padding_config"]) if tuple(c) == (0, 0, 0)]
    shape = operands[0].shape
    factors = tuple(Factor(f"d{i}", shape[i], (Slot(i), None), (Slot(i),)) for i in unpadded if shape[i] > 1)
    return Spec(factors, (frozenset({0, 1}),))


def _iota_pieces(operands: list[jax.Array], layout: Layout) -> list:
    """Return the global indices of this device's piece."""
    result, dim = layout.results[0], layout.params["dimension"]
    if not result.along(dim):  # one operator: if it is captured again, numberings of other dimensions must not share a line with it
        return [jax.lax.broadcasted_iota(layout.params["dtype"], result.local_shape, dim)]
    line = result.coordinates(dim).astype(layout.params["dtype"])
    return [jax.lax.broadcast_in_dim(line, result.local_shape, (dim,))]


@operator("iota", local=_iota_pieces, facts=Facts(NOTHING, sizes_follow=True, role=Role.NUMBERING))
def iota(params: Any, operands: Any, results: Any) -> Spec:
    """No operands. Every dimension is parallel."""
    return Spec(every_dimension([], results[0].shape), (), prod(results[0].shape))
