"""Products over any domain: contractions and convolutions, both brought to one batched matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from math import prod

import numpy as np

from unity.pcg.operators.table.ragged import ragged_dim
from unity.verify.semantics.domains import Array
from unity.verify.semantics.primitives.core import PLAIN, Application, Run, Value, meaning
from unity.verify.semantics.primitives.elementwise import as_result
from unity.verify.semantics.primitives.shaping import padded, transposed


@meaning("dot_general")
def dot_general(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """x [batch, free, contracted], y [batch, contracted, free] → [batch, x free, y free], in any order of dimensions."""
    domain, (x, y) = run.together(values)
    (over_x, over_y), (batch_x, batch_y) = app.params["dimension_numbers"]
    m = [i for i in range(x.ndim - run.lead) if i not in (*over_x, *batch_x)]
    n = [i for i in range(y.ndim - run.lead) if i not in (*over_y, *batch_y)]
    sizes = [[run.shape(a)[i] for i in dims] for a, dims in ((x, batch_x), (x, m), (y, n), (x, over_x))]
    batch, rows, columns, inside = map(prod, sizes)
    left = transposed(run, x, (*batch_x, *m, *over_x)).reshape((*x.shape[: run.lead], batch, rows, inside))
    right = transposed(run, y, (*batch_y, *over_y, *n)).reshape((*y.shape[: run.lead], batch, inside, columns))
    result = domain.dot(left, right)
    result = result.reshape((*result.shape[: run.lead], *sizes[0], *sizes[1], *sizes[2]))
    return [as_result(run, app, result, domain is PLAIN)]


@meaning("ragged_dot_general")
def ragged_dot(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """For each group a product of which only its rows count: added up where they are rows of the result, else one after another."""
    domain, (x, y) = run.together(values[:2])
    found, numbers = ragged_dim(app.params), app.params["ragged_dot_dimension_numbers"]
    if found is None or not values[2].known:
        raise app.refuse("its groups differ within a batch, or depend on floating values")
    ragged, contracted = found
    ends = np.cumsum(values[2].array.astype(np.int64), -1)
    rows = np.arange(run.shape(x)[ragged])
    of_y = (*numbers.rhs_group_dimensions, run.lead + y.ndim)[0]  # the dimension of groups, taken out of those of y
    pairs = [(x_dims, tuple(d - (d > of_y) for d in y_dims)) for x_dims, y_dims in numbers.dot_dimension_numbers]
    dense = replace(app, params={"dimension_numbers": pairs})
    parts = []
    for g in range(run.shape(values[2].array)[0]):
        inside = rows < ends[..., g, None]
        if g:
            inside &= rows >= ends[..., g - 1, None]
        mask = inside.astype(np.int64).reshape(*inside.shape[:-1], *(-1 if d == ragged else 1 for d in range(x.ndim - run.lead)))
        left = domain.mul(x, mask if domain is PLAIN else domain.constant(mask))
        right = np.take(y, g, run.lead + of_y) if numbers.rhs_group_dimensions else y
        parts += dot_general(run, dense, [Value(left, domain is PLAIN), Value(right, domain is PLAIN)])
    arrays = [part.array for part in parts]
    total = np.stack(np.broadcast_arrays(*arrays), run.lead) if contracted else reduce(domain.add, arrays)
    return [as_result(run, app, total, domain is PLAIN)]


def windows(size: int, window: int, stride: int, dilation: int) -> Array:
    """`[positions, window]`: the indices that each position of a window covers. `size` is padded already."""
    count = max(0, (size - (window - 1) * dilation - 1) // stride + 1)
    return np.arange(count)[:, None] * stride + np.arange(window)[None, :] * dilation


def flat_windows(space: Sequence[int], grids: Sequence[Array]) -> Array:
    """`[all positions, all of a window]`: flat indices into a space, from `[positions, window]` along each dimension."""
    flat = np.zeros((1, 1), np.int64)
    for n, grid in zip(space, grids, strict=True):
        flat = flat[:, None, :, None] * n + grid[None, :, None, :]
        flat = flat.reshape(flat.shape[0] * flat.shape[1], -1)
    return flat


@meaning("conv_general_dilated")
def convolution(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Image [n, g·c, *space], kernel [g·o, c, *window] → [n, g·o, *space]; in any order, with dilations and batch groups."""
    domain, (image, kernel) = run.together(values)
    params, numbers = app.params, app.params["dimension_numbers"]
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    x, w = transposed(run, image, numbers.lhs_spec), transposed(run, kernel, numbers.rhs_spec)
    dilated = zip(params["padding"], params["lhs_dilation"], strict=True)
    zero = domain.constant(np.zeros((1,) * run.lead)) if domain is not PLAIN else np.zeros((1,) * run.lead, x.dtype)
    x = padded(run, x, zero, [(0, 0, 0)] * 2 + [(low, high, d - 1) for (low, high), d in dilated])
    (n, c, *space), (o, _, *window) = run.shape(x), run.shape(w)
    moves = zip(space, window, params["window_strides"], params["rhs_dilation"], strict=True)
    grids = [windows(*move) for move in moves]
    lead_x, lead_w = x.shape[: run.lead], w.shape[: run.lead]
    x = np.take(x.reshape((*lead_x, n, c, -1)), flat_windows(space, grids), -1)
    # [batch group, n, group, c, position, window] → [batch group · group, n · position, c · window]
    positions = x.shape[-2]
    x = x.reshape((*lead_x, batches, n // batches, groups, c // groups, positions, -1))
    x = transposed(run, x, (0, 2, 1, 4, 3, 5)).reshape((*lead_x, batches * groups, n // batches * positions, -1))
    w = np.swapaxes(w.reshape((*lead_w, batches * groups, o // (batches * groups), -1)), -1, -2)
    result = domain.dot(x, w)
    result = result.reshape((*result.shape[: run.lead], batches * groups, n // batches, positions, -1))
    result = transposed(run, result, (1, 0, 3, 2))  # [n, group, o, position]
    result = result.reshape((*result.shape[: run.lead], n // batches, o, *(len(g) for g in grids)))
    inverse = [0] * len(numbers.out_spec)
    for k, d in enumerate(numbers.out_spec):
        inverse[d] = k
    return [as_result(run, app, transposed(run, result, inverse), domain is PLAIN)]
