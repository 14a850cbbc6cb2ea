"""Products of rows in groups, or with labels, each with its own matrix, computed as one dense product for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from unity.verify.semantics.primitives.contraction import dot_general
from unity.verify.semantics.primitives.core import PLAIN, InterpreterRun, PrimitiveCall, StackedValue, meaning


@meaning("ragged_dot_general")
def ragged_dot(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """x, y, and the sizes of consecutive groups along one dimension of x.

    The groups' products are added up where that dimension is free (their rows do not overlap), and stacked where it is contracted.
    """
    numbers, sizes = call.params["ragged_dot_dimension_numbers"], values[2]
    (over_x, _), (batch_x, _) = numbers.dot_dimension_numbers
    ragged = tuple(numbers.lhs_ragged_dimensions)
    if len(ragged) != 1 or ragged[0] in batch_x or call.params.get("group_offset") is not None or not sizes.known:
        raise call.refuse("its groups differ within a batch, or depend on floating values")
    domain, (x, y) = run.together(values[:2])
    ends = np.cumsum(sizes.array.astype(np.int64), -1)
    rows = np.arange(run.shape(x)[ragged[0]])
    group_dim = (*numbers.rhs_group_dimensions, run.lead + y.ndim)[0]  # beyond all others where y has no dimension of groups
    pairs = [(x_dims, tuple(d - (d > group_dim) for d in y_dims)) for x_dims, y_dims in numbers.dot_dimension_numbers]
    dense = replace(call, params={"dimension_numbers": pairs})
    products = []
    for g in range(run.shape(sizes.array)[0]):
        inside = rows < ends[..., g, None]
        if g:
            inside &= rows >= ends[..., g - 1, None]
        along = [-1 if d == ragged[0] else 1 for d in range(x.ndim - run.lead)]
        mask = inside.astype(np.int64).reshape(*inside.shape[:-1], *along)
        left = domain.mul(x, mask if domain is PLAIN else domain.constant(mask))
        right = np.take(y, g, run.lead + group_dim) if numbers.rhs_group_dimensions else y
        products += dot_general(run, dense, [StackedValue(left, domain is PLAIN), StackedValue(right, domain is PLAIN)])
    arrays = [product.array for product in products]
    contracted = ragged[0] in over_x
    total = np.stack(np.broadcast_arrays(*arrays), run.lead) if contracted else reduce(domain.add, arrays)
    return [run.typed(total, domain is PLAIN, call.results[0].dtype)]


@meaning("routed_dot")
def routed_dot(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """x [r, k], a matrix for each label, and the label of each row; or two arrays of rows, whose products each label adds up.

    Each row is multiplied by the sum of all matrices, each of which counts once for its own label and never for another.
    """
    if not values[2].known:
        raise call.refuse("its labels depend on floating values")
    domain, (x, y) = run.together(values[:2])
    contracted, labels = call.params["contracted"], values[2].array
    dense = replace(call, params={"dimension_numbers": (((0,), (0,)) if contracted else ((1,), (0,)), ((), ()))})
    products = []
    for g in range(call.params["count"]):
        mask = (labels == g).astype(np.int64)[..., None]
        left = domain.mul(x, mask if domain is PLAIN else domain.constant(mask))
        right = y if contracted else np.take(y, g, run.lead)
        products += dot_general(run, dense, [StackedValue(left, domain is PLAIN), StackedValue(right, domain is PLAIN)])
    arrays = [product.array for product in products]
    total = np.stack(np.broadcast_arrays(*arrays), run.lead) if contracted else reduce(domain.add, arrays)
    return [run.typed(total, domain is PLAIN, call.results[0].dtype)]
