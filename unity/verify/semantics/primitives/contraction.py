"""Contractions and convolutions over any domain, both by one batched matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from unity.verify.semantics.primitives.core import PLAIN, InterpreterRun, PrimitiveCall, StackedValue, meaning
from unity.verify.semantics.primitives.reshaping import padded, transposed
from unity.verify.semantics.primitives.sliding import flat_window_indices, window_indices


@meaning("dot_general")
def dot_general(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """x [batch, free, contracted], y [batch, contracted, free] → [batch, x free, y free], in any order of dimensions."""
    domain, (x, y) = run.together(values)
    (over_x, over_y), (batch_x, batch_y) = call.params["dimension_numbers"]
    free_x = [i for i in range(x.ndim - run.lead) if i not in (*over_x, *batch_x)]
    free_y = [i for i in range(y.ndim - run.lead) if i not in (*over_y, *batch_y)]
    sizes = [[run.shape(a)[i] for i in dims] for a, dims in ((x, batch_x), (x, free_x), (y, free_y), (x, over_x))]
    batch, rows, columns, inner = map(prod, sizes)
    left = transposed(run, x, (*batch_x, *free_x, *over_x)).reshape((*x.shape[: run.lead], batch, rows, inner))
    right = transposed(run, y, (*batch_y, *over_y, *free_y)).reshape((*y.shape[: run.lead], batch, inner, columns))
    result = domain.dot(left, right)
    result = result.reshape((*result.shape[: run.lead], *sizes[0], *sizes[1], *sizes[2]))
    return [run.typed(result, domain is PLAIN, call.results[0].dtype)]


@meaning("conv_general_dilated")
def convolution(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Image [n, g·c, *space], kernel [g·o, c, *window] → [n, g·o, *space]; in any order, with dilations and batch groups."""
    domain, (image, kernel) = run.together(values)
    params, numbers = call.params, call.params["dimension_numbers"]
    groups, batches = params["feature_group_count"], params["batch_group_count"]
    x, w = transposed(run, image, numbers.lhs_spec), transposed(run, kernel, numbers.rhs_spec)
    paddings = zip(params["padding"], params["lhs_dilation"], strict=True)
    zero = domain.constant(np.zeros((1,) * run.lead)) if domain is not PLAIN else np.zeros((1,) * run.lead, x.dtype)
    x = padded(run, x, zero, [(0, 0, 0)] * 2 + [(low, high, d - 1) for (low, high), d in paddings])
    (n, c, *space), (o, _, *window) = run.shape(x), run.shape(w)
    dimensions = zip(space, window, params["window_strides"], params["rhs_dilation"], strict=True)
    indices = [window_indices(*dimension) for dimension in dimensions]
    lead_x, lead_w = x.shape[: run.lead], w.shape[: run.lead]
    x = np.take(x.reshape((*lead_x, n, c, -1)), flat_window_indices(space, indices), -1)
    # [batch group, n, group, c, position, window] → [batch group · group, n · position, c · window]
    positions = x.shape[-2]
    x = x.reshape((*lead_x, batches, n // batches, groups, c // groups, positions, -1))
    x = transposed(run, x, (0, 2, 1, 4, 3, 5)).reshape((*lead_x, batches * groups, n // batches * positions, -1))
    w = np.swapaxes(w.reshape((*lead_w, batches * groups, o // (batches * groups), -1)), -1, -2)
    result = domain.dot(x, w)
    result = result.reshape((*result.shape[: run.lead], batches * groups, n // batches, positions, -1))
    result = transposed(run, result, (1, 0, 3, 2))  # [n, group, o, position]
    result = result.reshape((*result.shape[: run.lead], n // batches, o, *(len(along) for along in indices)))
    inverse = np.argsort(numbers.out_spec).tolist()
    return [run.typed(transposed(run, result, inverse), domain is PLAIN, call.results[0].dtype)]
