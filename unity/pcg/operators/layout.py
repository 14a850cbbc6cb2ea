"""Positions of a device's piece in the whole tensor, for local programs that run inside `shard_map`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.types.accumulation import storage_dtype
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, Digit, Shape, Type, digits, local_shape
from unity.pcg.types.varying_axes import aligned, position_along


@dataclass(frozen=True)
class PlacedTensor:
    """A tensor's global shape and parallel type on a mesh."""

    shape: Shape
    dtype: Any
    type: Type
    axes: tuple[Axis, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def storage_dtype(self) -> Any:
        """The element type in which a device stores its piece."""
        return storage_dtype(self.dtype, self.type, self.axes)

    @cached_property
    def local_shape(self) -> Shape:
        return local_shape(self.shape, self.type, self.axes)

    @cached_property
    def slices(self) -> tuple[tuple[str, Digit], ...]:
        """(axis name, digit) of every partitioned axis, in mesh order."""
        per_axis = zip(self.axes, digits(self.type, self.axes), strict=True)
        return tuple((axis.name, digit) for axis, digit in per_axis if digit is not None)

    @property
    def varying_axes(self) -> list[str]:
        """The names of the axes that the type uses."""
        return [a.name for a, s in zip(self.axes, self.type, strict=True) if s != UNUSED]

    def along(self, dim: int) -> tuple[tuple[str, Digit], ...]:
        """Return the slices of one dimension."""
        return tuple((a, d) for a, d in self.slices if d.dim == dim)

    def coordinates(self, dim: int) -> jax.Array:
        """Return the global indices along `dim` of this device's piece. Shape `[local size]`, int32."""
        return self.cut(jnp.arange(self.shape[dim], dtype=jnp.int32), [(a, Digit(0, d.outer, d.size)) for a, d in self.along(dim)])

    def find(self, indices: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
        """Return whether this device's piece has each global index of `dim`, and its local index (arbitrary if it has not)."""
        here, n = jnp.ones(indices.shape, bool), self.shape[dim]
        for axis, digit in sorted(self.along(dim), key=lambda entry: -entry[1].outer):  # the most minor digit is removed first
            minor = n // (digit.outer * digit.size)
            here &= indices // minor % digit.size == position_along(axis)
            indices = indices // (digit.size * minor) * minor + indices % minor
            n //= digit.size
        return here, indices

    def piece(self, whole: jax.Array) -> jax.Array:
        """Return this device's piece of a value that every device has computed whole."""
        return self.cut(whole, self.slices)

    def cut(self, x: jax.Array, slices: Sequence[tuple[str, Digit]]) -> jax.Array:
        """Return this device's part of `x`, cut at some of the slices."""
        done: list[Digit] = []
        for axis, digit in slices:
            x = take_digit(x, digit, position_along(axis), done)
            done.append(digit)
        return x


def outer_here(digit: Digit, done: Sequence[Digit]) -> int:
    """Return the product of the more major sizes of a digit's dimension, in a piece that is already cut at the digits in `done`."""
    outer = digit.outer
    for other in done:
        if other.dim == digit.dim and other.outer < digit.outer:
            outer //= other.size
    return outer


def take_digit(x: jax.Array, digit: Digit, index: Any, done: Sequence[Digit]) -> jax.Array:
    """Return the slice of `x` at a digit, for a device with this index along the axis.

    `done` are the digits at which `x` is already cut.
    """
    outer = outer_here(digit, done)
    n, before, after = x.shape[digit.dim], x.shape[: digit.dim], x.shape[digit.dim + 1 :]
    if outer == 1:
        size = n // digit.size
        return lax.dynamic_slice_in_dim(x, index * size, size, digit.dim)
    x = x.reshape(*before, outer, digit.size, n // (outer * digit.size), *after)
    x = lax.dynamic_index_in_dim(x, index, digit.dim + 1, keepdims=False)
    return x.reshape(*before, n // digit.size, *after)


@dataclass(frozen=True)
class Layout:
    """One application of a primitive on local pieces."""

    primitive: Any
    params: Mapping[str, Any]
    operands: tuple[PlacedTensor, ...]
    results: tuple[PlacedTensor, ...]

    def bind(self, *operands: jax.Array, **changes: Any) -> list:
        """Run the primitive on local pieces, with some parameters (those that name shapes) changed.

        Some of the pieces may depend on the position of the device while others are the same on all devices, as constants are.
        """
        out = self.primitive.bind(*aligned(list(operands)), **{**self.params, **changes})
        return list(out) if self.primitive.multiple_results else [out]
