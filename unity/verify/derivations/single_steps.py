"""One step of an equation that is applied to all steps of a loop: the equation without the dimension of the steps.

Each reader applies a lemma of `rules/loops.ranks`: step `t` of a primitive's result is the primitive of step `t` of its operands.
None of this is shared with the code that moves a step's equations before a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from jax import lax

from unity.pcg.ir.program import Body, Equation
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import Shape


@dataclass(frozen=True)
class SingleStep:
    """One step of an equation.

    Attributes:
        params: its parameters.
        dims: the dimension of the steps in each operand, or None for an operand without it, which is the same in all of them. A
            dimension of size 1 is repeated for all steps.
    """

    params: Mapping[str, Any]
    dims: tuple[int | None, ...]


Reader = Callable[[Mapping[str, Any], Sequence[Shape], Shape, int], SingleStep | None]
READERS: dict[str, Reader] = {}
SAME = frozenset(
    {"add", "add_any", "sub", "mul", "select_n", "convert_element_type", "stop_gradient"}
    | {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "is_finite"}
)  # and all that the table calls pointwise


def elementwise(e: Equation) -> bool:
    """Return whether an equation computes each element from those in the same place; operands of size one are repeated."""
    return e.name in SAME or facts_of(e.name).pointwise


def single_step(e: Equation, body: Body, d: int) -> SingleStep | None:
    """Return one step of an equation of a program whose result has the steps along dimension `d`; None if no lemma is about it."""
    shape, operands = body.tensors[e.results[0]].shape, [body.tensor(a).shape for a in e.operands]
    reader = _elementwise if elementwise(e) else READERS.get(e.name)
    return reader(e.params, operands, shape, d) if reader is not None and 0 <= d < len(shape) else None


def _reads(*primitives: str) -> Callable[[Reader], Reader]:
    """Register the decorated function as the reader of some primitives."""

    def register(reader: Reader) -> Reader:
        READERS.update(dict.fromkeys(primitives, reader))
        return reader

    return register


def _without(dims: Sequence[int], d: int) -> tuple[int, ...]:
    """Return the numbers of some dimensions of a tensor that loses dimension `d`."""
    return tuple(int(k) - int(k > d) for k in dims if k != d)


def _dropped(items: Sequence[Any], d: int) -> tuple[Any, ...]:
    return (*items[:d], *items[d + 1 :])


def _elementwise(params: Mapping[str, Any], operands: Sequence[Shape], shape: Shape, d: int) -> SingleStep | None:
    if any(s and (len(s) != len(shape) or any(n not in (1, m) for n, m in zip(s, shape, strict=True))) for s in operands):
        return None
    return SingleStep(params, tuple(d if s else None for s in operands))


@_reads("broadcast_in_dim")
def _broadcast(params: Mapping[str, Any], operands: Sequence[Shape], shape: Shape, d: int) -> SingleStep | None:
    dims = tuple(map(int, params["broadcast_dimensions"]))
    step = {**params, "shape": _dropped(shape, d), "broadcast_dimensions": _without(dims, d)}
    if d not in dims:
        return SingleStep(step, (None,))
    k = dims.index(d)
    return SingleStep(step, (k,)) if operands[0][k] == shape[d] else None


@_reads("transpose")
def _transpose(params: Mapping[str, Any], operands: Sequence[Shape], shape: Shape, d: int) -> SingleStep:
    permutation = tuple(map(int, params["permutation"]))
    k = permutation[d]
    return SingleStep({**params, "permutation": _without(permutation, k)}, (k,))


@_reads("reshape")
def _reshape(params: Mapping[str, Any], operands: Sequence[Shape], shape: Shape, d: int) -> SingleStep | None:
    if params.get("dimensions") is not None:
        return None
    old = operands[0]
    places = [k for k, n in enumerate(old) if n == shape[d] and prod(old[:k]) == prod(shape[:d])]
    if not places and shape[d] != 1:
        return None
    return SingleStep({**params, "new_sizes": _dropped(shape, d)}, (places[0] if places else None,))


@_reads("squeeze")
def _squeeze(params: Mapping[str, Any], operands: Sequence[Shape], shape: Shape, d: int) -> SingleStep:
    squeezed = tuple(map(int, params["dimensions"]))
    k = [j for j in range(len(operands[0])) if j not in squeezed][d]
    return SingleStep({**params, "dimensions": _without(squeezed, k)}, (k,))


@_reads("dot_general")
def _dot(params: Mapping[str, Any], operands: Sequence[Shape], shape: Shape, d: int) -> SingleStep:
    (cx, cy), (bx, by) = ([tuple(map(int, dims)) for dims in pair] for pair in params["dimension_numbers"])
    free = [[k for k in range(len(s)) if k not in (*c, *b)] for s, c, b in zip(operands, (cx, cy), (bx, by), strict=True)]
    origins = [*zip(bx, by, strict=True), *((k, None) for k in free[0]), *((None, k) for k in free[1])]
    x, y = origins[d]

    def left(dims: Sequence[int], k: int | None) -> tuple[int, ...]:
        return tuple(dims) if k is None else _without(dims, k)

    numbers = ((left(cx, x), left(cy, y)), (left(bx, x), left(by, y)))
    return SingleStep({**params, "dimension_numbers": numbers}, (x, y))


@_reads("reduce_sum", "reduce_max", "reduce_min")
def _reduction(params: Mapping[str, Any], operands: Sequence[Shape], shape: Shape, d: int) -> SingleStep:
    axes = tuple(map(int, params["axes"]))
    k = [j for j in range(len(operands[0])) if j not in axes][d]
    return SingleStep({**params, "axes": _without(axes, k)}, (k,))


@_reads("concatenate")
def _concatenation(params: Mapping[str, Any], operands: Sequence[Shape], shape: Shape, d: int) -> SingleStep | None:
    along = int(params["dimension"])
    return None if along == d else SingleStep({**params, "dimension": along - (along > d)}, (d,) * len(operands))


@_reads("stack")
def _stack(params: Mapping[str, Any], operands: Sequence[Shape], shape: Shape, d: int) -> SingleStep | None:
    along = int(params["axis"])
    return None if along == d else SingleStep({**params, "axis": along - int(along > d)}, (d - int(d > along),) * len(operands))


@_reads("unstack")
def _unstack(params: Mapping[str, Any], operands: Sequence[Shape], shape: Shape, d: int) -> SingleStep:
    along = int(params["axis"])
    k = d + int(d >= along)
    return SingleStep({**params, "axis": along - int(along > k)}, (k,))


@_reads("split")
def _split(params: Mapping[str, Any], operands: Sequence[Shape], shape: Shape, d: int) -> SingleStep | None:
    along = int(params["axis"])
    return None if along == d else SingleStep({**params, "axis": along - (along > d)}, (d,))


@_reads("slice")
def _slice(params: Mapping[str, Any], operands: Sequence[Shape], shape: Shape, d: int) -> SingleStep | None:
    starts, limits, strides = params["start_indices"], params["limit_indices"], params["strides"]
    if starts[d] != 0 or limits[d] != operands[0][d] or (strides is not None and strides[d] != 1):
        return None
    bounds = {"start_indices": _dropped(starts, d), "limit_indices": _dropped(limits, d)}
    return SingleStep({**params, **bounds, "strides": None if strides is None else _dropped(strides, d)}, (d,))


@_reads("gather")
def _look_up(params: Mapping[str, Any], operands: Sequence[Shape], shape: Shape, d: int) -> SingleStep | None:
    if params["indices_are_sorted"] or params["unique_indices"]:
        return None  # a promise about the indices of all steps together says something else of those of one
    numbers, sizes, (table, indices) = params["dimension_numbers"], tuple(params["slice_sizes"]), operands
    windowed = [k for k in range(len(table)) if k not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    x: int | None
    i: int | None
    if d in numbers.offset_dims:
        x, i = windowed[tuple(numbers.offset_dims).index(d)], None
        if x in numbers.start_index_map or sizes[x] != table[x]:
            return None
    else:
        i = [k for k in range(len(shape)) if k not in numbers.offset_dims].index(d)
        paired = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
        x = paired.get(i)
    at_table, at_indices = len(table) if x is None else x, len(indices) if i is None else i  # behind all, if there is none
    step = lax.GatherDimensionNumbers(
        offset_dims=_without(numbers.offset_dims, d),
        collapsed_slice_dims=_without(numbers.collapsed_slice_dims, at_table),
        start_index_map=_without(numbers.start_index_map, at_table),
        operand_batching_dims=_without(numbers.operand_batching_dims, at_table),
        start_indices_batching_dims=_without(numbers.start_indices_batching_dims, at_indices),
    )
    return SingleStep({**params, "dimension_numbers": step, "slice_sizes": _dropped(sizes, at_table)}, (x, i))
