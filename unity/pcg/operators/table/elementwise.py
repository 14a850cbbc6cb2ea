"""Elementwise operators and random bits: every dimension is a factor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import pi, prod, sqrt
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.operators.counter_bits import bits, is_counter_based
from unity.pcg.operators.layout import Layout
from unity.pcg.types.accumulation import exact, exact_if_bounded, rounds_cotangents
from unity.pcg.types.factors import (
    EVERY,
    NONE,
    NOTHING,
    OPERANDS,
    OPERANDS_AND_RESULT,
    RESULT,
    AllBut,
    Factor,
    Facts,
    Local,
    Place,
    Reads,
    Role,
    Slot,
    Spec,
    at,
    operator,
)
from unity.pcg.types.parallel_type import Shape
from unity.pcg.types.random_keys import by_key

FLAT = Facts(NOTHING)


def places_of(shape: Shape, result: Shape) -> tuple[Place, ...]:
    """Return an operand's place for every dimension of the result: None if the operand is a scalar, or of size one there."""
    if len(shape) != len(result):
        return (None,) * len(result)
    return tuple(Slot(i) if n == m else None for i, (n, m) in enumerate(zip(shape, result, strict=True)))


def every_dimension(operands: list[Shape], result: Shape, n_results: int = 1, skip: tuple[int, ...] = ()) -> tuple[Factor, ...]:
    """Return a parallel factor for each dimension of the result but those to skip, shared by all operands that have it."""
    places = [places_of(shape, result) for shape in operands]
    return tuple(
        Factor(f"d{i}", n, tuple(p[i] for p in places), (Slot(i),) * n_results)
        for i, n in enumerate(result)
        if n > 1 and i not in skip
    )


def elementwise(linear: tuple[tuple[int, ...], ...] = (), work: float = 1.0, view: bool = False, rounds: bool = False) -> Any:
    """Return the specification of an elementwise operator.

    Args:
        linear: the groups of operands in which it is jointly linear.
        work: the FLOPs of an element.
        view: whether the result is the operand itself, so that nothing runs.
        rounds: whether its derivative rounds cotangents.
    """

    def spec(params: Any, operands: Any, results: Any) -> Spec:
        shape = results[0].shape
        factors = every_dimension([o.shape for o in operands], shape, len(results))
        return Spec(factors, tuple(frozenset(g) for g in linear), work * prod(shape), view=view, rounds=rounds)

    return spec


def _each(names: str, facts: Facts) -> Mapping[str, Facts]:
    """Return the facts of each of several primitives."""
    return dict.fromkeys(names.split(), facts)


FUNCTIONS: Mapping[str, Facts] = {  # of real or complex numbers, to such
    **_each(
        "acos acosh asin asinh atan atan2 atanh cos cosh digamma erf erfc lgamma log log1p log2 one_minus_square polygamma sin sinh"
        " zeta",
        Facts(),
    ),
    **_each("igamma igamma_grad_a igammac", Facts(alone=True)),  # loops
    **_each("cbrt erf_inv exp exp2 logistic sqrt tan tanh", Facts(RESULT)),
    "expm1": Facts(RESULT if jax.__version_info__ < (0, 12) else OPERANDS),
    **_each("bessel_i0e bessel_i1e rsqrt", Facts(OPERANDS_AND_RESULT)),
    "pow": Facts((*OPERANDS, Reads(at(0), at(0)))),
    "nextafter": Facts((Reads(NONE), None)),
    "rem": Facts((Reads(NONE), *OPERANDS)),
    "polynomial": Facts((Reads(AllBut(at(1))),), linear_in=(AllBut(at(0)),)),  # in its coefficients
    **_each("integer_pow square", Facts(cheap=True, fused_into_reductions=True)),
    "abs": Facts(cheap=True),
    **_each("max min", Facts(cheap=True, commutative=True)),
    "clamp": Facts((*OPERANDS, *OPERANDS, Reads(at(1, 2))), cheap=True),
    **_each("sign floor ceil round", FLAT),
}
OTHERS: Mapping[str, Facts] = {
    **_each("eq ne eq_to and or xor", replace(FLAT, commutative=True)),
    **_each("lt le gt ge lt_to le_to not is_finite", FLAT),
    **_each("clz population_count shift_left shift_right_arithmetic shift_right_logical", Facts()),
}
DRAW = 60.0  # FLOPs of threefry: twenty rounds of an addition, a rotation and an exclusive or
operator("threefry2x32", facts=Facts(key=True))(elementwise(work=DRAW))


ERROR_SLOPES = {"erf": 2 / sqrt(pi), "erfc": -2 / sqrt(pi)}  # the derivatives of the error functions at zero


def derived(function: Callable[[jax.Array], jax.Array], slope: float) -> Local:
    """Return an error function with a custom derivative, since that of JAX 0.12 fails inside a shard_map."""
    own = jax.custom_jvp(function)
    own.defjvps(lambda t, y, x: t * slope * jnp.exp(-x * x))
    return lambda operands, layout: [own(*operands)]


LOCAL = {name: derived(getattr(lax, name), slope) for name, slope in ERROR_SLOPES.items()}
for _name, _facts in FUNCTIONS.items():
    operator(_name, local=LOCAL.get(_name), facts=replace(_facts, pointwise=True))(elementwise())
for _name, _facts in OTHERS.items():
    operator(_name, facts=_facts)(elementwise())
operator("reduce_precision", facts=Facts(linear_in=(EVERY,), role=Role.CONVERSION))(elementwise(rounds=True))
# JAX's parameters of these two contain the shapes for which they were traced
operator("frexp", local=lambda operands, layout: list(jnp.frexp(*operands)))(elementwise())
operator("ldexp", local=lambda operands, layout: [jnp.ldexp(*operands)])(elementwise())
operator("neg", facts=Facts(cheap=True, pointwise=True))(elementwise(linear=((0,),)))
operator("real", "imag", "conj", facts=Facts(cheap=True))(elementwise(linear=((0,),)))
FORWARDS = Facts(moves=True, role=Role.CONVERSION, identity=True)
operator("copy", "name", facts=FORWARDS)(elementwise(linear=((0,),), view=True))
operator("stop_gradient", facts=replace(FORWARDS, reads=NOTHING))(elementwise(linear=((0,),), view=True))
PLACED = {"sharding_constraint": Facts(identity=True), "constrain": Facts(identity=True, alone=True, distinct=True)}
for _name, _facts in PLACED.items():
    operator(_name, local=lambda operands, layout: list(operands), facts=_facts)(elementwise(linear=((0,),), view=True))
operator("add", "add_any", facts=Facts(cheap=True, commutative=True))(elementwise(linear=((0, 1),)))
operator("sub", facts=Facts(cheap=True))(elementwise(linear=((0, 1),)))
operator("complex")(elementwise(linear=((0, 1),)))
operator("mul", facts=Facts(cheap=True, fused_into_reductions=True, commutative=True))(elementwise(linear=((0,), (1,))))


@operator("regularized_incomplete_beta", facts=Facts(alone=True, invariant=True))
def incomplete_beta(params: Any, operands: Any, results: Any) -> Spec:
    """Operands of one shape, none of which JAX lets differ between devices."""
    return Spec((), (), prod(results[0].shape))


@operator("div", facts=Facts(pointwise=True))
def divide(params: Any, operands: Any, results: Any) -> Spec:
    """Dividend and divisor. Linear in the dividend, unless these are integers, whose quotients are rounded."""
    return elementwise(((0,),) if operands[0].floating else ())(params, operands, results)


@operator("select_n", facts=Facts(cheap=True))
def select(params: Any, operands: Any, results: Any) -> Spec:
    """Selector and cases. Linear in all cases together."""
    factors = every_dimension([o.shape for o in operands], results[0].shape)
    return Spec(factors, (frozenset(range(1, len(operands))),), prod(results[0].shape))


@operator("convert_element_type", facts=Facts(linear_in=(EVERY,), moves=True, fused_into_reductions=True, role=Role.CONVERSION))
def convert(params: Any, operands: Any, results: Any) -> Spec:
    """One operand. Linear if the conversion is exact: a sum of rounded values is not the rounded sum."""
    types, operand = (operands[0].dtype, results[0].dtype), (frozenset({0}),)
    factors, linear = every_dimension([operands[0].shape], results[0].shape), operand if exact(*types) else ()
    bounded = operand if exact_if_bounded(*types) else ()
    return Spec(factors, linear, prod(results[0].shape), linear_if_bounded=bounded, rounds=rounds_cotangents(*types))


@operator("bitcast_convert_type", facts=FLAT)
def bitcast(params: Any, operands: Any, results: Any) -> Spec:
    """One operand. The common dimensions are parallel: a change of width adds or removes a last dimension."""
    rank = min(operands[0].ndim, results[0].ndim)
    names = ((i, n) for i, n in enumerate(operands[0].shape[:rank]) if n > 1 and results[0].shape[i] == n)
    return Spec(tuple(Factor(f"d{i}", n, (Slot(i),), (Slot(i),)) for i, n in names), (), 0.0)


@operator("optimization_barrier", facts=Facts(linear_in=(EVERY,), alone=True, distinct=True))
def barrier(params: Any, operands: Any, results: Any) -> Spec:
    """Operands that are returned unchanged. If they have one shape, its dimensions are parallel."""
    if len({o.shape for o in operands}) != 1:
        return Spec(())
    return Spec(every_dimension([o.shape for o in operands], results[0].shape, len(results)))


def random_pieces(operands: list[jax.Array], layout: Layout) -> list:
    """Draw this device's part of the bits of its keys, so that random masks equal the unsharded ones.

    A generator that is not counter-based (`rbg`) has to draw all bits of its keys, of which each device keeps its part.
    """
    keys, result = layout.operands[0], layout.results[0]
    lead, shape = keys.ndim, result.shape[keys.ndim :]
    rest = [(a, d) for a, d in result.slices if d.dim >= lead]
    if rest and is_counter_based(keys.dtype):
        positions = [result.coordinates(d) for d in range(lead, result.ndim)]
        return [bits(operands[0], layout.params["bit_width"], shape, positions)]
    return _own_part(operands, layout, shape=shape)


def _own_part(operands: list[jax.Array], layout: Layout, **changed: Any) -> list:
    """Compute the whole results of this device's keys, and cut them where they are divided but the keys are not."""
    result = layout.bind(*operands, **changed)[0]
    divided = {s for placed in layout.operands for s in placed.slices}
    return [layout.results[0].cut(result, [s for s in layout.results[0].slices if s not in divided])]


@operator("random_bits", local=random_pieces, facts=replace(FLAT, draws=True))
def random_bits(params: Any, operands: Any, results: Any) -> Spec:
    """Keys. Devices share the work if the generator is counter-based."""
    return _from_keys(operands, results, is_counter_based(operands[0].dtype))


@operator("random_split", local=_own_part, facts=Facts(key=True))
def split_keys(params: Any, operands: Any, results: Any) -> Spec:
    """Keys. Every device computes all parts of a key."""
    return _from_keys(operands, results, shared=False)


def _from_keys(operands: Any, results: Any, shared: bool) -> Spec:
    """Return the specification of an operator from keys `[*k]` to a result `[*k, *shape]`.

    `shared` tells whether devices share the work along `shape`; otherwise each does all of it.
    """
    keys, shape = operands[0].shape, results[0].shape
    lead = _of_keys(operands, keys)
    own = ((i, n) for i, n in enumerate(shape) if i >= len(keys) and n > 1)
    rest = tuple(Factor(f"d{i}", n, (None,), (Slot(i),), shared=shared) for i, n in own)
    return Spec(lead + rest, (), DRAW * prod(shape))


def _of_keys(operands: Any, batch: Shape) -> tuple[Factor, ...]:
    """Return the factors of a batch of keys. If results depend on the whole batch, every device has all of it."""
    independent = by_key(operands[0].dtype)
    places = [places_of(o.shape, batch) if independent else (None,) * len(batch) for o in operands]
    return tuple(
        Factor(f"k{i}", n, tuple(p[i] for p in places), (Slot(i),), shared=independent) for i, n in enumerate(batch) if n > 1
    )


@operator("random_fold_in", local=_own_part, facts=Facts(key=True))
def fold_in(params: Any, operands: Any, results: Any) -> Spec:
    """Keys, and a number for each or for all."""
    return Spec(_of_keys(operands, results[0].shape))


@operator("random_wrap", "random_unwrap")
@operator("random_seed", "random_clone", facts=Facts(key=True))
def keys(params: Any, operands: Any, results: Any) -> Spec:
    """Conversions of keys from and to integers. The common leading dimensions are parallel."""
    rank = min(*(o.ndim for o in operands), results[0].ndim)
    names = ((i, n) for i, n in enumerate(results[0].shape[:rank]) if n > 1 and all(o.shape[i] == n for o in operands))
    return Spec(tuple(Factor(f"k{i}", n, (Slot(i),) * len(operands), (Slot(i),)) for i, n in names))
