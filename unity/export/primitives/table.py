"""The table of JAX's primitives with the functions that write them as source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from unity.export.primitives.collectives import COMMUNICATION_PRINTERS
from unity.export.primitives.indexing import INDEXING_PRINTERS
from unity.export.primitives.primitive_call import AppliedPrimitive, Operand, Printer, dtype_code
from unity.export.primitives.random_bits import RANDOM_PRINTERS
from unity.export.source_code import (  # fmt: skip
    AND,
    COMPARE,
    OR,
    PLUS,
    TIMES,
    XOR,
    Code,
    call,
    infix,
    literal,
    method,
    prefix,
    sequence,
)

# Names that a file imports from modules of JAX that `import jax` does not import.
CHECKPOINT_NAME = "checkpoint_name"
LAYOUT_CLASS, LAYOUT_FUNCTION = "Layout", "with_layout_constraint"
REDUCTION_METHODS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "prod"}
INFIX = {
    "add": ("+", PLUS), "add_any": ("+", PLUS), "sub": ("-", PLUS), "mul": ("*", TIMES), "div": ("/", TIMES),
    "and": ("&", AND), "or": ("|", OR), "xor": ("^", XOR),
    "lt": ("<", COMPARE), "le": ("<=", COMPARE), "gt": (">", COMPARE), "ge": (">=", COMPARE),
    "eq": ("==", COMPARE), "ne": ("!=", COMPARE),
}  # fmt: skip
# Python reverses a comparison whose left operand is a number.
COMPARISONS = frozenset(name for name, (_, level) in INFIX.items() if level == COMPARE)
# Primitives that take a Python number beside an array of its dtype.
SCALAR_OPERAND = frozenset({*INFIX, "max", "min", "pow", "rem", "atan2", "nextafter"})
# Primitives whose functions make all operands vary along the same axes.
AUTOMATIC = SCALAR_OPERAND | {
    "select_n", "clamp", "concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "pad", "dot_general",
    "conv_general_dilated", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max",
}  # fmt: skip
# Names of results in a file, by primitive. Other results are named after their primitive.
RESULT_NAMES = {
    "add": "plus", "add_any": "plus", "sub": "minus", "mul": "times", "div": "ratio", "reduce_sum": "total",
    "reduce_max": "largest", "reduce_min": "smallest", "dot_general": "product", "select_n": "chosen",
    "integer_pow": "power", "broadcast_in_dim": "spread",
    "convert_element_type": "converted", "conv_general_dilated": "convolved", "pvary": "varying", "max": "larger", "min": "smaller",
    "dynamic_slice": "part", "slice": "part", "iota": "positions", "psum": "reduced", "psum_invariant": "reduced",
    "all_gather": "gathered", "all_gather_invariant": "gathered", "reduce_scatter": "scattered", "all_to_all": "exchanged",
    "random_bits": "bits", "scatter-add": "added", "neg": "negative", "reduce_window_max": "pooled", "reduce_window_sum": "pooled",
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not"), "mask"),
    "ppermute": "received", "routed_dot": "product",
}  # fmt: skip


def function_printer(name: str, *parameters: str) -> Printer:
    """Return the printer of a function that takes all operands, and some parameters by name."""
    return lambda e: call(name, *e.codes, **{p: e[p] for p in parameters})


def both_operands(e: AppliedPrimitive) -> list[Code]:
    """Return the two operands of an elementwise primitive, a constant as a number, and without leading dimensions of size 1."""
    numbers = [o.scalar for o in e.operands]
    if all(n is not None for n in numbers) or e.name in COMPARISONS:
        numbers[0] = None
    for k, n in enumerate(numbers):
        other = e.operands[1 - k]
        if n is not None and other.tensor.dtype == e.operands[k].tensor.dtype:
            return [n, other.code] if k == 0 else [other.code, n]
    left, right = e.operands
    if left.tensor.ndim != right.tensor.ndim:  # beside a scalar the other operand decides the rank
        return e.codes
    lower = _without_leading_ones(left)
    return [left.code, _without_leading_ones(right) or right.code] if lower is None else [lower, right.code]


def _without_leading_ones(x: Operand) -> Code | None:
    """Return an operand without the leading dimensions of size 1 that were added to it, or None if it has none."""
    producer = x.producer
    if producer is None or producer.name != "broadcast_in_dim" or producer.operands[0].tensor.ndim == 0:
        return None
    inner = producer.operands[0]
    trailing_axes = tuple(range(x.tensor.ndim - inner.tensor.ndim, x.tensor.ndim))
    adds_leading_ones = (
        tuple(producer["broadcast_dimensions"]) == trailing_axes and x.tensor.shape == (1,) * trailing_axes[0] + inner.tensor.shape
    )
    return inner.code if adds_leading_ones else None


def _infix(e: AppliedPrimitive) -> Code:
    operator, level = INFIX[e.name]
    if e.name == "div" and not e.operands[0].tensor.floating:
        return call("lax.div", *e.codes)
    is_boolean = e.operands[0].tensor.dtype == bool  # linters reject comparisons with a boolean literal
    left, right = e.codes if is_boolean else both_operands(e)
    return infix(left, operator, right, level)


def _reduce(e: AppliedPrimitive) -> Code:
    dtype, shape = e.operands[0].tensor.dtype, e.operands[0].tensor.shape
    # For narrower types, jax.numpy sums in a wider one; and it refuses the extremum of nothing.
    if dtype in (np.float32, np.float64) and (0 not in shape or e.name in ("reduce_sum", "reduce_prod")):
        return method(e.codes[0], REDUCTION_METHODS[e.name], axis=axis_argument(e["axes"], e.operands[0].tensor.ndim))
    return call(f"lax.{e.name}", e.codes[0], tuple(e["axes"]))


def axis_argument(axes: Sequence[int], rank: int) -> Any:
    """Return axes as people write them: None for all, one axis alone, the last axis as -1."""
    if len(axes) == rank:
        return None
    return (-1 if axes[0] == rank - 1 else axes[0]) if len(axes) == 1 else tuple(axes)


def _broadcast(e: AppliedPrimitive) -> Code:
    shape, dims, x = tuple(e["shape"]), tuple(e["broadcast_dimensions"]), e.operands[0]
    if not x.tensor.shape and x.scalar is not None:
        return call("jnp.full", shape, x.scalar, dtype_code(x.tensor.dtype))
    new_axes = tuple(k for k in range(len(shape)) if k not in dims)
    if tuple(shape[k] for k in dims) == x.tensor.shape and all(shape[k] == 1 for k in new_axes):
        producer = x.producer
        if (
            producer is not None
            and producer.name in REDUCTION_METHODS
            and tuple(producer["axes"]) == new_axes
            and producer.operands[0].tensor.ndim == len(shape)
        ):
            reduction = _reduce(producer)
            if reduction.text.startswith("lax."):
                return call("jnp.expand_dims", x.code, axis_argument(new_axes, 0) if len(new_axes) == 1 else new_axes)
            axes = axis_argument(new_axes, len(shape))
            return method(producer.codes[0], REDUCTION_METHODS[producer.name], axis=axes, keepdims=True)
        return call("jnp.expand_dims", x.code, axis_argument(new_axes, len(shape)) if len(new_axes) < len(shape) else new_axes)
    return call("lax.broadcast_in_dim", x.code, shape, dims)


def _convert(e: AppliedPrimitive) -> Code:
    old, new = e.operands[0].tensor.dtype, np.dtype(e["new_dtype"])
    if old == new:
        return e.codes[0]
    plain = all(np.dtype(d).kind in "fiuV" and jnp.issubdtype(d, np.number) for d in (old, new))
    if plain and e.operands[0].constant is None:
        return method(e.codes[0], "astype", dtype_code(new))
    return call("lax.convert_element_type", e.codes[0], dtype_code(new))


def _select(e: AppliedPrimitive) -> Code:
    predicate, *cases = e.operands
    if predicate.tensor.dtype != bool or len(cases) != 2:
        return call("lax.select_n", *e.codes)
    numbers = [_broadcast_number(c) for c in reversed(cases)]
    if predicate.tensor.shape == e.results[0].shape and sum(c is not None for c in numbers) < 2:
        codes = [c or case.code for c, case in zip(numbers, reversed(cases), strict=True)]
        return call("jnp.where", predicate.code, *codes)
    return call("lax.select", predicate.code, *(c.code for c in reversed(cases)))


def _broadcast_number(x: Operand) -> Code | None:
    """Return the number that an operand broadcasts, or None if it is not the broadcast of a number."""
    producer = x.producer
    if producer is not None and producer.name == "broadcast_in_dim" and x.tensor.shape:
        return producer.operands[0].scalar
    return x.scalar


def _reshape(e: AppliedPrimitive) -> Code:
    if e["dimensions"] is not None:
        return call("lax.reshape", e.codes[0], tuple(e["new_sizes"]), tuple(e["dimensions"]))
    return method(e.codes[0], "reshape", *(e["new_sizes"] or ((),)))


def _dot(e: AppliedPrimitive) -> Code:
    ((a, b), (batch, _)), x, y = e["dimension_numbers"], e.operands[0].tensor, e.operands[1].tensor
    batch_dims = len(batch)
    batch_first = tuple(batch) == tuple(range(batch_dims)) == tuple(e["dimension_numbers"][1][1])
    ranks = x.ndim == y.ndim == batch_dims + 2 if batch_dims else y.ndim == 2 and x.ndim > 1
    # `@` squeezes batch dimensions of size 1
    matmul = batch_first and ranks and 1 not in x.shape[:batch_dims] and tuple(a) == (x.ndim - 1,) and tuple(b) == (y.ndim - 2,)
    default_types = x.dtype == y.dtype == e.results[0].dtype and e["precision"] is None
    element_type = e["preferred_element_type"]
    if matmul and default_types and element_type is not None and element_type == x.dtype:  # numpy takes None for float64
        return infix(e.codes[0], "@", e.codes[1], TIMES)
    options: dict[str, object] = {}
    if e["precision"] is not None:
        options["precision"] = precision_code(e["precision"])
    if e["preferred_element_type"] is not None:
        options["preferred_element_type"] = dtype_code(e["preferred_element_type"])
    numbers = tuple(tuple(map(tuple, pair)) for pair in e["dimension_numbers"])
    return call("lax.dot_general", *e.codes, numbers, **options)


def precision_code(value: Any) -> Code:
    """Return a precision, or a pair of precisions, by name."""
    if isinstance(value, tuple):
        return sequence([precision_code(v) for v in value])
    if isinstance(value, lax.Precision):
        return Code(f"lax.Precision.{value.name}")
    return Code(f"lax.DotAlgorithmPreset.{value.name}") if hasattr(value, "name") else literal(value)


def _conv(e: AppliedPrimitive) -> Code:
    numbers = e["dimension_numbers"]
    options: dict[str, object] = {
        "dimension_numbers": call("lax.ConvDimensionNumbers", *(tuple(n) for n in numbers)),
    }
    ones = (1,) * (e.operands[0].tensor.ndim - 2)
    options |= {k: tuple(e[k]) for k in ("lhs_dilation", "rhs_dilation") if tuple(e[k]) != ones}
    options |= {k: e[k] for k in ("feature_group_count", "batch_group_count") if e[k] != 1}
    if e["precision"] is not None:
        options["precision"] = precision_code(e["precision"])
    if e["preferred_element_type"] is not None:
        options["preferred_element_type"] = dtype_code(e["preferred_element_type"])
    return call("lax.conv_general_dilated", *e.codes, tuple(e["window_strides"]), _pairs(e["padding"]), **options)


def _pairs(pairs: Sequence[Sequence[int]]) -> Code:
    return sequence([literal(tuple(p)) for p in pairs])


def _window(e: AppliedPrimitive) -> Code:
    kind = e.name.removeprefix("reduce_window_")
    x = e.operands[0].tensor
    zero = Code("0j" if jnp.issubdtype(x.dtype, jnp.complexfloating) else "0.0" if x.floating else "0")
    initial = zero if kind == "sum" else _extreme(x.dtype, "-", "min") if kind == "max" else _extreme(x.dtype, "", "max")
    operation = {"sum": "lax.add"}.get(kind, f"lax.{kind}")
    options = {k: tuple(e[k]) for k in ("base_dilation", "window_dilation") if set(e[k]) != {1}}
    shape = (tuple(e["window_dimensions"]), tuple(e["window_strides"]))
    return call("lax.reduce_window", e.codes[0], initial, Code(operation), *shape, _pairs(e["padding"]), **options)


def _extreme(dtype: Any, sign: str, limit: str) -> Code:
    """Return the least or the greatest value of a dtype."""
    if jnp.issubdtype(dtype, np.floating):
        return prefix(sign, Code("jnp.inf")) if sign else Code("jnp.inf")
    if jnp.issubdtype(dtype, np.bool_):
        return literal(limit == "max")
    return Code(f"np.{np.dtype(dtype).name}({getattr(jnp.iinfo(dtype), limit)})")


def _iota(e: AppliedPrimitive) -> Code:
    shape, dtype = tuple(e["shape"]), dtype_code(e["dtype"])
    if len(shape) == 1:
        return call("lax.iota", dtype, shape[0])
    return call("lax.broadcasted_iota", dtype, shape, e["dimension"])


def _pad(e: AppliedPrimitive) -> Code:
    return call("lax.pad", *e.codes, _pairs(e["padding_config"]))


def _sort(e: AppliedPrimitive) -> Code:
    operands = sequence(e.codes) if len(e.codes) > 1 else e.codes[0]
    value = call("lax.sort", operands, dimension=e["dimension"], is_stable=e["is_stable"], num_keys=e["num_keys"])
    return value if len(e.codes) > 1 else sequence([value])


def _arg_reduction(e: AppliedPrimitive) -> Code:
    return call(f"lax.{e.name}", *e.codes, e["axes"][0], dtype_code(e["index_dtype"]))


def _concatenate(e: AppliedPrimitive) -> Code:
    return call("lax.concatenate", sequence(e.codes, "[]"), e["dimension"])


def _cumulative(e: AppliedPrimitive) -> Code:
    return call(f"lax.{e.name}", e.codes[0], axis=e["axis"], reverse=e["reverse"])


def _checkpoint_name(e: AppliedPrimitive) -> Code:
    return call(CHECKPOINT_NAME, e.codes[0], e["name"])


def _layout_constraint(e: AppliedPrimitive) -> Code:
    return call(LAYOUT_FUNCTION, e.codes[0], call(LAYOUT_CLASS, tuple(e["layout"].major_to_minor)))


def _bitcast(e: AppliedPrimitive) -> Code:
    return call("lax.bitcast_convert_type", e.codes[0], dtype_code(e["new_dtype"]))


def _barrier(e: AppliedPrimitive) -> Code:
    return call("lax.optimization_barrier", sequence(e.codes))


def _transpose(e: AppliedPrimitive) -> Code:
    return method(e.codes[0], "transpose", *e["permutation"])


def _squeeze(e: AppliedPrimitive) -> Code:
    return call("lax.squeeze", e.codes[0], tuple(e["dimensions"]))


JNP_FUNCTIONS = (
    "exp", "log", "log1p", "expm1", "tanh", "sin", "cos", "tan", "sqrt", "abs", "sign", "floor", "ceil", "square", "cbrt",
    "exp2", "sinh", "cosh", "real", "imag",
)  # fmt: skip

PRIMITIVES: Mapping[str, Printer] = {
    **dict.fromkeys(INFIX, _infix),
    **{name: function_printer(f"jnp.{name}") for name in JNP_FUNCTIONS},
    **dict.fromkeys(REDUCTION_METHODS, _reduce),
    **{f"reduce_{how}": (lambda e: call(f"lax.{e.name}", e.codes[0], tuple(e["axes"]))) for how in ("and", "or", "xor")},
    "neg": lambda e: prefix("-", e.codes[0]),
    "not": lambda e: prefix("~", e.codes[0]),
    "max": lambda e: call("jnp.maximum", *both_operands(e)),
    "min": lambda e: call("jnp.minimum", *both_operands(e)),
    "pow": lambda e: call("lax.pow", *e.codes),
    "rem": function_printer("lax.rem"),
    "round": lambda e: call("lax.round", e.codes[0], Code(f"lax.RoundingMethod.{e['rounding_method'].name}")),
    "conj": lambda e: call("lax.conj", e.codes[0]),
    "integer_pow": lambda e: call("lax.integer_pow", *e.codes, e["y"]),
    "clamp": function_printer("lax.clamp"),
    "select_n": _select,
    "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast,
    "reduce_precision": function_printer("lax.reduce_precision", "exponent_bits", "mantissa_bits"),
    "copy": function_printer("jnp.copy"),
    "copy_p": function_printer("jnp.copy"),
    "name": _checkpoint_name,
    "layout_constraint": _layout_constraint,
    "optimization_barrier": _barrier,
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "rotate": lambda e: call("jnp.roll", e.codes[0], e["shift"], e["dimension"]),
    "rev": lambda e: call("lax.rev", e.codes[0], tuple(e["dimensions"])),
    "tile": lambda e: call("lax.tile", e.codes[0], tuple(e["reps"])),
    "pad": _pad,
    "concatenate": _concatenate,
    "stack": lambda e: call("lax.stack", sequence(e.codes, "[]"), e["axis"]),
    "unstack": lambda e: call("lax.unstack", e.codes[0], e["axis"]),
    "split": lambda e: call("lax.split", e.codes[0], tuple(e["sizes"]), axis=e["axis"]),
    **INDEXING_PRINTERS,
    "argmax": _arg_reduction,
    "argmin": _arg_reduction,
    "sort": _sort,
    "top_k": lambda e: call("lax.top_k", e.codes[0], e["k"], axis=e["axis"]),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _cumulative),
    "dot_general": _dot,
    "conv_general_dilated": _conv,
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
    **RANDOM_PRINTERS,
    **COMMUNICATION_PRINTERS,
}  # fmt: skip
