"""Elementwise primitives: arithmetic of the ring, order, choice by a predicate, conversions; the rest are functions by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unity.pcg.jaxprs.function_primitives import NAMES
from unity.pcg.operators.promised_reads import PROMISED
from unity.pcg.operators.table.elementwise import NONLINEAR
from unity.verify.semantics.domains import Array, Domain
from unity.verify.semantics.primitives.core import MEANINGS, PLAIN, Application, Run, Value, floating, meaning

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
    "polynomial": lambda d, x, *of: reduce(lambda found, a: d.add(d.mul(found, x), a), reversed(of)),  # in newer JAX
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
TOTAL = ("eq_to", "lt_to", "le_to")  # orders in which NaN and both zeros have their places: among numbers the usual ones
SAME = (
    "copy copy_p name optimization_barrier stop_gradient sharding_constraint layout_constraint device_put random_clone reshard"
    " constrain"
)


@meaning(*SAME.split())
def same(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Nothing happens to the values."""
    return list(values)


@meaning(PROMISED)
def promised(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Nothing happens to the rows that were read."""
    return list(values[:1])


def unequal_ranks(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Scalar operands among arrays, made to broadcast."""
    rank = max(len(run.shape(v.array)) for v in values)
    return [
        Value(v.array.reshape((*v.array.shape[: run.lead], *(1,) * rank)), v.known) if not run.shape(v.array) else v for v in values
    ]


@meaning(*RING)
def ring(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Sums, products, maxima."""
    values = unequal_ranks(run, app, values)
    domain, arrays = run.together(values)
    with np.errstate(over="ignore"):
        result = RING[app.name](domain, *arrays)
    return [as_result(run, app, result, domain is PLAIN)]


def as_result(run: Run, app: Application, array: Array, known: bool) -> Value:
    """A result of its dtype: what is known of integers is lifted where the result is floating."""
    dtype = app.results[0].dtype
    if not known:
        return Value(array, False)
    return Value(array.astype(dtype, copy=False), True) if not floating(dtype) else Value(run.domain.constant(array), False)


@meaning("div")
def divide(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Of elements exactly; of integers towards zero."""
    domain, arrays = run.together(unequal_ranks(run, app, values))
    if domain is not PLAIN and not floating(app.results[0].dtype):
        return [Value(domain.function("div of integers", *arrays), False)]
    return [as_result(run, app, domain.div(*arrays), domain is PLAIN)]


@meaning("integer_pow")
def power(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """A product of equal factors, or its inverse."""
    domain, (x,) = run.together(values)
    exponent = app.params["y"]
    result = reduce(domain.mul, [x] * abs(exponent)) if exponent else domain.constant(np.ones(x.shape))
    if exponent < 0:
        result = domain.div(domain.constant(np.ones((1,) * x.ndim)), result)
    return [as_result(run, app, result, domain is PLAIN)]


@meaning(*COMPARISONS, *TOTAL)
def compare(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Truth values, known if the domain decides."""
    domain, arrays = run.together(unequal_ranks(run, app, values))
    return [Value(domain.compare(app.name.removesuffix("_to"), *arrays), domain.decides)]


@meaning("is_finite")
def is_finite(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Every element is, where the domain decides at all."""
    if run.domain.decides:
        return [Value(np.ones(values[0].array.shape, bool), True)]
    return [Value(run.domain.function("is_finite", values[0].array), False)]


@meaning("and", "or", "not")
def logic(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Truth values that are elements are 0 and 1: the smaller, the larger, the complement."""
    if all(v.known for v in values) or app.results[0].dtype != bool:
        return function(run, app, values)
    domain, arrays = run.together(unequal_ranks(run, app, values))
    if app.name == "not":
        return [Value(domain.sub(domain.constant(np.ones((1,) * arrays[0].ndim)), arrays[0]), False)]
    return [Value((domain.minimum if app.name == "and" else domain.maximum)(*arrays), False)]


@meaning("select_n")
def select(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """`select_n(which, *cases)`."""
    which, *cases = unequal_ranks(run, app, values)
    if which.known:
        known = all(c.known for c in cases)
        _, arrays = run.together(cases)
        if len(arrays) == 2:
            return [Value(np.where(which.array.astype(bool), arrays[1], arrays[0]), known)]
        return [Value(np.choose(which.array, np.broadcast_arrays(*arrays)), known)]
    return [Value(chosen(run.domain, which.array, [run.lift(c) for c in cases]), False)]


def chosen(domain: Domain, which: Array, cases: Sequence[Array]) -> Array:
    """A choice by an element that is 0 or 1 (or more): linear in the cases."""
    cases = [domain.replaceable(c) for c in cases]
    if len(cases) == 2:
        return domain.add(cases[0], domain.mul(which, domain.sub(cases[1], cases[0])))
    return reduce(domain.add, [domain.mul(domain.function(f"is {k}", which), c) for k, c in enumerate(cases)])


@meaning("convert_element_type")
def convert(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Roundings between floating types are left out: the ring is exact. Its integers do not overflow."""
    (value,), old, new = values, app.operands[0].dtype, app.results[0].dtype
    if value.known:
        return [as_result(run, app, value.array, True)]
    if np.dtype(new).kind == "b":
        zero = run.domain.constant(np.zeros((1,) * value.array.ndim))
        return [Value(run.domain.compare("ne", value.array, zero), run.domain.decides)]
    if floating(new) or np.dtype(old).kind == "b" or (np.dtype(old).kind, np.dtype(new)) in (("i", np.int32), ("i", np.int64)):
        return [value]
    return [Value(run.domain.function(f"as {np.dtype(new).name}", value.array), False)]


@meaning("real", "imag", "conj", "reduce_precision")
def parts(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Additive, and nothing more is known. (A sum of roundings is as good as a rounding of the sum.)"""
    return [Value(run.domain.additive(named(app), values[0].array), False)]


def named(app: Application) -> str:
    """A function's name: the primitive's, and the parameters that it depends on."""
    ignored = ("accuracy", "out_sharding", "sharding", "_prim")  # the last has shapes, of a function that has a name
    given = [f"{k}={v}" for k, v in sorted(app.params.items()) if k not in ignored and v is not None]
    return f"{app.name}[{', '.join(given)}]" if given else app.name


def function(run: Run, app: Application, values: Sequence[Value]) -> list[Value]:
    """Any other: of known operands as JAX computes it, of elements unknown."""
    values = unequal_ranks(run, app, values)
    if all(v.known for v in values):
        arrays = [v.array for v in values]
        if app.name in INTEGER:
            return [as_result(run, app, INTEGER[app.name](*arrays), True)]
        return [as_result(run, app, x, True) for x in by_jax(app, np.broadcast_arrays(*arrays), {})]
    arrays = [run.lift(v) for v in values]
    several = len(app.results) > 1
    return [Value(run.domain.function(named(app) + (f" {k}" if several else ""), *arrays), False) for k in range(len(app.results))]


def by_jax(app: Application, arrays: Sequence[Array], changes: Mapping[str, Any]) -> list[Array]:
    """The primitive itself, run on concrete arrays."""
    with jax.enable_x64(True):
        found: Any = app.primitive.bind(*(jnp.asarray(x) for x in arrays), **{**app.params, **changes})
        return [np.asarray(x) for x in (found if app.primitive.multiple_results else [found])]


for _name in (*NONLINEAR, *NAMES.values(), "threefry2x32", "regularized_incomplete_beta", "random_gamma_grad"):
    MEANINGS.setdefault(_name, function)
