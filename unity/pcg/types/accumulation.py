"""Accumulation types: partial sums of types narrower than float32 are computed, held, sent and added in float32.

A narrow number that is rounded on every device before it is added differs from the sum that is rounded once, by more than the
sum's own rounding where summands cancel; in float16 and float8 it may overflow although the sum does not. So the rounding comes
after the sum. A value that is replicated for use is held wide, too: its cotangent is a partial sum, and JAX gives a cotangent the
type of its value. What a replicated value holds is rounded, though: a narrow number in a wide type.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Type
from unity.pcg.types.varying_axes import TIME

OWN = "own"  # in the place of a type's name: all are added in their own
WIDE = np.dtype("float32")
NARROW = ("bfloat16", "float16", *(name for name in dir(jnp) if name.startswith(("float8_", "float4_"))))


@cache
def narrow(dtype: Any) -> bool:
    """Whether a type is a floating-point type of fewer bits than float32."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < jnp.finfo(WIDE).bits


@cache
def limited(dtype: Any) -> bool:
    """Whether a floating-point type has a smaller range than float32, as float16 and float8 have and bfloat16 has not."""
    return narrow(dtype) and float(jnp.finfo(dtype).max) < 2.0**127


def accumulator(dtype: Any) -> Any:
    """The type in which partial sums of a type are added."""
    return WIDE if narrow(dtype) else dtype


def widened(dtype: Any, reduce_in: str = "") -> bool:
    """Whether partial sums of a type are added in a wider one. `reduce_in`: the type whose sums are not, as of an axis."""
    return narrow(dtype) and reduce_in not in (dtype.name, OWN)


def growth(dtype: Any, reduce_in: str = "") -> float:
    """The size of a partial sum, as a multiple of the size of what it is the sum of."""
    return WIDE.itemsize / dtype.itemsize if widened(dtype, reduce_in) else 1.0


def added(dtype: Any, over: Iterable[Axis]) -> Any:
    """The type in which a sum over axes is made."""
    return accumulator(dtype) if any(widened(dtype, a.reduce_in) for a in over) else dtype


def partial(dtype: Any, type_: Type, axes: Sequence[Axis], kinds: str = "S") -> bool:
    """Whether a tensor is a partial sum that is wider than the tensor, or (R) its cotangent is one."""
    if not narrow(dtype):
        return False
    along = zip(type_, axes, strict=True)
    return any(s.kind in kinds and a.name != TIME and widened(dtype, a.reduce_in) for s, a in along)


def narrowly(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Axes along which partial sums of every type are added in that type."""
    return tuple(replace(a, reduce_in=OWN) for a in axes)


def held(dtype: Any, type_: Type, axes: Sequence[Axis]) -> Any:
    """The type of numbers in which a device holds its piece of a tensor."""
    return accumulator(dtype) if partial(dtype, type_, axes, "SR") else dtype


def forward(dtype: Any, before: Type, axes: Sequence[Axis]) -> Any:
    """The type in which a value travels when it is changed from a type."""
    return accumulator(dtype) if partial(dtype, before, axes, "S") else dtype


def backward(dtype: Any, after: Type, axes: Sequence[Axis]) -> Any:
    """The type in which a value's cotangent travels when the value was changed to a type."""
    return accumulator(dtype) if partial(dtype, after, axes, "R") else dtype


@cache
def exact(before: Any, after: Any) -> bool:
    """Whether a conversion of partial sums is as exact as one of the sum: nothing is rounded before it is added up.

    A narrow sum stays in its accumulator. It is rounded before it is converted to a wider type.
    """
    if not all(jnp.issubdtype(d, jnp.inexact) for d in (before, after)) or (narrow(before) and not narrow(after)):
        return False
    return jnp.finfo(accumulator(before)).bits <= jnp.finfo(accumulator(after)).bits
