"""Tensors of different shapes that stages hand on, as one buffer for each type of element: `[samples, width]`.

What crosses a cut lies flat in a row for each sample, one tensor after another; what is left of a row is zeros. So what is sent is
alike between all stages, though it is as wide as the widest cut needs.
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
class Place:
    """Where a tensor lies in its buffer. `dim`: its samples, of which each has `block` indices; `others`: its other dimensions."""

    tensor: Tensor
    dim: int
    block: int
    others: tuple[int, ...]

    @property
    def kind(self) -> str:
        """The buffer that it is in."""
        return "int8" if self.tensor.dtype == jnp.bool_ else str(self.tensor.dtype)

    @property
    def width(self) -> int:
        """Elements of each sample."""
        return self.block * prod(self.others)

    def flat(self, x: jax.Array) -> jax.Array:
        """`[samples, width]`: the tensor, or that of some of its samples, as it lies in a buffer."""
        return jnp.moveaxis(x, self.dim, 0).reshape(x.shape[self.dim] // self.block, self.width).astype(self.kind)

    def shaped(self, x: jax.Array) -> jax.Array:
        """The inverse of `flat`."""
        return jnp.moveaxis(x.reshape(x.shape[0] * self.block, *self.others), 0, self.dim).astype(self.tensor.dtype)


@dataclass(frozen=True)
class Layout:
    """What lies in the buffers at one cut, by its variables, in order. `widths`: of all buffers, by kind."""

    places: Mapping[int, Place]
    widths: Mapping[str, int]

    @cached_property
    def of_kind(self) -> Mapping[str, Sequence[int]]:
        """The variables in each buffer."""
        return {kind: [v for v, place in self.places.items() if place.kind == kind] for kind in self.widths}

    def packed(self, kind: str, values: Mapping[int, Any]) -> jax.Array:
        """The buffer of a kind that has something in it."""
        rows = lax.concatenate([self.places[v].flat(values[v]) for v in self.of_kind[kind]], 1)
        free = self.widths[kind] - rows.shape[1]
        return lax.pad(rows, jnp.zeros((), rows.dtype), [(0, 0, 0), (0, free, 0)]) if free else rows

    def unpacked(self, kind: str, rows: jax.Array) -> list[jax.Array]:
        """The tensors in a buffer, in order."""
        found, start = [], 0
        for v in self.of_kind[kind]:
            end = start + self.places[v].width
            found.append(self.places[v].shaped(lax.slice_in_dim(rows, start, end, axis=1)))
            start = end
        return found

    def alike(self, other: Layout, kind: str) -> bool:
        """Whether the same lies in a buffer at another cut."""
        return list(self.of_kind[kind]) == list(other.of_kind[kind])


def layouts(cuts: Sequence[Sequence[int]], tensors: Mapping[int, Tensor], samples: Mapping[int, int], size: int) -> list[Layout]:
    """How what crosses each cut lies in buffers that are wide enough for all of them. `samples`, `size`: as a chain has them.

    Raises Mixed if something that crosses is of no type that can be sent with others.
    """
    found = [{v: _place(tensors[v], samples[v], size) for v in cut} for cut in cuts]
    widths: dict[str, int] = {}
    for places in found:
        own: dict[str, int] = {}
        for place in places.values():
            own[place.kind] = own.get(place.kind, 0) + place.width
        widths.update({kind: max(n, widths.get(kind, 0)) for kind, n in own.items()})
    ordered = dict(sorted(widths.items()))
    return [Layout(places, ordered) for places in found]


def _place(tensor: Tensor, dim: int, size: int) -> Place:
    if jnp.issubdtype(tensor.dtype, jax.dtypes.extended):
        raise Mixed(f"a stage would hand on {tensor}, which does not lie in an array with others")
    return Place(tensor, dim, tensor.shape[dim] // size, (*tensor.shape[:dim], *tensor.shape[dim + 1 :]))
