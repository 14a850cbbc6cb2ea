"""The slowdown of matrix products whose rows do not all begin at an address that a tensor core loads from.

A GPU's library has its fast kernels for arrays whose last dimension is a multiple of 16 bytes; others take several times as long
(NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use Tensor Cores"): `Device.misaligned` times.
XLA merges the dimensions that a product sums, and those that it keeps of an operand, before it calls the library: a weight
`[1536, 6144, 2]` has rows of 12,288 elements.
Rows of any number make no difference, as far as was measured (`benchmarks.gpu_kernels`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from unity.machine.hardware import ALIGNMENT, Device
from unity.pcg.ir.program import Body

Array = np.ndarray
PRODUCT = "dot_general"
WIDEST = 4  # bytes of an element: float64 has kernels of its own


@lru_cache
def aligned_elements(dtype: Any) -> int:
    """Return the number of elements of which aligned rows have a multiple.

    It is 1 for types whose rows are all as fast, or were not measured: those of integers, and of more than `WIDEST` bytes.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        return 1
    itemsize = jnp.dtype(dtype).itemsize
    return ALIGNMENT // itemsize if itemsize <= WIDEST else 1


def depends_on_alignment(device: Device, body: Body) -> bool:
    """Return whether a body is a single matrix product, on a device where its alignment matters."""
    return device.misaligned > 1 and [e.name for e in body.equations] == [PRODUCT]


def slowdown(device: Device, dtype: str, operands: Sequence[Array | int], result: Array | int) -> tuple[Array, Array]:
    """Return how many times as long a product's arithmetic takes, forward and backward.

    Backward, the result's cotangent is an operand of both products. If only an operand of the forward product is misaligned, these
    took 1.0 and 1.6 times as long where it was measured, for 1,020 and 1,023 elements, which is neglected.

    Args:
        device: The device.
        dtype: The dtype of the operands.
        operands: The local size of each operand's rows.
        result: The local size of the result's rows.
    """
    backward, *others = (_is_misaligned(dtype, size) for size in (result, *operands))
    forward = np.logical_or.reduce([backward, *others])
    return np.where(forward, device.misaligned, 1.0), np.where(backward, device.misaligned, 1.0)


def slowdown_of_shapes(
    device: Device, dtype: str, shapes: Sequence[tuple[int, ...]], body: Body | None = None
) -> tuple[Array, Array]:
    """Return the `slowdown` of a product by the local shapes of its operands and its result.

    Without a body, rows are last dimensions.
    """
    *operands, result = _row_sizes(shapes, body)
    return slowdown(device, dtype, operands, result)


def misaligned_rows(dtype: str, shapes: Sequence[tuple[int, ...]], body: Body) -> tuple[int, ...]:
    """Return the sizes of the rows of a product's arrays that are not aligned, each once."""
    return tuple(sorted({n for n in _row_sizes(shapes, body) if _is_misaligned(dtype, n)}))


def row_dimensions(body: Body) -> tuple[tuple[int, ...], ...]:
    """Return the dimensions of a row of a matrix product's operands, and of its result: the last, and others merged with it."""
    (e,) = body.equations
    contracted, batched = e.params["dimension_numbers"]
    rows, kept = list[tuple[int, ...]](), list[int]()
    for k, atom in enumerate(e.operands):
        ndim = body.tensor(atom).ndim
        free = [d for d in range(ndim) if d not in (*contracted[k], *batched[k])]
        group = next((g for g in (free, contracted[k]) if ndim - 1 in g), (ndim - 1,))
        rows.append(_last_run(ndim, group))
        kept.append(len(free))
    ndim = body.tensor(e.results[0]).ndim
    return (*rows, _last_run(ndim, range(ndim - (kept[1] or kept[0] or 1), ndim)))


def _last_run(ndim: int, group: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions of a group that are the last ones of an array, without others between them."""
    first = ndim
    while first and first - 1 in group:
        first -= 1
    return tuple(range(first, ndim))


def _row_sizes(shapes: Sequence[tuple[int, ...]], body: Body | None) -> Iterator[int]:
    if body is None:
        return (shape[-1] if shape else 1 for shape in shapes)
    (e,) = body.equations
    local = dict(zip((*body.inputs, *body.outputs), shapes, strict=True))
    atoms = zip((*e.operands, *e.results), row_dimensions(body), strict=True)
    return (prod((local[a] if isinstance(a, int) else a.tensor.shape)[d] for d in dims) for a, dims in atoms)


def _is_misaligned(dtype: str, size: Array | int) -> Array:
    return np.asarray(size) % aligned_elements(dtype) > 0
