"""Products, convolutions and the gradients of pooling, in the form in which a backend computes them."""

from __future__ import annotations

from math import prod

import numpy as np
from jax.extend import core

from unity.exec.liveness.lower import Lowering, Values, tensors_of
from unity.exec.liveness.program import Origin
from unity.pcg.ir.program import Tensor, tensor_type

INT = np.dtype(np.int32)


def dot(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """A product of two tensors."""
    return [_product(b, operands, eqn.params["dimension_numbers"], tensors_of(eqn)[0], origin)]


def _product(b: Lowering, operands: Values, numbers: tuple, tensor: Tensor, origin: Origin) -> int:
    """A product in the form that the backend's routine takes: batch, free, contracted by batch, contracted, free.

    XLA's DotDecomposer turns operands and joins dimensions. TransposeFolding takes a turn back into the product if it exchanges
    the last two dimensions; not if dimensions were joined after it, and so that copy is made. One that sums nothing is no product
    of matrices but of elements (AlgebraicSimplifier).
    """
    contracted, batch = numbers
    if prod(b.tensors[operands[0]].shape[k] for k in contracted[0]) == 1:
        return _outer(b, operands, numbers, tensor, origin)
    ends, sizes = [], []
    for side, v in enumerate(operands):
        shape, (mine, shared) = b.tensors[v].shape, (contracted[side], batch[side])
        free = [k for k in range(len(shape)) if k not in mine and k not in shared]
        groups = [shared, free, mine] if side == 0 else [shared, mine, free]
        sizes.append(prod(shape[k] for k in free))
        turned = b.transpose(v, [k for g in groups for k in g], origin)
        joined = tuple(shape[k] for k in shared) + tuple(prod(shape[k] for k in g) for g in groups[1:])
        ends.append(b.bitcast(turned, tensor_type(joined, b.tensors[v].dtype), origin))
    ends = [_folded(b, v) for v in ends]
    heads = tuple(b.tensors[operands[0]].shape[k] for k in batch[0])
    result = tensor_type((*heads, *sizes), tensor.dtype)
    made = b.emit("dot", ends, (result,), (str(numbers),), origin)[0]
    return b.bitcast(made, tensor, origin)


def ragged(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """A product in groups of rows: an operand is there once for each group, with zeros in the rows of others
    (RaggedDotRewriter)."""
    (left, right, sizes), (tensor,) = operands[:3], tensors_of(eqn)
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    if len(b.tensors[sizes].shape) > 1:  # the groups of each product of a batch are others
        return list(b.emit("dot", operands, (tensor,), ("ragged",), origin))
    ((mine, other), (shared, also)), (row,) = numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions
    if row in shared:
        return [_product(b, [left, right], numbers.dot_dimension_numbers, tensor, origin)]
    mine, shared = [k + 1 for k in mine], [k + 1 for k in shared]
    wide = _by_group(b, left, row, sizes, origin)
    if numbers.rhs_group_dimensions:  # each group of rows has a matrix of its own
        both = (([0, *mine], [*numbers.rhs_group_dimensions, *other]), (shared, also))
        return [_product(b, [wide, right], both, tensor, origin)]
    right = _by_group(b, right, other[mine.index(row + 1)], sizes, origin)
    both = ((mine, [k + 1 for k in other]), ([0, *shared], [0, *(k + 1 for k in also)]))
    return [_product(b, [wide, right], both, tensor, origin)]


def _by_group(b: Lowering, v: int, row: int, sizes: int, origin: Origin) -> int:
    """A tensor for each group, in which the rows of others are zeros."""
    given, groups = b.tensors[v], b.tensors[sizes]
    shape = (*groups.shape, *given.shape)
    wide = b.broadcast(v, tensor_type(shape, given.dtype), range(1, len(shape)), origin)
    rows, truth = tensor_type(shape, groups.dtype), tensor_type(shape, np.dtype(bool))
    end = b.emit("reduce-window", (sizes,), (groups,), ("sum",), origin)[0]
    start = b.emit("sub", (end, sizes), (groups,), (), origin)[0]
    edges = [b.broadcast(edge, rows, (0,), origin) for edge in (start, end)]
    place = b.emit("iota", (), (rows,), (1 + row,), origin)[0]
    inside = [b.emit(kind, (place, edge), (truth,), (), origin)[0] for kind, edge in zip(("ge", "lt"), edges, strict=True)]
    chosen = b.emit("and", inside, (truth,), (), origin)[0]
    tensor = b.tensors[wide]
    return b.emit("select", (chosen, b.zeros(tensor, origin), wide), (tensor,), (), origin)[0]


def _outer(b: Lowering, operands: Values, numbers: tuple, tensor: Tensor, origin: Origin) -> int:
    """Each element of one operand times each of the other, along the dimensions that they do not share."""
    contracted, batch = numbers
    ends, first = [], len(batch[0])
    for side, v in enumerate(operands):
        given, shared, mine = b.tensors[v], batch[side], contracted[side]
        free = [k for k in range(len(given.shape)) if k not in mine and k not in shared]
        turned = b.transpose(v, [*shared, *free, *mine], origin)
        kept = tuple(given.shape[k] for k in (*shared, *free))
        flat = b.converted(b.bitcast(turned, tensor_type(kept, given.dtype), origin), tensor.dtype, origin)
        dimensions = [*range(len(shared)), *range(first, first + len(free))]
        ends.append(b.broadcast(flat, tensor, dimensions, origin))
        first += len(free)
    return b.emit("multiply", ends, (tensor,), (), origin)[0]


def _folded(b: Lowering, v: int) -> int:
    """The value that is read for an operand of a product: not turned, if only its last two dimensions were exchanged."""
    op = b.made.get(v)
    if op is None or op.kind != "transpose":
        return v
    rank = len(op.params)
    return op.operands[0] if op.params == (*range(rank - 2), rank - 1, rank - 2) else v


def convolution(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """A convolution, channels last: images, kernels and results are turned to it and back (XLA's ConvCanonicalization).

    Images are copied even if only dimensions of size 1 change places, as these have no place in a layout that both sides agree on.
    """
    (tensor,), numbers = tensors_of(eqn), eqn.params["dimension_numbers"]
    if not b.backend.turns:
        return list(b.emit("convolution", operands, (tensor,), (str(eqn.params),), origin))
    (n, c, *space), (o, i, *window), (rn, rc, *rspace) = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    image = b.transpose(operands[0], (n, *space, c), origin, copied=True)
    kernel = b.transpose(operands[1], (*window, i, o), origin)
    order = (rn, *rspace, rc)
    result = tensor_type(tuple(tensor.shape[k] for k in order), tensor.dtype)
    made = b.emit("convolution", (image, kernel), (result,), (str(eqn.params),), origin)[0]
    return [b.transpose(made, [order.index(k) for k in range(len(order))], origin)]


def select_and_scatter(b: Lowering, eqn: core.JaxprEqn, operands: Values, origin: Origin) -> Values:
    """The gradient of a maximum over windows: where it was, as indices, and a scatter to there (SelectAndScatterExpander)."""
    source, operand = operands
    (tensor,), made = tensors_of(eqn), b.tensors[source]
    if not b.backend.indexes:
        return list(b.emit("select-and-scatter", operands, (tensor,), (), origin))
    padding, shape = eqn.params["padding"], b.tensors[operand].shape
    if any(map(any, padding)):
        shape = tuple(n + low + high for n, (low, high) in zip(shape, padding, strict=True))
        operand = b.emit("pad", (operand,), (tensor_type(shape, tensor.dtype),), (str(padding),), origin)[0]
    rank = len(shape)
    iotas = [b.emit("iota", (), (tensor_type(shape, INT),), (k,), origin)[0] for k in range(rank)]
    index = tensor_type(made.shape, INT)
    window = str((eqn.params["window_dimensions"], eqn.params["window_strides"]))
    _, *found = b.emit("reduce-window", (operand, *iotas), (made, *[index] * rank), (window,), origin)
    rows = [b.bitcast(v, tensor_type((prod(made.shape), 1), INT), origin) for v in found]
    table = b.emit("concatenate", rows, (tensor_type((prod(made.shape), rank), INT),), (1,), origin)[0]
    zeros = b.zeros(tensor_type(shape, tensor.dtype), origin)
    out = b.emit("scatter", (zeros, table, source), (tensor_type(shape, tensor.dtype),), (), origin)[0]
    return [out] if shape == tensor.shape else list(b.emit("slice", (out,), (tensor,), (str(padding),), origin))
