"""Ragged products: each group of consecutive rows has its own matrix, as tokens that are sorted by expert do in a mixture.

Routed products are those of rows in any order, each with the matrix of its label.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from unity.pcg.operators.layout import Layout, PlacedTensor
from unity.pcg.operators.routed_product import ROUTED, block_rows, multiplied_rows
from unity.pcg.operators.table.contraction import PRODUCT, bilinear
from unity.pcg.types.factors import Factor, Slot, Spec, operator

GROUPED_PRODUCT = replace(PRODUCT, extends=False)


class Ragged(NamedTuple):
    """The dimensions of a ragged product that its rows and its groups lie along.

    Attributes:
        contracted: whether the product sums over rows, for each group separately.
        x_rows: the dimension of rows in x.
        y_rows: the dimension of rows in y, which has one only if they are contracted; -1 otherwise.
        result_rows: the dimension of rows in the result, which has one only if they are not contracted; -1 otherwise.
        groups: the dimension of groups, in the result if rows are contracted and in y otherwise.
    """

    contracted: bool
    x_rows: int
    y_rows: int
    result_rows: int
    groups: int

    @classmethod
    def of(cls, params: Any, ndim: int) -> Ragged | None:
        """Return the dimensions, or None for products that neither `ragged_dot` nor its derivatives create.

        Args:
            params: the product's parameters.
            ndim: the number of dimensions of x.
        """
        numbers = params["ragged_dot_dimension_numbers"]
        (contract_x, contract_y), (batch_x, _) = numbers.dot_dimension_numbers
        dims, groups = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
        if len(dims) != 1 or dims[0] in batch_x or params.get("group_offset") is not None:
            return None
        if dims[0] in contract_x:
            return cls(True, dims[0], contract_y[list(contract_x).index(dims[0])], -1, 0)
        if len(groups) != 1:
            return None
        free_x = [i for i in range(ndim) if i not in (*contract_x, *batch_x)]
        return cls(False, dims[0], -1, len(batch_x) + free_x.index(dims[0]), groups[0])


def ragged_pieces(operands: list[jax.Array], layout: Layout) -> list:
    """Multiply pieces, with the sizes of groups counted on this device's rows.

    A device's rows are in their global order, and rows beyond all groups are last.
    """
    x, y, sizes = operands
    ragged = Ragged.of(layout.params, x.ndim)
    if ragged is None:
        return layout.bind(x, y, sizes)
    if layout.operands[0].along(ragged.x_rows):
        rows = layout.operands[0].coordinates(ragged.x_rows)
        before = (rows[:, None] < jnp.cumsum(sizes)[None, :]).sum(0, dtype=sizes.dtype)
        sizes = before - jnp.concatenate([jnp.zeros_like(before[:1]), before[:-1]])
    grouped = layout.results[0] if ragged.contracted else layout.operands[1]
    return _own_groups(x, y, sizes, layout, ragged, grouped) if grouped.along(ragged.groups) else layout.bind(x, y, sizes)


def _own_groups(x: jax.Array, y: jax.Array, sizes: jax.Array, layout: Layout, ragged: Ragged, grouped: PlacedTensor) -> list:
    """Multiply the rows of the groups that this device has, moved before all others, which count as beyond all groups."""
    group = (jnp.arange(x.shape[ragged.x_rows])[:, None] >= jnp.cumsum(sizes)[None, :]).sum(1, dtype=jnp.int32)
    own = grouped.find(group, ragged.groups)[0] & (group < sizes.shape[0])  # rows beyond all groups belong to none
    order = jnp.argsort(~own, stable=True)
    own_sizes = (group[:, None] == grouped.coordinates(ragged.groups)[None, :]).sum(0, dtype=sizes.dtype)
    x = _moved(x, order, ragged.x_rows)
    if ragged.contracted:
        return layout.bind(x, _moved(y, order, ragged.y_rows), own_sizes)
    (result,) = layout.bind(x, y, own_sizes)
    return [_moved(result, jnp.argsort(order), ragged.result_rows)]


def _moved(x: jax.Array, order: jax.Array, dim: int) -> jax.Array:
    return jnp.take(x, order, axis=dim, mode="clip", unique_indices=True)


@operator("ragged_dot_general", local=ragged_pieces, facts=GROUPED_PRODUCT)
def ragged_dot(params: Any, operands: Any, results: Any) -> Spec:
    """x [batch, free, contracted], y, and the sizes [g] of consecutive groups along the ragged dimension of x.

    If the ragged dimension is free, y has a dimension of groups, and each row is multiplied by its group's matrix: [batch, x free,
    y free]. If it is contracted, each group has a separate sum: [g, batch, x free, y free]. FLOPs are those of one dense masked
    product for each group, as XLA runs them on CPUs and GPUs.
    """
    x, y, sizes = operands
    ragged, numbers = Ragged.of(params, x.ndim), params["ragged_dot_dimension_numbers"]
    (contract_x, contract_y), (batch_x, batch_y) = numbers.dot_dimension_numbers
    flops = 2.0 * prod(results[0].shape) * prod(x.shape[i] for i in contract_x)
    if ragged is None or sizes.ndim != 1:
        return Spec(
            (), bilinear(operands, results[0]), flops, tuple((d, "its groups differ within a batch") for d in range(x.ndim))
        )
    free_x = [i for i in range(x.ndim) if i not in (*contract_x, *batch_x)]
    free_y = [i for i in range(y.ndim) if i not in (*contract_y, *batch_y, *numbers.rhs_group_dimensions)]
    b = int(ragged.contracted)
    m, n = b + len(batch_x), b + len(batch_x) + len(free_x)
    batch = enumerate(zip(batch_x, batch_y, strict=True))
    contractions = enumerate(zip(contract_x, contract_y, strict=True))
    groups = Slot(ragged.groups)
    own_groups = ((None,) * 3, (groups,), "") if ragged.contracted else ((None, groups, None), (None,), "sum")
    factors = (
        Factor("g", sizes.shape[0], *own_groups),
        *(Factor(f"b{k}", x.shape[i], (Slot(i), Slot(j), None), (Slot(b + k),)) for k, (i, j) in batch),
        *(Factor(f"m{k}", x.shape[i], (Slot(i), None, None), (Slot(m + k),)) for k, i in enumerate(free_x)),
        *(Factor(f"n{k}", y.shape[j], (None, Slot(j), None), (Slot(n + k),)) for k, j in enumerate(free_y)),
        *(Factor(f"c{k}", x.shape[i], (Slot(i), Slot(j), None), (None,), "sum") for k, (i, j) in contractions),
    )
    flops *= 1 if ragged.contracted else sizes.shape[0]
    return Spec(tuple(f for f in factors if f.size > 1), bilinear(operands, results[0]), flops)


def routed_pieces(operands: list[jax.Array], layout: Layout) -> list:
    """Multiply the rows whose labels this device has. All others have the label that belongs to none, and yield zeros."""
    x, y, labels = operands
    labelled = layout.results[0] if layout.params["contracted"] else layout.operands[1]
    if not labelled.along(0):
        return layout.bind(x, y, labels)
    here, places = labelled.find(labels, 0)
    here &= labels < layout.params["count"]
    count = labelled.local_shape[0]
    return layout.bind(x, y, jnp.where(here, places, count), count=count)


@operator(ROUTED, local=routed_pieces, facts=GROUPED_PRODUCT)
def routed_product(params: Any, operands: Any, results: Any) -> Spec:
    """Rows [r, k], a matrix for each label [g, k, n] and the labels [r] → rows [r, n], or rows twice and their labels → [g, k, n].

    Each row is independent of all others. A device with some of the labels multiplies their rows and leaves zeros for the others.
    In blocks it multiplies as many rows whatever labels it has, since all rows may have these.
    """
    (rows, k), n = operands[0].shape, results[0].shape[-1]
    block = block_rows(rows, params["count"])
    if params["contracted"]:
        factors = (
            Factor("r", rows, (Slot(0), Slot(0), Slot(0)), (None,), "sum"),
            Factor("g", params["count"], (None, None, None), (Slot(0),), shared=not block),
            Factor("k", k, (Slot(1), None, None), (Slot(1),)),
            Factor("n", n, (None, Slot(1), None), (Slot(2),)),
        )
    else:
        factors = (
            Factor("r", rows, (Slot(0), None, Slot(0)), (Slot(0),)),
            Factor("g", params["count"], (None, Slot(0), None), (None,), "sum", shared=not block),
            Factor("k", k, (Slot(1), Slot(1), None), (None,), "sum"),
            Factor("n", n, (None, Slot(2), None), (Slot(1),)),
        )
    flops = 2.0 * k * n * multiplied_rows(rows, params["count"], block)
    return Spec(tuple(f for f in factors if f.size > 1), bilinear(operands, results[0]), flops)
