"""Buffers in which stages forward tensors of different shapes: `[samples, width]`, one for each element type.

The tensors that cross a cut are flattened to one row for each sample, one after the other, and padded with zeros. Messages between
all stages thus have one shape, as wide as the widest cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from unity.pcg.ir.program import Tensor
from unity.pcg.parallel.stages import Mixed


@dataclass(frozen=True)
class BufferSlot:
    """A tensor in its buffer: its sample dimension `dim`, with `block` indices for each sample, and the sizes of its `others`."""

    tensor: Tensor
    dim: int
    block: int
    others: tuple[int, ...]

    @property
    def kind(self) -> str:
        """The kind of buffer, an element type."""
        return "int8" if self.tensor.dtype == jnp.bool_ else str(self.tensor.dtype)

    @property
    def width(self) -> int:
        """The number of elements of each sample."""
        return self.block * prod(self.others)

    def flat(self, x: jax.Array) -> jax.Array:
        """Flatten the tensor, or a part of its samples, to `[samples, width]`."""
        return jnp.moveaxis(x, self.dim, 0).reshape(x.shape[self.dim] // self.block, self.width).astype(self.kind)

    def shaped(self, x: jax.Array) -> jax.Array:
        """Invert `flat`."""
        return jnp.moveaxis(x.reshape(x.shape[0] * self.block, *self.others), 0, self.dim).astype(self.tensor.dtype)


@dataclass(frozen=True)
class BufferLayout:
    """The variables in the buffers at one cut, in order, and the widths of all buffers, by kind."""

    places: Mapping[int, BufferSlot]
    widths: Mapping[str, int]

    @cached_property
    def of_kind(self) -> Mapping[str, Sequence[int]]:
        """The variables in each buffer."""
        return {kind: [v for v, place in self.places.items() if place.kind == kind] for kind in self.widths}

    def packed(self, kind: str, values: Mapping[int, Any]) -> jax.Array:
        """Pack the variables of a kind into their buffer."""
        rows = lax.concatenate([self.places[v].flat(values[v]) for v in self.of_kind[kind]], 1)
        free = self.widths[kind] - rows.shape[1]
        return lax.pad(rows, jnp.zeros((), rows.dtype), [(0, 0, 0), (0, free, 0)]) if free else rows

    def unpacked(self, kind: str, rows: jax.Array) -> list[jax.Array]:
        """Unpack the tensors of a buffer, in order."""
        tensors, start = [], 0
        for v in self.of_kind[kind]:
            end = start + self.places[v].width
            tensors.append(self.places[v].shaped(lax.slice_in_dim(rows, start, end, axis=1)))
            start = end
        return tensors

    def alike(self, other: BufferLayout, kind: str) -> bool:
        """Whether a buffer has the same variables at another cut."""
        return list(self.of_kind[kind]) == list(other.of_kind[kind])


def layouts(
    cuts: Sequence[Sequence[int]], tensors: Mapping[int, Tensor], samples: Mapping[int, int], size: int
) -> list[BufferLayout]:
    """Return the layout of the buffers at each cut, with widths that suffice for all cuts.

    Args:
        cuts: the variables that cross each cut.
        tensors: the variables' types.
        samples: the variables' sample dimensions.
        size: the number of samples.

    Raises:
        Mixed: the type of a variable cannot share a buffer with others.
    """
    slots = [{v: _place(tensors[v], samples[v], size) for v in cut} for cut in cuts]
    widths: dict[str, int] = {}
    for places in slots:
        own: dict[str, int] = {}
        for place in places.values():
            own[place.kind] = own.get(place.kind, 0) + place.width
        widths.update({kind: max(n, widths.get(kind, 0)) for kind, n in own.items()})
    ordered = dict(sorted(widths.items()))
    return [BufferLayout(places, ordered) for places in slots]


def _place(tensor: Tensor, dim: int, size: int) -> BufferSlot:
    if jnp.issubdtype(tensor.dtype, jax.dtypes.extended):
        raise Mixed(f"a stage would hand on {tensor}, which does not lie in an array with others")
    return BufferSlot(tensor, dim, tensor.shape[dim] // size, (*tensor.shape[:dim], *tensor.shape[dim + 1 :]))
