"""Accumulation types: partial sums of types narrower than float32 are computed, stored, sent and added in float32.

A sum of numbers that each device has rounded differs from the sum rounded once, by more than one rounding where summands cancel; in
float16 and float8 a summand may overflow although the sum does not. So the sum is rounded after it is complete. A value that is
replicated for use is stored wide, too: its cotangent is a partial sum, and JAX gives a cotangent the type of its value. The value
itself is rounded: a narrow number in a wide type.

Partial sums of integers are added in their own type, which wraps around: they are equal to the sum modulo a power of two, and so to
the sum itself once it is complete. An operator that reads them in a type that wraps around later must read the complete sum, unless
no sum can overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Type
from unity.pcg.types.varying_axes import TIME

OWN = "own"  # for `reduce_in`: partial sums of every type are added in that type
WIDE = np.dtype("float32")
NARROW = ("bfloat16", "float16", *(name for name in dir(jnp) if name.startswith(("float8_", "float4_"))))


@cache
def narrow(dtype: Any) -> bool:
    """Return whether a type is a floating-point type of fewer bits than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < jnp.finfo(WIDE).bits


@cache
def limited(dtype: Any) -> bool:
    """Return whether a floating-point type has a smaller range than float32, as float16 and float8 have, and bfloat16 does not."""
    return narrow(dtype) and float(jnp.finfo(dtype).max) < 2.0**127


def accumulator(dtype: Any) -> Any:
    """Return the type in which partial sums of a type are added."""
    return WIDE if narrow(dtype) else dtype


def widened(dtype: Any, reduce_in: str = "") -> bool:
    """Return whether partial sums of a type are added in a wider one. `reduce_in` is the exempt type, as in `Axis`."""
    return narrow(dtype) and reduce_in not in (dtype.name, OWN)


def growth(dtype: Any, reduce_in: str = "") -> float:
    """Return the size of a partial sum, as a multiple of the size of the tensor."""
    return WIDE.itemsize / dtype.itemsize if widened(dtype, reduce_in) else 1.0


def reduction_dtype(dtype: Any, over: Iterable[Axis]) -> Any:
    """Return the element type in which devices reduce a tensor over some axes."""
    return accumulator(dtype) if any(widened(dtype, a.reduce_in) for a in over) else dtype


def is_wide_sum(dtype: Any, type_: Type, axes: Sequence[Axis], kinds: str = "S") -> bool:
    """Return whether a tensor is a widened partial sum along any axis; with `kinds="R"`, whether its cotangent is one."""
    if not narrow(dtype):
        return False
    along = zip(type_, axes, strict=True)
    return any(s.kind in kinds and a.name != TIME and widened(dtype, a.reduce_in) for s, a in along)


def without_widening(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Return the axes with every type exempt from widening: its partial sums are added in the type itself."""
    return tuple(Axis(a.name, a.size, a.level, OWN) for a in axes)


def storage_dtype(dtype: Any, type_: Type, axes: Sequence[Axis]) -> Any:
    """Return the element type in which a device stores its piece of a tensor."""
    return accumulator(dtype) if is_wide_sum(dtype, type_, axes, "SR") else dtype


def forward_dtype(dtype: Any, before: Type, axes: Sequence[Axis]) -> Any:
    """Return the element type in which a change from a parallel type sends the value."""
    return accumulator(dtype) if is_wide_sum(dtype, before, axes, "S") else dtype


def backward_dtype(dtype: Any, after: Type, axes: Sequence[Axis]) -> Any:
    """Return the element type in which a change to a parallel type sends the value's cotangent."""
    return accumulator(dtype) if is_wide_sum(dtype, after, axes, "R") else dtype


@cache
def exact(before: Any, after: Any) -> bool:
    """Return whether converting partial sums is as exact as converting their sum: nothing is rounded before the sum is complete.

    A narrow sum stays in its accumulator, and must be rounded before it is converted to a wider type. A sum of integers may
    overflow (`exact_if_bounded`).
    """
    if not all(jnp.issubdtype(d, jnp.inexact) for d in (before, after)):
        return False
    if narrow(before) and jnp.finfo(after).nmant > jnp.finfo(before).nmant:
        return False
    return jnp.finfo(accumulator(before)).bits <= jnp.finfo(accumulator(after)).bits


@cache
def rounds_cotangents(before: Any, after: Any) -> bool:
    """Return whether the transpose of a conversion rounds partial sums: their accumulator is narrower before than after it.

    Cotangents of narrow types stay in float32, so a plan may skip a rounding that the function does, but never adds one.
    """
    if not all(jnp.issubdtype(d, jnp.inexact) for d in (before, after)):
        return False
    return jnp.finfo(accumulator(before)).bits < jnp.finfo(accumulator(after)).bits


@cache
def exact_if_bounded(before: Any, after: Any) -> bool:
    """Return whether converting partial sums is as exact as adding in the new type, if no sum of integers overflows.

    An integer that overflows wraps around: the converted partial sums would add up to the sum before it wrapped.
    """
    return jnp.issubdtype(before, jnp.integer) and jnp.issubdtype(after, jnp.floating) and not narrow(after)


@cache
def wraps_earlier(before: Any, after: Any) -> bool:
    """Return whether a type of integers wraps around where a type to which they are converted does not."""
    if not jnp.issubdtype(before, jnp.integer):
        return False
    return not jnp.issubdtype(after, jnp.integer) or jnp.iinfo(before).bits < jnp.iinfo(after).bits


def bounded(operands: Sequence[Any], result: Any, terms: int) -> bool:
    """Return whether no sum of products of integers overflows, nor any part of such a sum.

    Args:
        operands: the types of a product's factors.
        result: the type in which products are added.
        terms: the number of products.
    """
    if not all(jnp.issubdtype(d, jnp.integer) for d in (*operands, result)):
        return False
    largest = prod(max(-int(jnp.iinfo(d).min), int(jnp.iinfo(d).max)) for d in operands)
    return jnp.issubdtype(result, jnp.signedinteger) and largest * terms <= int(jnp.iinfo(result).max)
