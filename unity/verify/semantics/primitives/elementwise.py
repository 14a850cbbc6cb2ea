"""Elementwise primitives: arithmetic of the ring, order, selection, conversions and bits; all others are functions by name.

PRNG keys are elements too: the bits that a key draws are unknown functions of the key. With JAX's default generator the bits of an
element are a hash of the key and of the element's number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from unity.pcg.jaxprs.foreign_primitives import NAMES
from unity.verify.semantics.domains import Array, ElementDomain
from unity.verify.semantics.primitives.core import (
    MEANINGS,
    PLAIN,
    InterpreterRun,
    PrimitiveCall,
    StackedValue,
    evaluate,
    is_inexact,
    meaning,
)
from unity.verify.semantics.primitives.unknown_functions import flatten_last, rowwise, run_on_each_device

RING: Mapping[str, Callable[..., Array]] = {
    "add": lambda d, x, y: d.add(x, y),
    "add_any": lambda d, x, y: d.add(x, y),
    "sub": lambda d, x, y: d.sub(x, y),
    "mul": lambda d, x, y: d.mul(x, y),
    "neg": lambda d, x: d.neg(x),
    "max": lambda d, x, y: d.maximum(x, y),
    "min": lambda d, x, y: d.minimum(x, y),
    "clamp": lambda d, low, x, high: d.minimum(d.maximum(x, low), high),
    "square": lambda d, x: d.mul(x, x),
    "one_minus_square": lambda d, x: d.sub(d.constant(np.ones(x.shape)), d.mul(x, x)),  # of tanh, in newer JAX
    "polynomial": lambda d, x, *of: reduce(lambda value, a: d.add(d.mul(value, x), a), reversed(of)),  # in newer JAX
    "complex": lambda d, x, y: d.add(x, d.mul(y, d.function("imaginary unit"))),
}
INTEGER: Mapping[str, Callable[..., Array]] = {  # of known operands; numpy wraps around as XLA does
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "abs": np.abs,
    "sign": np.sign,
    "rem": np.fmod,
}
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
TOTAL_ORDERS = ("eq_to", "lt_to", "le_to")  # they rank NaN and both zeros too: among numbers they are the usual ones
IDENTITIES = (
    "copy copy_p name optimization_barrier stop_gradient sharding_constraint layout_constraint device_put random_clone reshard"
    " constrain"
)
FUNCTIONS = (  # elementwise, and nothing more is known of them
    "abs acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clz cos cosh digamma erf erf_inv erfc exp exp2"
    " expm1 floor igamma igamma_grad_a igammac lgamma log log1p log2 logistic nextafter polygamma population_count pow"
    " random_gamma_grad regularized_incomplete_beta rem round rsqrt shift_left shift_right_arithmetic shift_right_logical sign sin"
    " sinh sqrt tan tanh threefry2x32 xor zeta"
)


@meaning(*IDENTITIES.split())
def identity(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """All operands, unchanged."""
    return list(values)


def with_equal_ranks(run: InterpreterRun, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Return values in which scalar operands have the rank of the others, so that they broadcast."""
    rank = max(len(run.shape(v.array)) for v in values)
    return [
        v if run.shape(v.array) else StackedValue(v.array.reshape((*v.array.shape[: run.lead], *(1,) * rank)), v.known)
        for v in values
    ]


@meaning(*RING)
def ring(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Operations of the ring and its order: sums, products, maxima."""
    domain, arrays = run.together(with_equal_ranks(run, values))
    with np.errstate(over="ignore"):
        result = RING[call.name](domain, *arrays)
    return [run.typed(result, domain is PLAIN, call.results[0].dtype)]


@meaning("div")
def divide(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """An exact quotient of elements; of integers, the quotient rounded towards zero."""
    domain, arrays = run.together(with_equal_ranks(run, values))
    if domain is not PLAIN and not is_inexact(call.results[0].dtype):
        return [StackedValue(domain.function("div of integers", *arrays), False)]
    return [run.typed(domain.div(*arrays), domain is PLAIN, call.results[0].dtype)]


@meaning("integer_pow")
def integer_power(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """A product of equal factors, or its inverse."""
    domain, (x,) = run.together(values)
    exponent = call.params["y"]
    result = reduce(domain.mul, [x] * abs(exponent)) if exponent else domain.constant(np.ones(x.shape))
    if exponent < 0:
        result = domain.div(domain.constant(np.ones((1,) * x.ndim)), result)
    return [run.typed(result, domain is PLAIN, call.results[0].dtype)]


@meaning(*COMPARISONS, *TOTAL_ORDERS)
def compare(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Truth values, known if the domain decides comparisons."""
    domain, arrays = run.together(with_equal_ranks(run, values))
    return [StackedValue(domain.compare(call.name.removesuffix("_to"), *arrays), domain.decides)]


@meaning("is_finite")
def is_finite(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """True for every element where the domain decides comparisons, an unknown function elsewhere."""
    if run.domain.decides:
        return [StackedValue(np.ones(values[0].array.shape, bool), True)]
    return [StackedValue(run.domain.function("is_finite", values[0].array), False)]


@meaning("and", "or", "not")
def logic(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Minimum, maximum and complement of truth values that are elements 0 and 1."""
    if all(v.known for v in values) or call.results[0].dtype != bool:
        return function(run, call, values)
    domain, arrays = run.together(with_equal_ranks(run, values))
    if call.name == "not":
        return [StackedValue(domain.sub(domain.constant(np.ones((1,) * arrays[0].ndim)), arrays[0]), False)]
    return [StackedValue((domain.minimum if call.name == "and" else domain.maximum)(*arrays), False)]


@meaning("select_n")
def select(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """For each element, the case that the first operand names."""
    which, *cases = with_equal_ranks(run, values)
    if which.known:
        known = all(c.known for c in cases)
        _, arrays = run.together(cases)
        if len(arrays) == 2:
            return [StackedValue(np.where(which.array.astype(bool), arrays[1], arrays[0]), known)]
        return [StackedValue(np.choose(which.array, np.broadcast_arrays(*arrays)), known)]
    return [StackedValue(select_by_element(run.domain, which.array, [run.lift(c) for c in cases]), False)]


def select_by_element(domain: ElementDomain, which: Array, cases: Sequence[Array]) -> Array:
    """Select a case by an element that is 0 or 1 (or more): a sum that is linear in the cases."""
    cases = [domain.replaceable(c) for c in cases]
    if len(cases) == 2:
        return domain.add(cases[0], domain.mul(which, domain.sub(cases[1], cases[0])))
    return reduce(domain.add, [domain.mul(domain.function(f"is {k}", which), c) for k, c in enumerate(cases)])


@meaning("convert_element_type")
def convert(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """A conversion without rounding between floating types, since the ring is exact, and without integer overflow."""
    (value,), old, new = values, call.operands[0].dtype, call.results[0].dtype
    if value.known:
        return [run.typed(value.array, True, new)]
    if np.dtype(new).kind == "b":
        zero = run.domain.constant(np.zeros((1,) * value.array.ndim))
        return [StackedValue(run.domain.compare("ne", value.array, zero), run.domain.decides)]
    if is_inexact(new) or np.dtype(old).kind == "b" or (np.dtype(old).kind, np.dtype(new)) in (("i", np.int32), ("i", np.int64)):
        return [value]
    return [StackedValue(run.domain.function(f"as {np.dtype(new).name}", value.array), False)]


@meaning("real", "imag", "conj", "reduce_precision")
def additive(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """An unknown additive function. (A sum of roundings is as good as a rounding of the sum.)"""
    return [StackedValue(run.domain.additive(call.function_name, values[0].array), False)]


@meaning(*(name for name in (*FUNCTIONS.split(), *NAMES.values()) if name not in MEANINGS))
def function(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Any other elementwise function: of known operands as JAX computes it, of elements unknown."""
    values, dtype = with_equal_ranks(run, values), call.results[0].dtype
    if all(v.known for v in values):
        arrays = [v.array for v in values]
        if call.name in INTEGER:
            return [run.typed(INTEGER[call.name](*arrays), True, dtype)]
        return [run.typed(x, True, dtype) for x in call.run_by_jax(np.broadcast_arrays(*arrays))]
    arrays, n = [run.lift(v) for v in values], len(call.results)
    names = [f"{call.function_name} {k}" if n > 1 else call.function_name for k in range(n)]
    return [StackedValue(run.domain.function(name, *arrays), False) for name in names]


@meaning("bitcast_convert_type")
def bitcast(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Concrete for known operands, else an unknown function; a change of width removes or adds a last dimension."""
    (value,) = values
    if value.known:
        return run_on_each_device(run, call, values)
    old, new = call.operands[0], call.results[0]
    if len(new.shape) < len(old.shape):
        (x,) = rowwise(run, call.function_name, [value.array], [()])
    else:
        (x,) = rowwise(run, call.function_name, [value.array[..., None]], [tuple(new.shape[len(old.shape) :])])
    return [StackedValue(x, False)]


# Random numbers


@meaning("random_bits", "random_split", "random_unwrap")
def draw(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Draws `[*k, *shape]` from keys `[*k]`."""
    (keys,), shape = call.operands, tuple(call.results[0].shape[len(call.operands[0].shape) :])
    if call.name == "random_bits" and _is_counter_based(keys.dtype):
        program = jax.make_jaxpr(lambda k: [_counter_bits(k, call.params["bit_width"], shape)])(keys)
        return evaluate(run, program, values)
    return [StackedValue(rowwise(run, call.function_name, [run.lift(values[0])[..., None]], [shape])[0], False)]


def _is_counter_based(dtype: Any) -> bool:
    """Return whether every element's bits depend on the key and on the element's number alone."""
    return str(dtype) == "key<fry>" and bool(jax.config.jax_threefry_partitionable)  # pyright: ignore[reportAttributeAccessIssue]


def _counter_bits(keys: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    """Return the bits that every key draws: a hash of its two words and of the two words of each element's number."""
    numbers = np.arange(prod(shape), dtype=np.uint64).reshape(shape)
    words = jnp.moveaxis(jax.random.key_data(keys), -1, 0)
    words = [jnp.broadcast_to(w.reshape(*keys.shape, *(1,) * len(shape)), (*keys.shape, *shape)) for w in words]
    counters = [jnp.broadcast_to(n.astype(np.uint32), (*keys.shape, *shape)) for n in (numbers >> 32, numbers)]
    first, second = threefry2x32_p.bind(*words, *counters)
    if width == 64:
        return first.astype(jnp.uint64) << np.uint64(32) | second.astype(jnp.uint64)
    return (first ^ second).astype(f"uint{width}")


@meaning("random_wrap")
def wrap(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """Keys `[*k]` from raw data `[*k, words]`."""
    count = len(call.operands[0].shape) - len(call.results[0].shape)
    return [StackedValue(rowwise(run, call.function_name, [flatten_last(run.lift(values[0]), count)], [()])[0], False)]


@meaning("random_fold_in", "random_seed")
def derive_keys(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """New keys, each a function of the operands at its place."""
    return [StackedValue(run.domain.function(call.function_name, *(run.lift(v) for v in values)), False)]


@meaning("rng_bit_generator")
def bit_generator(run: InterpreterRun, call: PrimitiveCall, values: Sequence[StackedValue]) -> list[StackedValue]:
    """The new state of one key, and its bits."""
    rows = [flatten_last(run.lift(values[0]), len(call.operands[0].shape))]
    return [StackedValue(x, False) for x in rowwise(run, call.function_name, rows, [tuple(r.shape) for r in call.results])]
