"""A primitive for products of rows that each have a label, with the matrix of the label: `result[r] = x[r] @ y[label[r]]`.

A mixture of experts sorts its tokens by expert, multiplies them in groups (`lax.ragged_dot`), and moves them back. In sorted order
a token's place depends on all other tokens, so no device could do this for its own tokens alone. As one primitive, every row is
independent of all others. It sorts rows where it runs: on a device, those of the device.

Exported files contain this module's source, so it uses JAX alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

ROUTED = "routed_dot"
FREE = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
LEAST = 16  # rows of a block
CONTRACTED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


def block_rows(rows: int, count: int) -> int:
    """Return the number of rows of a block: about as many as a label has on average; 0 for groups without blocks.

    XLA multiplies groups by masking, each group with all rows, on CPUs and GPUs. In blocks of rows of one label, with
    zeros for missing rows, there are at most `rows + count * block` rows to multiply.
    """
    block = 1 << max(LEAST.bit_length() - 1, (rows // count).bit_length() - 1) if count else 0
    return block if 2 * multiplied_rows(rows, count, block) < multiplied_rows(rows, count, 0) else 0


def multiplied_rows(rows: int, count: int, block: int) -> int:
    """Return the number of rows that are multiplied by one matrix each, zeros included."""
    return block * ((rows + count * (block - 1)) // block) if block else rows * count


def local_product(
    x: jax.Array,
    y: jax.Array,
    labels: jax.Array,
    *,
    count: int,
    contracted: bool,
    precision: Any,
    preferred_element_type: Any,
) -> jax.Array:
    """Sort rows by their labels, and multiply them in blocks or in groups.

    Args:
        x: rows `[r, k]`.
        y: a matrix for each label, `[count, k, n]`, or rows `[r, n]` if rows are contracted.
        labels: the label of each row, from 0, in int32; rows with label `count` belong to none, and count as zeros.
        count: the number of labels.
        contracted: whether to add up the products of the rows of each label, to `[count, k, n]`; otherwise the result
            is `[r, n]`.
        precision: as for `jax.lax.dot`.
        preferred_element_type: as for `jax.lax.dot`.
    """
    dtype = jnp.dtype(preferred_element_type or jnp.promote_types(x.dtype, y.dtype))
    options: dict[str, Any] = {"precision": precision, "preferred_element_type": preferred_element_type}
    order = jnp.argsort(labels)
    sizes = (labels[:, None] == jnp.arange(count, dtype=jnp.int32)[None, :]).sum(0, dtype=jnp.int32)
    block = block_rows(x.shape[0], count)
    if block:
        blocks = _in_blocks(labels, order, sizes, block)
        rows = blocks.cut(x)
        if not contracted:
            matrices = jnp.take(y, blocks.labels, axis=0, mode="clip")
            return blocks.joined(lax.dot_general(rows, matrices, (((2,), (1,)), ((0,), (0,))), **options))
        wide = jnp.promote_types(dtype, jnp.float32)  # that of sums over blocks
        options["preferred_element_type"] = wide
        sums = lax.dot_general(rows, blocks.cut(y), (((1,), (1,)), ((0,), (0,))), **options)
        total = jnp.zeros((count, *sums.shape[1:]), wide)
        return total.at[blocks.labels].add(sums, mode="drop", indices_are_sorted=True).astype(dtype)
    if contracted:
        return lax.ragged_dot_general(_moved(x, order), _moved(y, order), sizes, CONTRACTED, **options)
    return _moved(lax.ragged_dot_general(_moved(x, order), y, sizes, FREE, **options), jnp.argsort(order))


def _moved(rows: jax.Array, order: jax.Array) -> jax.Array:
    return jnp.take(rows, order, axis=0, mode="clip", unique_indices=True)


class _Blocks(NamedTuple):
    """Rows in blocks, each of rows of one label.

    Attributes:
        labels: the label of each block; the number of labels for a block without rows.
        rows: the row at each place of the blocks; the number of rows for a place without one.
        places: the place of each row; the number of places for a row without a label.
    """

    labels: jax.Array
    rows: jax.Array
    places: jax.Array

    def cut(self, x: jax.Array) -> jax.Array:
        """Return rows `[r, k]` in blocks `[blocks, block, k]`."""
        rows = jnp.take(x, self.rows, axis=0, mode="fill", fill_value=0)
        return rows.reshape(self.labels.shape[0], -1, x.shape[1])

    def joined(self, x: jax.Array) -> jax.Array:
        """Return rows from blocks, zeros for those without a label."""
        return jnp.take(x.reshape(-1, x.shape[2]), self.places, axis=0, mode="fill", fill_value=0)


def _in_blocks(labels: jax.Array, order: jax.Array, sizes: jax.Array, block: int) -> _Blocks:
    """Return the blocks of rows with labels, by the order that sorts these and the number of rows of each."""
    n, count = labels.shape[0], sizes.shape[0]
    places = multiplied_rows(n, count, block)
    ends = jnp.cumsum(-(-sizes // block))
    of_block = (jnp.arange(places // block)[:, None] >= ends[None, :]).sum(1, dtype=jnp.int32)
    shift = jnp.pad(block * (ends - -(-sizes // block)) - (jnp.cumsum(sizes) - sizes), (0, 1))
    at = jnp.arange(n, dtype=jnp.int32) + shift[labels[order]]
    at = jnp.where(labels[order] < count, at, places)
    rows = jnp.full((places,), n, jnp.int32).at[at].set(order.astype(jnp.int32), mode="drop")
    return _Blocks(of_block, rows, jnp.zeros((n,), jnp.int32).at[order].set(at, unique_indices=True))


def routed_dot(
    x: jax.Array,
    y: jax.Array,
    labels: jax.Array,
    count: int,
    contracted: bool = False,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Multiply each row with the matrix of its label, or add up the products of the rows of each label.

    The arguments are those of `local_product`; labels of any type that has them.
    """
    params = {"precision": precision, "preferred_element_type": preferred_element_type}
    return routed_product.bind(x, y, labels.astype(jnp.int32), count=count, contracted=contracted, **params)


routed_product = core.Primitive(ROUTED)
routed_product.def_impl(local_product)
mlir.register_lowering(routed_product, mlir.lower_fun(local_product, multiple_results=False))


@routed_product.def_abstract_eval
def _type(x: Any, y: Any, labels: Any, *, count: int, contracted: bool, **params: Any) -> Any:
    shape = (count, x.shape[1], y.shape[1]) if contracted else (x.shape[0], y.shape[2])
    dtype = jnp.dtype(params["preferred_element_type"] or jnp.promote_types(x.dtype, y.dtype))
    return x.update(shape=shape, dtype=dtype, weak_type=False)


def _derivative(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    x, y, labels = primals
    out = routed_product.bind(x, y, labels, **params)
    terms = [
        routed_product.bind(*(tangents[i] if i == k else primals[i] for i in (0, 1)), labels, **params)
        for k in (0, 1)
        if not isinstance(tangents[k], ad.Zero)
    ]
    return out, sum(terms[1:], terms[0])


def _transposed(cotangent: Any, x: Any, y: Any, labels: Any, *, contracted: bool, **params: Any) -> list[Any]:
    """Transpose the product in x or y: each transpose is a product of rows with labels, too."""
    k = 0 if ad.is_undefined_primal(x) else 1
    aval = (x, y)[k].aval
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(aval) if i == k else None for i in range(3)]
    turned = (0, 2, 1)
    if contracted:
        first, second = (y, lax.transpose(cotangent, turned)) if k == 0 else (x, cotangent)
    else:
        first, second = (cotangent, lax.transpose(y, turned)) if k == 0 else (x, cotangent)
    out = routed_product.bind(first, second, labels, contracted=k == 1 and not contracted, **params).astype(aval.dtype)
    return [out if i == k else None for i in range(3)]


def _batched(operands: Any, dims: Any, *, count: int, contracted: bool, **params: Any) -> tuple[jax.Array, int]:
    """Map the product: rows of all elements are rows of one, with labels apart unless elements share their matrices."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    shared = not contracted and dims[1] is None
    x, y, labels = (
        x if k == 1 and shared else jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        for k, (x, d) in enumerate(zip(operands, dims, strict=True))
    )
    number = count if shared else size * count
    if not shared:
        starts = count * jnp.arange(size, dtype=jnp.int32)[:, None]
        labels = jnp.where(labels < count, labels + starts, number)
    merged = [a if k == 1 and shared else a.reshape(-1, *a.shape[2:]) for k, a in enumerate((x, y, labels))]
    out = routed_product.bind(*merged, count=number, contracted=contracted, **params)
    return out.reshape(size, -1, *out.shape[1:]), 0


ad.primitive_jvps[routed_product] = _derivative
ad.primitive_transposes[routed_product] = _transposed
batching.primitive_batchers[routed_product] = _batched
