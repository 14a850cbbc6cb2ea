"""Ragged products: each group of consecutive rows has its own matrix, as tokens that are sorted by expert do in a mixture."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from unity.pcg.operators.layout import Layout
from unity.pcg.operators.table.contraction import PRODUCT, bilinear
from unity.pcg.types.factors import Factor, Slot, Spec, operator


def ragged_dim(params: Any) -> tuple[int, bool] | None:
    """Return the ragged dimension of x and whether it is contracted.

    None stands for products that neither `ragged_dot` nor its derivatives create.
    """
    numbers = params["ragged_dot_dimension_numbers"]
    (contract_x, _), (batch_x, _) = numbers.dot_dimension_numbers
    dims = tuple(numbers.lhs_ragged_dimensions)
    if len(dims) != 1 or dims[0] in batch_x or params.get("group_offset") is not None:
        return None
    return dims[0], dims[0] in contract_x


def ragged_pieces(operands: list[jax.Array], layout: Layout) -> list:
    """Multiply pieces, with the sizes of groups counted on this device's rows.

    A device's rows are in their global order, and rows beyond all groups are last.
    """
    x, y, sizes = operands
    ragged = ragged_dim(layout.params)
    if ragged is not None and layout.operands[0].along(ragged[0]):
        rows = layout.operands[0].coordinates(ragged[0])
        before = (rows[:, None] < jnp.cumsum(sizes)[None, :]).sum(0, dtype=sizes.dtype)
        sizes = before - jnp.concatenate([jnp.zeros_like(before[:1]), before[:-1]])
    return layout.bind(x, y, sizes)


@operator("ragged_dot_general", local=ragged_pieces, facts=PRODUCT)
def ragged_dot(params: Any, operands: Any, results: Any) -> Spec:
    """x [batch, free, contracted], y, and the sizes [g] of consecutive groups along the ragged dimension of x.

    If the ragged dimension is free, y has a dimension of groups, and each row is multiplied by its group's matrix: [batch, x free,
    y free]. If it is contracted, each group has a separate sum: [g, batch, x free, y free]. FLOPs are those of one dense masked
    product for each group, as XLA runs them on CPUs and GPUs.
    """
    x, y, sizes = operands
    ragged, numbers = ragged_dim(params), params["ragged_dot_dimension_numbers"]
    (contract_x, contract_y), (batch_x, batch_y) = numbers.dot_dimension_numbers
    flops = 2.0 * prod(results[0].shape) * prod(x.shape[i] for i in contract_x)
    if ragged is None or sizes.ndim != 1:
        return Spec((), bilinear(operands), flops, tuple((d, "its groups differ within a batch") for d in range(x.ndim)))
    _, contracted = ragged
    free_x = [i for i in range(x.ndim) if i not in (*contract_x, *batch_x)]
    free_y = [i for i in range(y.ndim) if i not in (*contract_y, *batch_y, *numbers.rhs_group_dimensions)]
    b = int(contracted)
    m, n = b + len(batch_x), b + len(batch_x) + len(free_x)
    batch = enumerate(zip(batch_x, batch_y, strict=True))
    contractions = enumerate(zip(contract_x, contract_y, strict=True))
    factors = (
        *(Factor(f"b{k}", x.shape[i], (Slot(i), Slot(j), None), (Slot(b + k),)) for k, (i, j) in batch),
        *(Factor(f"m{k}", x.shape[i], (Slot(i), None, None), (Slot(m + k),)) for k, i in enumerate(free_x)),
        *(Factor(f"n{k}", y.shape[j], (None, Slot(j), None), (Slot(n + k),)) for k, j in enumerate(free_y)),
        *(Factor(f"c{k}", x.shape[i], (Slot(i), Slot(j), None), (None,), "sum") for k, (i, j) in contractions),
    )
    return Spec(tuple(f for f in factors if f.size > 1), bilinear(operands), flops if contracted else flops * sizes.shape[0])
