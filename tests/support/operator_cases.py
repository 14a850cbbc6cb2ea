"""Applications of every operator in the table, and of what models make of them: name → (function, operands).

Sizes are small and have room for degrees: 6 and 12 for axes of 2 and 3, both on one dimension included. An operand that is
a function makes a random key.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core.primitives import eq_to_p
from jax.extend.random import threefry_2x32
from jax.sharding import PartitionSpec

from unity.pcg.jaxprs.shard_maps.rotation import rotate
from unity.pcg.operators.promised_reads import promised
from unity.pcg.operators.routed_product import routed_dot
from unity.pcg.parallel.marks import constrain

Case = tuple[Callable, tuple]
CASES: dict[str, Case] = {}
RNG = np.random.default_rng(7)


def n(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def pos(*shape: int) -> np.ndarray:
    return RNG.uniform(0.2, 0.8, size=shape)


def ints(limit: int, *shape: int, low: int = 0, dtype: Any = np.int32) -> np.ndarray:
    return RNG.integers(low, limit, shape).astype(dtype)


def bools(*shape: int) -> np.ndarray:
    return RNG.random(shape) < 0.5


def c(*shape: int) -> np.ndarray:
    return n(*shape) + 1j * n(*shape)


def case(name: str, fn: Callable, *args: Any) -> None:
    assert name not in CASES, name
    CASES[name] = (fn, args)


# Elementwise: one operand

UNARY = (
    "abs acosh:2 asinh cbrt ceil cos cosh digamma:+ erf erfc erf_inv:+ exp exp2 expm1 floor lgamma:+ log:+ log1p:+ logistic"
    " bessel_i0e bessel_i1e neg round rsqrt:+ sign sin sinh sqrt:+ square tan:+ tanh is_finite asin:+ acos:+ atan atanh:+"
)
RANGES: dict[str, Callable] = {"": n, "+": pos, "2": lambda *shape: 1.5 + pos(*shape)}
for _name in UNARY.split():
    _op, _colon, _range = _name.partition(":")
    case(_op, getattr(lax, _op), RANGES[_range](4, 6))
case("log2", jnp.log2, pos(4, 6))
case("polynomial", lambda x, a: jnp.polyval(a, x), n(4, 6), n(3))
case("polynomials", jax.vmap(lambda x, a: jnp.polyval(a, x)), n(4, 6), n(4, 3))
case("integer_pow", lambda x: x**3, n(4, 6))
case("pow", lax.pow, pos(4, 6), n(4, 6))
case("pow of a scalar", lambda x, y: lax.pow(x, y), pos(4, 6), np.float64(2.5))
case("integer_pow, negative", lambda x: lax.integer_pow(x, -2), pos(4, 6))
case("not", lax.bitwise_not, ints(9, 4, 6))
case("not of bools", jnp.logical_not, bools(4, 6))
case("population_count and clz", lambda x: (lax.population_count(x), lax.clz(x)), ints(99, 4, 6))
case("copy", lambda x: lax.optimization_barrier(jnp.array(x)), n(4, 6))
case("optimization_barrier of two", lambda x, y: lax.optimization_barrier((x, y)), n(4, 6), n(4, 6))
case("stop_gradient", lambda x: lax.stop_gradient(x) * x, n(4, 6))
case("reduce_precision", lambda x: lax.reduce_precision(x, 8, 10), n(4, 6))
case("frexp and ldexp", lambda x: jnp.ldexp(*jnp.frexp(lax.stop_gradient(x))), n(4, 6))
case("polygamma", lambda x: lax.polygamma(1.0 * jnp.ones_like(x), x), pos(4, 6))

# Elementwise: more operands

for _op in ("add", "sub", "mul", "div", "max", "min", "atan2", "rem"):
    case(_op, getattr(lax, _op), n(4, 6), 2 + pos(4, 6))
for _op in ("eq", "ne", "lt", "le", "gt", "ge"):
    case(_op, getattr(lax, _op), ints(3, 4, 6), ints(3, 4, 6))
for _op in ("add", "sub", "mul", "div", "rem", "max"):
    case(f"{_op} of integers", getattr(lax, _op), ints(50, 4, 6, low=-50), ints(9, 4, 6, low=1))
for _op in ("bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right_logical", "shift_right_arithmetic"):
    case(_op, getattr(lax, _op), ints(99, 4, 6), ints(5, 4, 6))
case("nextafter", lambda x, y: lax.nextafter(lax.stop_gradient(x), lax.stop_gradient(y)), n(4, 6), n(4, 6))
case("igamma", lambda a, x: (lax.igamma(lax.stop_gradient(a), x), lax.igammac(lax.stop_gradient(a), x)), pos(4, 6), pos(4, 6))
case(
    "regularized_incomplete_beta",
    lambda a, b, x: lax.betainc(lax.stop_gradient(a), lax.stop_gradient(b), x),
    pos(4, 6),
    pos(4, 6),
    pos(4, 6),
)
case("add of a scalar", lambda x: x + 3.0, n(4, 6))
case("add of a scalar operand", lambda x, s: x + s, n(4, 6), np.float64(2))
case("add of zero", lambda x: x + 0.0, n(4, 6))
case("mul by a scalar", lambda x: 3.0 * x, n(4, 6))
case("div by a scalar", lambda x: x / 3.0, n(4, 6))
case("div of a scalar", lambda x: 1.0 / x, pos(4, 6))
case("sub of a constant array", lambda x: x - jnp.arange(6.0), n(4, 6))
case("bias", lambda x, b: x + b, n(4, 6), n(6))
case("outer product by broadcasting", lambda x, y: x[:, None] * y[None, :], n(4), n(6))
case("size one", lambda x, y: x * y, n(4, 6), n(1, 6))
case("scalars only", lambda x, y: x * y + 1, np.float64(2), np.float64(3))
case("same value twice", lambda x: x * x + x, n(4, 6))
case("clamp", lax.clamp, n(4, 6) - 1, n(4, 6), n(4, 6) + 1)
case("clamp, scalar bounds", lambda x: lax.clamp(-0.5, x, 0.5), n(4, 6))
case(
    "clamp, scalar operands",
    lambda lo, x, hi: lax.clamp(lax.stop_gradient(lo), x, lax.stop_gradient(hi)),
    np.float64(-0.5),
    n(4, 6),
    np.float64(0.5),
)
case("select_n", lambda p, x, y: lax.select(p, x, y), bools(4, 6), n(4, 6), n(4, 6))
case("select_n of three", lambda p, x, y, z: lax.select_n(p, x, y, z), ints(3, 4, 6), n(4, 6), n(4, 6), n(4, 6))
case("select_n, scalar predicate", lambda p, x, y: lax.select_n(p, x, y), np.bool_(True), n(4, 6), n(4, 6))
case("select_n of bools", lambda p, x, y: lax.select_n(p, x, y), bools(4, 6), bools(4, 6), bools(4, 6))
case("select_n of integers", lambda p, x, y: lax.select_n(p, x, y), bools(4, 6), ints(9, 4, 6), ints(9, 4, 6))
case("where with zeros", lambda p, x: jnp.where(p, x, 0.0), bools(4, 6), n(4, 6))
case("where with ones", lambda p, x: jnp.where(p, x, 1.0), bools(4, 6), n(4, 6))
case("masked mean", lambda p, x: jnp.where(p, x, 0.0).sum(1) / jnp.maximum(p.sum(1), 1), bools(4, 6), n(4, 6))

# Conversions

case(
    "convert to f32 and back",
    lambda x: x.astype(jnp.float32).astype(jnp.float64),
    n(4, 6).astype(np.float32).astype(np.float64),
)
case("convert to bf16", lambda x: x.astype(jnp.bfloat16), n(4, 6).astype(np.float32))
case("convert to integers", lambda x: (3 * x).astype(jnp.int32), n(4, 6))
case("convert from integers", lambda x: x.astype(jnp.float32), ints(9, 4, 6))
case("convert from bools", lambda x: x.astype(jnp.float32) * 2, bools(4, 6))
case("convert to bools", lambda x: x.astype(bool), ints(2, 4, 6))
case("convert to complex", lambda x: x.astype(jnp.complex128) * 2j, n(4, 6))
case("convert to small integers", lambda x: x.astype(jnp.int8), ints(9, 4, 6))
case("bitcast, same width", lambda x: lax.bitcast_convert_type(x, jnp.int64), n(4, 6))
case("bitcast, narrower", lambda x: lax.bitcast_convert_type(x, jnp.uint32), n(4, 6))
case("bitcast, wider", lambda x: lax.bitcast_convert_type(x, jnp.int64), ints(99, 4, 6, 2))
case("bitcast, square", lambda x: lax.bitcast_convert_type(x, jnp.int64), ints(99, 4, 2, 2))

# Complex and narrow floats

case("complex", lax.complex, n(4, 6), n(4, 6))
case("real, imag and conj", lambda x: lax.real(x) + lax.imag(lax.conj(x)), c(4, 6))
case("real", lax.real, c(4, 6))
case("imag", lax.imag, c(4, 6))
case("conj", lambda x: lax.conj(x), c(4, 6))
case("complex product", lambda x, y: x * y, c(4, 6), c(4, 6))
case("complex matmul", lambda x, y: x @ y, c(4, 6), c(6, 4))
case("complex absolute value", lambda x: jnp.abs(x) ** 2, c(4, 6))
case("rotary, complex", lambda x, f: jnp.real(lax.complex(x[..., ::2], x[..., 1::2]) * jnp.exp(1j * f)), n(4, 6, 4), n(6, 2))
case("bf16 matmul", lambda x, y: x @ y, n(4, 6).astype(ml_dtypes.bfloat16), n(6, 4).astype(ml_dtypes.bfloat16))
case(
    "bf16 compute",
    lambda x, y: (x.astype(jnp.bfloat16) * y).astype(jnp.float32),
    n(4, 6).astype(np.float32),
    n(4, 6).astype(ml_dtypes.bfloat16),
)
case("float8", lambda x: x.astype(jnp.float8_e4m3fn).astype(jnp.float32), n(4, 6).astype(np.float32))

# Products


def dot(contract: Any, batch: Any = ((), ()), **kwargs: Any) -> Callable:
    return partial(lax.dot_general, dimension_numbers=(contract, batch), **kwargs)


case("dot_general", lambda x, y: x @ y, n(4, 6), n(6, 12))
case("dot_general, batch", dot(((2,), (1,)), ((0,), (0,))), n(6, 2, 4), n(6, 4, 3))
case("dot_general, batch in other places", dot(((0,), (2,)), ((1, 3), (1, 0))), n(4, 6, 3, 2), n(2, 6, 4, 3))
case("dot_general, several contracted", dot(((1, 2), (0, 1))), n(4, 6, 2), n(6, 2, 3))
case("dot_general, several contracted, other order", dot(((2, 0), (0, 2))), n(4, 3, 6), n(6, 2, 4))
case("dot_general, none contracted", dot(((), ())), n(4, 6), n(2, 3))
case("dot_general, none contracted, batch", dot(((), ()), ((0,), (0,))), n(6, 4), n(6, 2))
case("dot_general, vectors", dot(((0,), (0,))), n(12), n(12))
case(
    "dot_general, preferred type",
    dot(((1,), (0,)), preferred_element_type=jnp.float64),
    n(4, 6).astype(np.float32),
    n(6, 4).astype(np.float32),
)
case("dot_general, integers", lambda x, y: x @ y, ints(9, 4, 6), ints(9, 6, 4))
case("dot_general, bools", lambda x, y: x @ y, np.eye(4, 6) > 0, np.eye(6, 4) > 0)
case("einsum", lambda x, w: jnp.einsum("bsd,dhk->bhsk", x, w), n(2, 6, 4), n(4, 2, 3))
case("matmul with bias and relu", lambda x, w, b: jax.nn.relu(x @ w + b), n(4, 6), n(6, 12), n(12))
case("matmul with itself", lambda x: x @ x.T, n(4, 6))
case("function of a sum", lambda x, y, b: jnp.tanh(x + y + b), n(12, 8), n(12, 8), n(8))  # scattered, if x and y are partial sums
case("mean of a function of a sum", lambda x, y: (jax.nn.relu(x + y) ** 2).mean(), n(12, 8), n(12, 8))
case("functions of two sums", lambda x, y, z: jnp.tanh(x + y) * jnp.exp(y + z).sum(1, keepdims=True), n(12, 8), n(12, 8), n(12, 8))


def conv(strides: Any, padding: Any, numbers: Any = None, **kwargs: Any) -> Callable:
    return lambda x, k: lax.conv_general_dilated(x, k, strides, padding, dimension_numbers=numbers, **kwargs)


NHWC = ("NHWC", "HWIO", "NHWC")
case("conv, 1-D", conv((1,), "SAME"), n(6, 2, 8), n(6, 2, 3))
case("conv, 2-D", conv((1, 1), "SAME", NHWC), n(6, 4, 4, 2), n(3, 3, 2, 6))
case("conv, stride", conv((2, 2), "VALID"), n(6, 2, 6, 6), n(4, 2, 3, 3))
case("conv, dilation", conv((1, 1), [(2, 2), (2, 2)], rhs_dilation=(2, 2)), n(2, 6, 5, 5), n(6, 6, 3, 3))
case("conv, transposed", conv((1, 1), [(1, 1), (1, 1)], lhs_dilation=(2, 2)), n(2, 2, 3, 3), n(6, 2, 3, 3))
case("conv, 3-D", conv((1, 1, 1), "SAME"), n(2, 2, 3, 3, 3), n(6, 2, 2, 2, 2))
case("conv, groups", conv((1, 1), "SAME", NHWC, feature_group_count=6), n(2, 4, 4, 12), n(2, 2, 2, 12))
case("conv, depthwise", conv((1, 1), "SAME", feature_group_count=6), n(2, 6, 4, 4), n(6, 1, 3, 3))
case("conv, groups, many channels in each", conv((1,), "SAME", feature_group_count=2), n(2, 12, 5), n(12, 6, 3))
case("conv, other dimension numbers", conv((1, 1), "SAME", ("CNHW", "OHWI", "HNWC")), n(2, 6, 4, 4), n(6, 3, 3, 2))
case("conv, batch groups", conv((1,), "SAME", batch_group_count=2), n(4, 2, 6), n(6, 2, 3))
case("conv, patches", conv((2, 2), "VALID", NHWC), n(6, 4, 4, 2), n(2, 2, 2, 6))

# Reductions

for _op in ("sum", "max", "min", "prod", "mean", "var"):
    case(f"{_op} over one dimension", lambda x, op=_op: getattr(jnp, op)(x, axis=1), n(4, 6))
for _op in ("sum", "max"):
    case(f"{_op} over all", lambda x, op=_op: lax.stop_gradient(getattr(jnp, op)(x)) if op == "max" else jnp.sum(x), n(4, 6))
case("sum over two dimensions", lambda x: x.sum((0, 2)), n(4, 6, 3))
case("sum of integers", lambda x: x.sum(0), ints(9, 4, 6))
case("sum of bf16", lambda x: x.sum(0), n(4, 6).astype(ml_dtypes.bfloat16))
case("max reduction of integers", lambda x: x.max(0), ints(99, 4, 6, low=-99))
case("min reduction of integers", lambda x: x.min(0), ints(99, 4, 6, low=-99))
case("any and all", lambda x: (x.any(1), x.all(1)), bools(4, 6))
case("any, and with another", lambda x, y: x.any(1) & y, bools(4, 6), bools(4))
case("all, over all", lambda x: x.all(), bools(4, 6))
case("any and all, bit by bit", lambda x: (lax.reduce_or(x, (0,)), lax.reduce_and(x, (1,))), ints(99, 4, 6))
case("xor", lambda x: lax.reduce_xor(x, (1,)), ints(99, 4, 6))
case("count of bools", lambda x: x.sum(1), bools(4, 6))
case("argmax", lambda x: jnp.argmax(x, 1), n(4, 6))
case("argmin", lambda x: jnp.argmin(x, 0), n(4, 6))
case("accuracy", lambda x, y: (jnp.argmax(x, 1) == y).mean(), n(6, 4), ints(4, 6))
case("reduce, a maximum", lambda x: lax.reduce(x, jnp.asarray(-jnp.inf, x.dtype), lax.max, (1,)), n(4, 6))
case("reduce, own function, differentiated", lambda x: lax.reduce(x, 0.0, lambda a, b: a + b + 0.1 * a * b, (1,)), n(4, 6))
case("reduce, own function", lambda x: lax.reduce(lax.stop_gradient(x), 0.0, lambda a, b: a + b, (1,)), n(4, 6))
case("norm of all", lambda x: jnp.sqrt(jnp.sum(x * x)), n(4, 6))
case("sum, then a product", lambda x, y: x.sum(0) * y, n(4, 6), n(6))
case("sum of two partial sums", lambda x, y, w: x @ w + y @ w, n(4, 6), n(4, 6), n(6, 3))
case("partial sum plus bias", lambda x, w, b: x @ w + b, n(4, 6), n(6, 4), n(4))
for _op in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
    case(_op, lambda x, op=_op: getattr(lax, op)(x, axis=1), n(4, 6))
case("cumsum, reversed", lambda x: lax.cumsum(x, axis=0, reverse=True), n(4, 6))
case("cumsum of integers", lambda x: jnp.cumsum(x, 1), ints(9, 4, 6))
case("sort", lambda x: lax.sort(x, dimension=1), n(4, 6))
case("sort, several", lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), n(4, 6), n(4, 6))
case("argsort", lambda x: jnp.argsort(x, axis=1), n(4, 6))
case("top_k", lambda x: lax.top_k(x, 2), n(4, 6))
case("top_k of one dimension", lambda x: lax.top_k(x, 3), n(6))
case("approx_top_k", lambda x: lax.approx_max_k(x, 2), n(4, 6))
case("approx_top_k of columns", lambda x: lax.approx_min_k(x, 2, reduction_dimension=0), n(4, 6))

# Windows

case("max pooling", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), n(6, 4, 4, 2))
case("average pooling", lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1, 3, 3), (1, 1, 1, 1), "SAME") / 9, n(2, 6, 4, 4))
case("min pooling", lambda x: lax.reduce_window(x, jnp.inf, lax.min, (1, 3), (1, 1), "SAME"), n(6, 4))
case("pooling, dilated", lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID", window_dilation=(1, 2)), n(6, 5))
case(
    "pooling, base dilated",
    lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 1), "VALID", base_dilation=(2, 1)),
    n(6, 4),
)
case("pooling, own function", lambda x: lax.reduce_window(lax.stop_gradient(x), 1.0, lax.mul, (1, 2), (1, 1), "VALID"), pos(6, 4))
case("pooling of complex numbers", lambda x: lax.reduce_window(x, 0j, lax.add, (1, 3), (1, 1), "SAME"), c(4, 6))
case(
    "pooling of two",
    lambda x, y: lax.reduce_window(
        (x, y), (jnp.int32(0), jnp.int32(0)), lambda a, b: (a[0] + b[0], a[1] + b[1]), (1, 2), (1, 1), "VALID"
    ),
    ints(9, 6, 4),
    ints(9, 6, 4),
)

# Moving elements about

case("broadcast", lambda x: jnp.broadcast_to(x[:, None], (4, 6, 3)), n(4, 3))
case("broadcast of size one", lambda x: jnp.broadcast_to(x, (4, 6)), n(1, 6))
case("broadcast of a scalar", lambda x: jnp.broadcast_to(x, (4, 6)), np.float64(2))
case("expand and squeeze", lambda x: lax.squeeze(lax.expand_dims(x, (1,)), (2,)), n(4, 1, 6))
case("transpose", lambda x: x.transpose(2, 0, 1), n(4, 6, 3))
case("rotate", lambda x: rotate(x, 1, 0), n(12, 6))
case("rotate backwards", lambda x: rotate(x, -2, 1), n(4, 12))
case("rotate by more than a slice", lambda x: rotate(x, 5, 0), n(12, 2))
case("rev", lambda x: lax.rev(x, (1,)), n(4, 6))
case("reshape, merge", lambda x: x.reshape(24, 3), n(4, 6, 3))
case("reshape, split", lambda x: x.reshape(4, 6, 3), n(24, 3))
case("reshape, heads", lambda x: x.reshape(2, 6, 4, 3), n(2, 6, 12))
case("reshape, heads to rows", lambda x: x.reshape(12, 6), n(2, 36))
case("reshape, [6, 4] to [4, 6]", lambda x: x.reshape(4, 6), n(6, 4))
case("reshape, [12] to [4, 3] to [6, 2]", lambda x: jnp.sin(x.reshape(4, 3)).reshape(6, 2), n(12))
case("reshape, [2, 12] to [6, 4]", lambda x: x.reshape(6, 4), n(2, 12))
case("reshape, with ones", lambda x: x.reshape(1, 4, 1, 6, 1), n(4, 6))
case("reshape, all in one", lambda x: x.reshape(-1), n(4, 6, 2))
case("reshape there and back", lambda x: jnp.sin(x.reshape(24)).reshape(4, 6), n(4, 6))
case("reshape and transpose", lambda x: x.reshape(2, 6, 2, 6).transpose(0, 2, 1, 3), n(2, 6, 12))
case("windows", lambda x: x.reshape(2, 2, 3, 2, 3, 4).transpose(0, 1, 3, 2, 4, 5).reshape(8, 9, 4), n(2, 6, 6, 4))
case("slice", lambda x: x[1:3, :], n(4, 6))
case("slice, half", lambda x: x[:, 6:], n(4, 12))
case("slice, third", lambda x: x[:, 4:8], n(4, 12))
case("slice, strided", lambda x: x[:, ::2], n(4, 12))
case("slice, strided from the second", lambda x: x[1::2, 2::3], n(4, 12))
case("slice, interleaved", lambda x: x[:, ::2] * x[:, 1::2], n(4, 12))
case("slice, one element", lambda x: x[2], n(4, 6))
case("slice, without elements", lambda x: lax.slice(x, (0, 0), (2, 0)), n(4, 0))
case("slice, halves multiplied", lambda x: x[:, :6] * jax.nn.sigmoid(x[:, 6:]), n(4, 12))
case("split", lambda x: jnp.split(x, 3, axis=1), n(4, 18))
case("split, lax", lambda x: lax.split(x, (6, 6), axis=1), n(4, 12))
case("split, unequal", lambda x: lax.split(x, (2, 4), axis=1), n(4, 6))
case("concatenate", lambda x, y: jnp.concatenate([x, y], 1), n(4, 6), n(4, 6))
case("concatenate, unequal", lambda x, y: jnp.concatenate([x, y], 1), n(4, 6), n(4, 3))
case("concatenate, three", lambda x, y, z: jnp.concatenate([x, y, z], 0), n(6, 2), n(6, 2), n(6, 2))
case("concatenate with zeros", lambda x: jnp.concatenate([x, jnp.zeros((4, 6))], 1), n(4, 6))
case("rotate half", lambda x: jnp.concatenate([-x[..., 6:], x[..., :6]], -1), n(4, 12))
case("stack", lambda x, y: jnp.stack([x, y], 1), n(4, 6), n(4, 6))
case("tile", lambda x: jnp.tile(x, (2, 1)), n(4, 6))
case("repeat", lambda x: jnp.repeat(x, 2, axis=1), n(4, 6))
case("pad", lambda x: jnp.pad(x, ((0, 0), (1, 2))), n(4, 6))
case("pad, value operand", lambda x, v: lax.pad(x, v, ((0, 0, 0), (1, 0, 1))), n(4, 6), np.float64(3))
case("pad with ones", lambda x: lax.pad(x, 1.0, ((0, 0, 0), (1, 0, 0))), n(4, 6))
case("pad, negative", lambda x: lax.pad(x, 0.0, ((0, 0, 0), (-1, -2, 0))), n(4, 6))
case("roll", lambda x: jnp.roll(x, 2, 1), n(4, 6))
case("iota", lambda x: x + lax.broadcasted_iota(jnp.float64, (4, 6), 1), n(4, 6))
case("arange, compared", lambda x, k: jnp.where(jnp.arange(6) < k[:, None], x, 0.0), n(4, 6), ints(6, 4))
case("causal mask", lambda x: jnp.where(jnp.tril(jnp.ones((6, 6), bool)), x, -1e9), n(2, 6, 6))
case("eye", lambda x: x + jnp.eye(6), n(6, 6))
case("constant result", lambda x: (x * 2, jnp.zeros(4)), n(4, 6))

# Indexing

case("embedding", lambda t, i: t[i], n(12, 6), ints(12, 4, 3))
case("embedding, clipped", lambda t, i: jnp.take(t, i, axis=0, mode="clip"), n(12, 2), ints(15, 4, 3, low=-3))
case("embedding, filled", lambda t, i: jnp.take(t, i, axis=0, mode="fill"), n(12, 2), ints(15, 6))
case("embedding, filled with zeros", lambda t, i: t.at[i].get(mode="fill", fill_value=0), n(12, 2), ints(15, 6))
case("embedding, filled with ones", lambda t, i: t.at[i].get(mode="fill", fill_value=1), n(12, 2), ints(15, 6))
case("embedding, promised", lambda t, i: t.at[i].get(mode="promise_in_bounds"), n(12, 2), ints(12, 6))
case("embedding, promised, out of range", lambda t, i: t[i], n(12, 2), np.array([0, 11, 12, -13, 40, -1, 5, 2**31 - 1], np.int32))
case("rows of promised indices", lambda x, i: promised(x, i, 12), n(4, 6, 2), np.arange(-6, 18, dtype=np.int32).reshape(4, 6))
case("embedding, 64-bit indices", lambda t, i: t[i], n(12, 2), ints(12, 6, dtype=np.int64))
case("embedding, unsigned indices", lambda t, i: jnp.take(t, i, axis=0, mode="clip"), n(12, 2), ints(15, 6, dtype=np.uint8))
case("embedding, columns", lambda t, i: jnp.take(t, i, axis=1), n(4, 12), ints(12, 6))
case("embedding of integers", lambda t, i: t[i], ints(99, 12, 2), ints(12, 6))
case("embedding of integers, filled", lambda t, i: jnp.take(t, i, axis=0, mode="fill"), ints(99, 12, 2), ints(15, 6))
case("embedding of bools", lambda t, i: t[i], bools(12, 2), ints(12, 6))
case("embedding of bools, filled", lambda t, i: jnp.take(t, i, axis=0, mode="fill"), bools(12, 2), ints(15, 6))
case("embedding, then a product", lambda t, i, w: t[i] @ w, n(12, 4), ints(12, 6), n(4, 2))
case("take_along_axis", lambda x, i: jnp.take_along_axis(x, i, 1), n(4, 6), ints(6, 4, 6))
case("take_along_axis, one", lambda x, i: jnp.take_along_axis(x, i[:, None], 1)[:, 0], n(6, 4), ints(4, 6))
case("take_along_axis, three dimensions", lambda x, i: jnp.take_along_axis(x, i, 1), n(2, 6, 4), ints(6, 2, 4, 4))
case("gather of pairs", lambda x, i, j: x[i, j], n(4, 6, 2), ints(4, 6), ints(6, 6))
case("gather of pairs, filled", lambda x, i, j: x.at[i, j].get(mode="fill", fill_value=0), n(4, 6), ints(6, 6), ints(8, 6))
case(
    "gather of windows",
    lambda x, i: jax.vmap(lambda k: lax.dynamic_slice(x, (k, jnp.int32(0)), (2, 6)))(i),
    n(4, 6),
    ints(3, 6),
)
case(
    "gather of pairs, out of range",
    lambda x, i, j: x[i, j],
    n(4, 6),
    np.array([0, 4, -5, 3, 1, 1], np.int32),
    np.array([6, 1, 2, -7, 0, 5], np.int32),
)
case("gather, vmapped rows", lambda x, i: jax.vmap(lambda a, k: a[k])(x, i), n(6, 4), ints(4, 6))
case("labels", lambda x, y: -jax.nn.log_softmax(x)[jnp.arange(6), y].mean(), n(6, 4), ints(4, 6))
case("one_hot", lambda i: jax.nn.one_hot(i, 12), ints(12, 6))
case("array that is written in", lambda x: jnp.maximum(x * np.arange(1.0, 9.0), np.arange(12.0)[:, None]), n(12, 8))
case("one_hot, contracted", lambda i, w: jax.nn.one_hot(i, 6) @ w, ints(6, 4), n(6, 2))
case("scatter-add", lambda x, i, u: x.at[i].add(u), n(12, 2), ints(12, 6), n(6, 2))
case("scatter-add into zeros", lambda i, u: jnp.zeros((4, 2)).at[i].add(u), ints(4, 6), n(6, 2))
case("scatter-add, out of bounds", lambda x, i, u: x.at[i].add(u, mode="drop"), n(4, 2), ints(6, 6), n(6, 2))
case(
    "scatter-add, promised, out of bounds",
    lambda x, i, u: x.at[i].add(u, mode="promise_in_bounds"),
    n(4, 2),
    np.array([0, 4, -5, 3, 9, -1], np.int32),
    n(6, 2),
)
case(
    "scatter-add, clipped", lambda x, i, u: x.at[i].add(u, mode="clip"), n(4, 2), np.array([0, 4, -5, 3, 9, -1], np.int32), n(6, 2)
)
case("scatter-add, windows", lambda x, i, u: x.at[:, i].add(u), n(6, 4), ints(4, 6), n(6, 6))
case("scatter-add of integers", lambda i: jnp.zeros(4, jnp.int32).at[i].add(1), ints(4, 6))
case("segment_sum", lambda u, i: jax.ops.segment_sum(u, i, 4), n(6, 2), ints(4, 6))
case("segment_max", lambda u, i: jax.ops.segment_max(lax.stop_gradient(u), i, 4), n(6, 2), np.array([0, 1, 2, 3, 0, 1]))
case("scatter", lambda x, i, u: x.at[i].set(u), n(12, 6), np.array([3, 1, 5, 7, 0, 2]), n(6, 6))
case(
    "scatter, of what a function makes of what is there",
    lambda x, i: lax.stop_gradient(x).at[i].apply(lambda v: 3 * v + 1),
    n(6, 4),
    np.array([0, 5]),
)
case("scatter, columns", lambda x, i, u: x.at[:, i].set(u), n(6, 4), np.array([3, 1]), n(6, 2))
case("scatter, one column of each row", lambda x, i, u: x.at[jnp.arange(6), i].set(u, mode="clip"), n(6, 4), ints(6, 6), n(6))
case("scatter-mul", lambda x, i, u: x.at[i].multiply(u, unique_indices=True), n(12, 6), np.array([3, 1, 5, 7, 0, 2]), n(6, 6))
case("scatter-max", lambda x, i, u: lax.stop_gradient(x.at[i].max(u)), n(4, 6), ints(4, 6), n(6, 6))
case("scatter-min", lambda x, i, u: lax.stop_gradient(x.at[i].min(u)), n(4, 6), ints(4, 6), n(6, 6))
case("scatter, vmapped", lambda x, i, u: jax.vmap(lambda a, k, b: a.at[k].set(b))(x, i, u), n(6, 4), ints(4, 6), n(6))
case("scatter-add, vmapped", lambda x, i, u: jax.vmap(lambda a, k, b: a.at[k].add(b))(x, i, u), n(6, 4), ints(4, 6, 3), n(6, 3))
case("gradient of an embedding", lambda t, i, g: jax.vjp(lambda t: t[i], t)[1](g)[0], n(12, 2), ints(12, 6), n(6, 2))
case("dynamic_slice", lambda x, k: lax.dynamic_slice(x, (k, jnp.int32(0)), (2, 6)), n(4, 6), np.int32(1))
case("dynamic_slice in dim", lambda x, k: lax.dynamic_index_in_dim(x, k, 0, keepdims=False), n(4, 6), np.int32(3))
case("dynamic_update_slice", lambda x, u, k: lax.dynamic_update_slice(x, u, (k, jnp.int32(0))), n(4, 6), n(2, 6), np.int32(1))

# Random numbers: the same bits as the whole operator draws


def key(seed: int = 0, count: int = 0, impl: str = "threefry2x32") -> Callable:
    def make() -> jax.Array:
        k = jax.random.key(seed, impl=impl)
        return jax.random.split(k, count) if count else k

    return make


case("random bits", lambda k: jax.random.bits(k, (4, 6)), key())
case("random uniform", lambda k: jax.random.uniform(k, (4, 6), jnp.float64), key(1))
case("random normal", lambda k: jax.random.normal(k, (4, 6), jnp.float32), key(2))
case("random integers", lambda k: jax.random.randint(k, (4, 6), 0, 9), key(3))
case("random categorical", lambda k, x: jax.random.categorical(k, x), key(3), n(6, 4))
case("random, raw key", lambda k: jax.random.uniform(k, (4, 6)), np.array([1, 2], np.uint32))
case("random, rbg", lambda k: jax.random.uniform(k, (4, 6)), key(4, impl="rbg"))
case("random, vmapped keys", lambda k: jax.vmap(lambda k: jax.random.normal(k, (4,)))(k), key(5, count=6))
case("random, vmapped raw keys", lambda k: jax.vmap(lambda k: jax.random.normal(k, (4,)))(k), ints(99, 6, 2, dtype=np.uint32))
case("random split", lambda k: jax.random.split(k, 6), key(6))
case("random split, raw", lambda k: jax.random.split(k, 6), np.array([1, 2], np.uint32))
case("random split, vmapped", lambda k: jax.vmap(lambda k: jax.random.split(k, 4))(k), key(6, count=6))
case("random fold_in", lambda k, i: jax.random.fold_in(k, i), key(7), np.uint32(3))
case("random fold_in, vmapped", lambda k, i: jax.vmap(jax.random.fold_in)(k, i), key(7, count=6), ints(9, 6, dtype=np.uint32))
case("random seed", lambda s: jax.random.key_data(jax.vmap(jax.random.key)(s)), ints(99, 6, dtype=np.uint32))
case("random clone and data", lambda k: jax.random.key_data(jax.random.clone(k)), key(8, count=6))
case("random, gathered keys", lambda k, i: jax.random.key_data(k[i]), key(8, count=12), ints(12, 6))
case("random permutation", lambda k, x: jax.random.permutation(k, x), key(9), n(6, 2))
case("threefry itself", lambda k, x: threefry_2x32(k, x), np.array([1, 2], np.uint32), ints(99, 12, dtype=np.uint32))
case("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (4, 6)), np.array([1, 2, 3, 4], np.uint32))
case("dropout", lambda x, k: jnp.where(jax.random.bernoulli(k, 0.7, x.shape), x / 0.7, 0.0), n(4, 6), key(10))
case(
    "dropout, raw key",
    lambda x, k: jnp.where(jax.random.bernoulli(k, 0.7, x.shape), x / 0.7, 0.0),
    n(4, 6),
    np.array([7, 8], np.uint32),
)
case("dropout of some dimensions", lambda x, k: x * jax.random.bernoulli(k, 0.7, (4, 1, 6)), n(4, 6, 6), key(11))

# Composites


def layer_norm(x: Any, g: Any, b: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5) * g + b


def batch_norm(x: Any, g: Any, b: Any) -> Any:
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / jnp.sqrt(var + 1e-5) * g + b, mean, var


def group_norm(x: Any, g: Any) -> Any:
    y = x.reshape(*x.shape[:-1], 2, -1)
    mean, var = y.mean((1, 3), keepdims=True), y.var((1, 3), keepdims=True)
    return ((y - mean) * lax.rsqrt(var + 1e-5)).reshape(x.shape) * g


def attention(q: Any, k: Any, v: Any) -> Any:
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
    s = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), s, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)


case("softmax", jax.nn.softmax, n(4, 6))
case("softmax, masked", lambda x, m: jax.nn.softmax(x, where=m), n(4, 6), np.tile([True, False, True], (4, 2)))
case("log_softmax", jax.nn.log_softmax, n(4, 6))
case("cross entropy", lambda x, y: -(jax.nn.log_softmax(x) * y).sum(-1).mean(), n(4, 6), pos(4, 6))
case("logsumexp", lambda x: jax.scipy.special.logsumexp(x, axis=1), n(4, 6))
case("layer norm", layer_norm, n(4, 6), n(6), n(6))
case("batch norm", batch_norm, n(6, 2, 2, 6), n(6), n(6))
case("group norm", group_norm, n(2, 3, 12), n(12))
case("RMS norm", lambda x, g: x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g, n(4, 6), n(6))
case("attention", attention, n(2, 6, 6, 2), n(2, 6, 6, 2), n(2, 6, 6, 2))
case(
    "attention, grouped",
    lambda q, k: jnp.einsum("bqgrd,bkgd->bgrqk", q.reshape(2, 4, 6, 2, 3), k),
    n(2, 4, 12, 3),
    n(2, 4, 6, 3),
)
case("cosine similarity", lambda x, y: (x * y).sum(-1) / jnp.sqrt((x * x).sum(-1) * (y * y).sum(-1)), n(4, 6), n(4, 6))
case("contrastive", lambda x, y: jnp.diagonal(jax.nn.log_softmax(x @ y.T)).mean(), n(6, 4), n(6, 4))
for _op in ("relu", "silu", "gelu", "relu6", "softplus", "elu", "leaky_relu", "log_sigmoid", "hard_swish", "glu"):
    case(_op, getattr(jax.nn, _op), n(4, 6))
case("gelu, exact", partial(jax.nn.gelu, approximate=False), n(4, 6))
case("dot product attention", jax.nn.dot_product_attention, n(2, 6, 6, 2), n(2, 6, 6, 2), n(2, 6, 6, 2))

# Custom derivatives


@jax.custom_vjp
def scaled(x: Any, w: Any) -> Any:
    return jnp.sin(x) * w


scaled.defvjp(lambda x, w: (scaled(x, w), (x, w)), lambda r, g: (2 * g * jnp.cos(r[0]) * r[1], (g * jnp.sin(r[0])).sum(0)))


@jax.custom_vjp
def chosen(x: Any, i: Any) -> Any:
    return x * (i > 1)


chosen.defvjp(lambda x, i: (chosen(x, i), i), lambda i, g: (3 * g * (i > 1), None))


@jax.custom_vjp
def straight_through(x: Any) -> Any:
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


@jax.custom_vjp
def total(x: Any, w: Any) -> Any:
    return x @ w


total.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.maximum(1.0, jnp.sqrt((g * g).sum())),))


@jax.custom_jvp
def bounded(x: Any, y: Any) -> Any:
    return jnp.tanh(x) * y


@bounded.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x, y), (dx, dy) = primals, tangents
    return bounded(x, y), 2 * dx * y + jnp.tanh(x) * dy


@jax.custom_vjp
def turned(x: Any, y: Any) -> Any:
    return x, y


turned.defvjp(lambda x, y: ((x, y), None), lambda _, g: (-g[0], 3 * g[1]))


@jax.custom_jvp
def doubled(x: Any) -> Any:
    return x


doubled.defjvps(lambda dx, ans, x: 2 * dx)

case("custom_vjp", scaled, n(4, 6), n(6))
case("custom_vjp, gradients of two turned", turned, n(4, 6), n(4))
case("custom_jvp, gradients doubled", doubled, n(4, 6))
case("custom_vjp, integer operand", chosen, n(4, 6), ints(4, 4, 6))
case("custom_vjp, straight through", straight_through, n(4, 6))
case("custom_vjp, reduction", total, n(4, 6), n(6, 2))
case("custom_vjp, same value twice", lambda x: total(x, x), n(6, 6))
case("custom_vjp, not linear in the cotangent", clipped, n(4, 6))
case(
    "custom_vjp, not linear, in remat and scan",
    lambda x: lax.scan(lambda c, r: (c + jax.checkpoint(clipped)(r), r), jnp.zeros(6), x),
    n(4, 6),
)
case("custom_jvp", bounded, n(4, 6), n(4, 6))
case("custom_jvp, same value twice", lambda x: bounded(x, x), n(4, 6))
case("custom_jvp, in a composite", lambda x, w: bounded(x @ w, jax.nn.relu(x @ w)), n(4, 6), n(6, 2))

# Control flow and rematerialization


def recurrent(x: Any, h: Any, w: Any) -> Any:
    return lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h), h, x)


case("scan", recurrent, n(3, 6, 4), n(6, 4), n(4, 4))
case("scan, sums", lambda x: lax.scan(lambda s, x: (s + x, s), jnp.zeros(6), x), n(4, 6))
case("scan, reversed", lambda x: lax.scan(lambda s, x: (0.5 * s + x, s * x), jnp.ones(6), x, reverse=True), n(4, 6))
case("scan, no carry", lambda x, w: lax.scan(lambda _, x: ((), jnp.sin(x) * w), (), x)[1], n(4, 6), n(6))
case("scan, of no steps", lambda x: lax.scan(lambda s, x: (s + x, s), x, np.zeros((0, 4, 6))), n(4, 6))
case("map", lambda x: lax.map(lambda r: jnp.exp(r).sum(), x), n(4, 6))
case(
    "while",
    lambda x: lax.stop_gradient(lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x)))[1],
    n(4, 6),
)
case("while, on the data", lambda x: lax.while_loop(lambda c: c.sum() < 90, lambda c: c + 1, x), ints(3, 4, 6))
case(
    "while, its rows end apart",
    jax.vmap(
        lambda x, k, w: lax.stop_gradient(lax.while_loop(lambda c: c[0] < k, lambda c: (c[0] + 1, c[1] @ w), (0, x)))[1],
        (0, 0, None),
    ),
    n(4, 6),
    ints(5, 4),
    n(6, 6),
)


def until_all_are_done(x: Any, k: Any) -> Any:
    """The rows are the second dimension of what goes round."""

    def step(carry: Any) -> Any:
        x, left, done = carry
        left = jnp.where(done, left, left - 1)
        return jnp.where(done[None, :], x, 2 * x), left, done | (left <= 0)

    return lax.stop_gradient(lax.while_loop(lambda c: ~jnp.all(c[2]), step, (x, k, k <= 0)))[0]


case("while, until all rows are done", until_all_are_done, n(4, 6), ints(5, 6))


def counted(x: Any, k: Any) -> Any:
    """All rows take as many steps as any needs, and these are counted."""

    def step(carry: Any) -> Any:
        x, left, steps = carry
        return 2 * x, left - 1, steps + 1

    x, _, steps = lax.while_loop(lambda c: jnp.any(c[1] > 0) & (c[2] < 9), step, (lax.stop_gradient(x), k, 0))
    return x, steps


case("while, its steps are counted", counted, n(4, 6), ints(5, 4))
case("while, until the largest is there", lambda x: lax.while_loop(lambda c: c.max() < 9, lambda c: c + c, x), ints(3, 4, 6))
case(
    "while, with what rows are compared to",
    lambda x, k: lax.while_loop(lambda c: (c < k).any(), lambda c: c + 1, x),
    ints(3, 4),
    ints(5, 4),
)
case("fori", lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.sin(y) * 2, x), n(4, 6))
case("cond", lambda p, x, y: lax.cond(p, lambda x, y: x * y, lambda x, y: x - y, x, y), np.bool_(True), n(4, 6), n(4, 6))
case("switch", lambda i, x: lax.switch(i, [jnp.sin, jnp.cos, lambda x: x * 0 + 1], x), np.int32(1), n(4, 6))
case(
    "cond, a given number",
    lambda p, x, y: lax.cond(p, lambda x, y: (x, y), lambda x, y: (x * 2, y), x, y),
    np.bool_(True),
    n(4, 6),
    n(),
)
case("cond, reductions", lambda p, x: lax.cond(p, lambda x: x.sum(1), lambda x: x.max(1) * 0, x), np.bool_(True), n(4, 6))
case("remat", jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w))), n(4, 6), n(6, 2))
case("remat, policy", jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)), policy=jax.checkpoint_policies.dots_saveable), n(4, 6))
case(
    "remat, random",
    jax.checkpoint(lambda x, k: jnp.where(jax.random.bernoulli(k, 0.5, x.shape), jnp.sin(x), 0.0)),
    n(4, 6),
    key(12),
)


def igamma_gradient(a: Any, x: Any) -> Any:
    return jax.grad(lambda a: lax.igamma(a, x).sum())(a)


def max_pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")


# Gradients in the function itself, and what they bring with them

case("gradient of max pooling", lambda x: jax.grad(lambda x: (max_pool(x) * jnp.arange(1.0, 3.0)).sum())(x), n(6, 4))
case("tangent of max pooling", lambda x, t: jax.jvp(max_pool, (x,), (lax.stop_gradient(t),))[1], n(6, 4), n(6, 4))
case("gradient of two uses", lambda x, g: jax.vjp(lambda x: jnp.sin(x) * jnp.exp(x), x)[1](g)[0], n(4, 6), n(4, 6))
case("gradient of igamma", lambda a, x: igamma_gradient(lax.stop_gradient(a), lax.stop_gradient(x)), pos(4, 6), pos(4, 6))
case("zeta", lambda x, q: lax.zeta(lax.stop_gradient(x), lax.stop_gradient(q)), 2 + pos(4, 6), pos(4, 6))
case(
    "names",
    jax.checkpoint(
        lambda x: checkpoint_name(jnp.sin(x), "sine") ** 2, policy=jax.checkpoint_policies.save_only_these_names("sine")
    ),
    n(4, 6),
)
case(
    "sharding constraint",
    lambda x: lax.with_sharding_constraint(x * 2, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
    n(4, 6),
)
case("constrain", lambda x: constrain(jnp.sin(x), PartitionSpec(None, "device")) * 2, n(4, 6))
case("device_put", lambda x: jax.device_put(x * 2), n(4, 6))
case("unstack", lambda x: jnp.unstack(x, axis=1), n(4, 2, 6))
case("tile of both", lambda x: jnp.tile(x, (2, 3)), n(4, 6))
case("scatter-sub", lambda x, i, u: x.at[i].subtract(u), n(12, 2), ints(12, 6), n(6, 2))
case(
    "reduce of two",
    lambda x, i: lax.reduce((x, i), (jnp.int32(0), jnp.int32(0)), lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1])), (1,)),
    ints(9, 4, 6),
    ints(9, 4, 6),
)

# Linear algebra

case("fft", lambda x: jnp.fft.fft(x), c(4, 6))
case("rfft2", lambda x: jnp.abs(jnp.fft.rfft2(x)), n(6, 4, 4))
case("irfft", lambda x: jnp.fft.irfft(x), c(6, 3))
case(
    "triangular_solve",
    lambda a, b: lax.linalg.triangular_solve(a + 4 * jnp.eye(4), b, left_side=True, lower=True),
    n(6, 4, 4),
    n(6, 4, 2),
)
for _op in ("hessenberg", "schur", "tridiagonal"):
    case(_op, lambda a, op=_op: getattr(lax.linalg, op)(lax.stop_gradient(a + a.mT)), n(6, 3, 3))
case(
    "symmetric_product",
    lambda a, c: lax.linalg.symmetric_product(*map(lax.stop_gradient, (a, c)), alpha=2.0, symmetrize_output=False),
    n(6, 2, 6),
    n(6, 2, 2),
)
case(
    "symmetric_product, and a sum",
    lambda a, c: lax.linalg.symmetric_product(*map(lax.stop_gradient, (a, c)), beta=0.5, symmetrize_output=False),
    n(6, 2, 6),
    n(6, 2, 2),
)
case("cholesky", lambda a: jnp.linalg.cholesky(a @ a.mT + jnp.eye(4)), n(6, 4, 4))
case("eigh", lambda a: jnp.linalg.eigh(a @ a.mT)[0], n(6, 3, 3))
case("eig", lambda a: jnp.linalg.eigvals(lax.stop_gradient(a)), n(6, 3, 3))
case("svd", lambda a: jnp.linalg.svd(a, compute_uv=False), n(6, 3, 2))
case("qr", lambda a: jnp.linalg.qr(a + 3 * jnp.eye(3)), n(6, 3, 3))
case("qr, raw", lambda a: jnp.linalg.qr(lax.stop_gradient(a), mode="raw"), n(6, 3, 3))
case("householder", lambda a, t: lax.linalg.householder_product(*map(lax.stop_gradient, (a, t))), n(6, 3, 3), n(6, 3))
case("reflections", lambda a, t, c: lax.linalg.ormqr(*map(lax.stop_gradient, (a, t, c))), n(6, 3, 3), n(6, 3), n(6, 3, 2))
case(
    "reflections, turned",
    lambda a, t, c: lax.linalg.ormqr(*map(lax.stop_gradient, (a, t, c)), left=False, transpose=True),
    n(6, 3, 3),
    n(6, 3),
    n(6, 2, 3),
)
case(
    "tridiagonal_solve",
    lambda d, b: lax.linalg.tridiagonal_solve(0.1 * d, d + 4, 0.2 * d, b),
    n(6, 3),
    n(6, 3, 2),
)
case("inverse", lambda a: jnp.linalg.inv(a + 4 * jnp.eye(3)), n(6, 3, 3))
case("determinant", lambda a: jnp.linalg.det(a), n(6, 3, 3))

# Without an entry: whole on every device

UNKNOWN = ("rng_bit_generator", "random gamma", "eigenvalues of one")
case("inverse of one", lambda a: jnp.linalg.inv(a + 4 * jnp.eye(4)), n(4, 4))
case("eigenvalues of one", lambda a: jnp.linalg.eigvalsh(a), n(4, 4))
case("random gamma", lambda k, a: jax.random.gamma(k, lax.stop_gradient(a)), key(13), pos(4, 6))
case("derivative of tanh", lambda x, t: jax.jvp(jnp.tanh, (x,), (t,)), n(4, 6), n(4, 6))

# Halos: windows that reach into neighbours' slices


def pool(kind: str, window: tuple[int, ...], strides: tuple[int, ...], padding: Any, **kwargs: Any) -> Callable:
    start, combine = {"max": (-jnp.inf, lax.max), "min": (jnp.inf, lax.min), "sum": (0.0, lax.add)}[kind]
    return lambda x: lax.reduce_window(x, start, combine, window, strides, padding, **kwargs)


case("conv, both spatial dimensions", conv((1, 1), "SAME", NHWC), n(2, 12, 6, 2), n(3, 3, 2, 2))
case("conv, a large window", conv((1, 1), "SAME", NHWC), n(2, 12, 6, 1), n(7, 5, 1, 2))
case("conv, an even window", conv((1, 1), "SAME"), n(2, 2, 6, 6), n(2, 2, 2, 4))
case("conv, stride two", conv((2, 2), "SAME"), n(2, 2, 12, 12), n(2, 2, 3, 5))
case("conv, stride two, padded before", conv((2, 2), [(1, 1), (2, 1)]), n(2, 2, 12, 12), n(2, 2, 3, 4))
case("conv, points of a grid", conv((2, 2), "VALID"), n(2, 2, 12, 12), n(2, 2, 1, 1))
case("conv, dilated window", conv((1, 1), "SAME", rhs_dilation=(2, 3)), n(2, 2, 12, 6), n(2, 2, 3, 2))
case("conv, a window larger than a slice", conv((1,), "SAME"), n(2, 2, 6), n(2, 2, 5))
case("conv, cropped", conv((1, 1), [(-1, 3), (1, 1)]), n(2, 2, 6, 6), n(2, 2, 3, 3))
case("conv, windows in the padding alone", conv((1, 1), [(1, -1), (0, 0)]), n(2, 2, 6, 6), n(2, 2, 1, 1))
case("conv, 3-D, same", conv((1, 1, 1), "SAME"), n(1, 1, 6, 6, 2), n(2, 1, 3, 3, 2))
case("conv, transposed back", conv((1, 1), [(2, 2), (1, 2)], lhs_dilation=(2, 2)), n(2, 2, 6, 6), n(2, 2, 3, 3))
case("max pooling, overlapping", pool("max", (1, 1, 3, 3), (1, 1, 2, 2), "SAME"), n(2, 2, 12, 12))
case("max pooling of negative numbers", pool("max", (1, 3, 3, 1), (1, 1, 1, 1), "SAME"), -1 - pos(2, 6, 6, 2))
case(
    "max pooling of integers",
    lambda x: lax.reduce_window(x, np.int32(-(2**31)), lax.max, (1, 3), (1, 1), "SAME"),
    ints(9, 4, 12, low=-9),
)
case("min pooling, overlapping", pool("min", (1, 3), (1, 1), "SAME"), 1 + pos(4, 12))
case("average pooling, both dimensions", lambda x: pool("sum", (1, 3, 3, 1), (1, 1, 1, 1), "SAME")(x) / 9, n(2, 6, 6, 2))
case(
    "average pooling, counted",
    lambda x: pool("sum", (1, 3, 1), (1, 1, 1), "SAME")(x) / pool("sum", (1, 3, 1), (1, 1, 1), "SAME")(jnp.ones_like(x)),
    n(2, 12, 2),
)
case("pooling, apart", pool("max", (1, 2, 2, 1), (1, 3, 2, 1), "VALID"), n(2, 36, 12, 2))
case("pooling, dilated and padded", pool("sum", (1, 2), (1, 1), [(0, 0), (1, 1)], window_dilation=(1, 2)), n(2, 12))
case(
    "conv, centred, relu and pooling",
    lambda x, k: pool("max", (1, 1, 2), (1, 1, 2), "VALID")(
        jax.nn.relu((lambda y: y - y.mean((0, 2), keepdims=True))(conv((1,), "SAME")(x, k)))
    ),
    n(2, 1, 12),
    n(2, 1, 3),
)
case(
    "conv in a scan",
    lambda x, k: lax.scan(lambda c, _: (conv((1, 1), "SAME", NHWC)(c, k), None), x, None, 2)[0],
    n(2, 6, 4, 2),
    n(3, 3, 2, 2),
)
case(
    "two convs of one image",
    lambda x, k, w: conv((1,), "SAME")(x, k) + conv((1,), "SAME")(x, w),
    n(2, 2, 12),
    n(2, 2, 3),
    n(2, 2, 3),
)


def falling(x):
    return lax.while_loop(lambda c: c[1] < 3, lambda c: (0.5 * c[0] + jnp.sum(x), c[1] + 1), (0.0, 0))[0]


case("while, of a number that begins with zero", lambda x: falling(lax.stop_gradient(x)), n(4, 6))
case("scan, of a number that begins with zero", lambda x: lax.scan(lambda s, x: (0.5 * s + jnp.sum(x), x), 0.0, x), n(4, 6))


def fell_and_solved(a, b):
    """A solver of one's own, which tells how far it is from the solution."""
    product = lambda x: jnp.einsum("bij,bj->bi", a, x)  # noqa: E731
    solve = lambda _, y: (jnp.linalg.solve(lax.stop_gradient(a), y[..., None])[..., 0], jnp.abs(y))  # noqa: E731
    return lax.custom_linear_solve(product, b, solve, solve, symmetric=True, has_aux=True)


case("solve", lambda a, b: jnp.linalg.solve(a + 4 * jnp.eye(3), b), n(6, 3, 3), n(6, 3, 2))
case("solve, of one matrix", lambda a, b: jnp.linalg.solve(a + 4 * jnp.eye(3), b), n(3, 3), n(3, 6))
case("solve, with a report", lambda a, b: fell_and_solved(a @ a.mT + 4 * jnp.eye(2, dtype=a.dtype), b), n(4, 2, 2), n(4, 2))
case("solve by factors", jax.vmap(lambda a, b: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(a), b)), n(4, 2, 2), n(4, 2))
case("log of determinant", lambda a: jnp.linalg.slogdet(a + 4 * jnp.eye(3)), n(6, 3, 3))
case("triangular_solve, of rows", lambda a, b: lax.linalg.triangular_solve(a + 4 * jnp.eye(3), b, lower=True), n(3, 3), n(6, 3))


def in_groups(*sizes):
    """A product of rows in groups, and both its gradients: of the rows, and of each group's matrix."""
    product = lambda x, y: lax.ragged_dot(x, y, jnp.array(sizes, jnp.int32))  # noqa: E731
    return lambda x, y, z: (product(x, y), jax.vjp(product, *map(lax.stop_gradient, (x, y)))[1](lax.stop_gradient(z)))


case("ragged_dot", lambda x, y, sizes: lax.ragged_dot(x, y, sizes), n(12, 6), n(3, 6, 4), np.array([5, 0, 7], np.int32))
case("ragged_dot, of fewer rows", lambda x, y, sizes: lax.ragged_dot(x, y, sizes), n(6, 2), n(2, 2, 6), np.array([1, 3], np.int32))
case("ragged_dot, with gradients", in_groups(1, 3, 2), n(6, 4), n(3, 4, 6), n(6, 6))
case("ragged_dot, of many groups", in_groups(3, 0, 4, 1, 2, 0), n(12, 4), n(6, 4, 2), n(12, 2))


def routed(*labels):
    """A product of rows with labels, and both its gradients: of the rows, and of each label's matrix."""
    product = lambda x, y: routed_dot(x, y, jnp.array(labels, jnp.int32), y.shape[0])  # noqa: E731
    return lambda x, y, z: (product(x, y), jax.vjp(product, *map(lax.stop_gradient, (x, y)))[1](lax.stop_gradient(z)))


case("routed_dot", lambda x, y, labels: routed_dot(x, y, labels, 6), n(6, 2), n(6, 2, 4), ints(7, 6))
case("routed_dot, with gradients", routed(1, 2, 0, 3, 2, 2), n(6, 4), n(3, 4, 6), n(6, 6))
case("searchsorted", jnp.searchsorted, np.sort(n(5)), n(4, 6))
case("interpolation", lambda x, y: jnp.interp(x, jnp.arange(3.0), y), n(6, 2), n(3))
case("equal in a total order", eq_to_p.bind, ints(2, 6, 4), ints(2, 6, 4))


def halved(x, steps):
    """Each row as often as its own number says."""
    return lax.while_loop(lambda c: c[0] > 0, lambda c: (c[0] - 1, 0.5 * c[1] + 1), (steps, x))[1]


case("while, vmapped", lambda x, i: jax.vmap(halved)(lax.stop_gradient(x), i), n(4, 6), ints(4, 4))
case("random, constant key", lambda x: jax.random.bernoulli(jax.random.key(3), 0.5, (4, 6)) * x, n(4, 6))
case("device_put of two", lambda x, y: jax.device_put((x * 2, y + 1)), n(4, 6), n(6))

# Values are reduced, or contributed to a sum, where they are smallest


def _chosen(x: Any, y: Any) -> Any:
    return jax.nn.relu(jnp.where(x > 0, x, y))


case("tanh of a sum of two", lambda x, y: jnp.tanh(x + y), n(4, 6), n(4, 6))
case("tanh of sums, times another", lambda x, y: jnp.tanh(x.sum(1, keepdims=True)) * y, n(4, 6), n(4, 6))
case("difference from another's mean", lambda x, y: y - x.mean(), n(4, 6), n(4, 6))
case("product of two and a third", lambda x, y, z: jnp.tanh(x) * y + z, n(4, 6), n(4, 6), n(4, 6))
case("choice by one of two, or another's sum", lambda x, y: _chosen(-x.T, y.sum()), n(4, 6), n(4, 6))
case("maximum and another", lambda x, y: x.max(1, keepdims=True) - y, n(4, 6), n(4, 6))
case("choice by one of two", lambda x, y: jnp.where(x > 0, y, x), n(4, 6), n(4, 6))
case("first of many rows, repeated", lambda x, y: jnp.tile(x[:1], (4, 1)) * y, n(12, 6), n(4, 6))
case("square of a sum in float32", lambda x, y: jnp.square(x + y).astype(jnp.float32), n(4, 6), n(4, 6))

# Of cases that differ after a comma, one.
KINDS = tuple({name.partition(",")[0]: name for name in sorted(CASES, reverse=True)}.values())
