"""What XLA's passes ask of an operation: whether it works element by element, moves elements only, is expensive or collective."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from unity.exec.liveness.program import Op
from unity.pcg.ir.program import Tensor

# JAX's collectives, as XLA calls them
COLLECTIVES = {
    "psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce", "psum2": "all-reduce",
    "all_gather": "all-gather", "all_gather_invariant": "all-gather", "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter", "all_to_all": "all-to-all", "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}  # fmt: skip
# `CpuInstructionFusion::IsExpensive` and `InstructionFusion::IsExpensive`: these may be computed twice
CHEAP = frozenset(
    {
        "add", "sub", "multiply", "multiply-inverse", "neg", "max", "min", "select", "lt", "gt", "le", "ge", "eq", "ne", "and",
        "or", "not", "xor", "abs", "sign", "floor", "ceil", "round", "clamp", "shift_left", "shift_right_logical",
        "shift_right_arithmetic", "is_finite", "real", "imag", "complex", "population_count", "clz", "sin", "cos", "tan",
        "bitcast_convert_type", "copy", "one_minus_square", "polynomial", "nextafter", "eq_to", "le_to", "lt_to",
    }
)  # fmt: skip
DEAR = frozenset(
    {
        "exp", "exp2", "log", "log1p", "log2", "expm1", "tanh", "logistic", "erf", "erfc", "erf_inv", "rsqrt", "sqrt", "cbrt",
        "divide", "pow", "rem", "atan2", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "lgamma", "digamma",
    }
)  # fmt: skip
ELEMENTWISE = CHEAP | DEAR | {"convert"}
# `CanBeLoopFused`
MOVING = frozenset(
    {
        "bitcast", "broadcast", "dynamic-slice", "dynamic-update-slice", "iota", "pad", "relayout", "reverse", "slice", "transpose",
    }
)  # fmt: skip
FUSIBLE = ELEMENTWISE | MOVING | {"concatenate", "gather", "reduce"}
PERMUTING = MOVING - {"broadcast", "iota"} | {"concatenate", "reduce"}  # read every element once, elsewhere
ARGUMENTS_LIMIT, ROW_BYTES, TOTAL_BYTES = 8, 64, 2048  # of a concatenation that is not fused


def expensive(op: Op, tensors: Sequence[Tensor]) -> bool:
    """Whether an operation is not to be computed twice."""
    if op.kind == "convert":
        return str(tensors[op.results[0]].dtype) == "bfloat16"
    return op.kind not in CHEAP and op.kind not in MOVING and op.kind not in ("concatenate", "constant", "axis_index")


def for_its_own(op: Op, v: int) -> bool:
    """Whether every element of an operand is read for the element of the result at its place only (`IsElementwiseOnOperand`).

    So it is of what a slice is written into: elements of the slice are not read, and all others stay.
    """
    if op.kind == "dynamic-update-slice":
        return v not in op.operands[1:]
    return op.kind in ELEMENTWISE


def rank(tensor: Tensor) -> int:
    """Dimensions that are not of size 1 (`ShapeUtil::TrueRank`)."""
    return sum(n > 1 for n in tensor.shape)


def size(tensor: Tensor) -> int:
    """Elements."""
    return prod(tensor.shape)


def joins_rows(op: Op, tensors: Sequence[Tensor]) -> bool:
    """Whether an operation is a concatenation that is better done by copying rows: of many, or along the last dimension."""
    if op.kind != "concatenate":
        return False
    tensor = tensors[op.results[0]]
    if len(op.operands) > ARGUMENTS_LIMIT:
        return True
    last = next((int(v) for k, v in _named(op.params) if k == "dimension"), len(tensor.shape) - 1) == len(tensor.shape) - 1
    row = tensor.shape[-1] * tensor.itemsize if tensor.shape else 0
    return len(tensor.shape) > 1 and last and row >= ROW_BYTES and tensor.nbytes >= TOTAL_BYTES


def _named(params: tuple) -> list[tuple[str, str]]:
    return [p for p in params if isinstance(p, tuple) and len(p) == 2]
