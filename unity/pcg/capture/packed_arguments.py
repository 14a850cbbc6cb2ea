"""Packed arguments: several arrays among a function's arguments that a plan stores as one (`plan.shard`, `plan.shard.unpack`).

A JAX array lies on all devices of a mesh, in equal parts. A weight that only some devices should hold, or that is too small to be
divided, is packed into one array with others. The user's pytree keeps its structure: the first leaf of a set carries the array, and
the others are empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unity.pcg.types.parallel_type import Shape


@dataclass(frozen=True)
class Packed(ABC):
    """A set of leaves, by number, that are packed into one array. None stands for padding in the place of a leaf."""

    leaves: tuple[int | None, ...]

    @property
    @abstractmethod
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the leaves."""

    @property
    @abstractmethod
    def stacked(self) -> Shape:
        """The shape of the packed array."""

    @abstractmethod
    def join(self, library: Any, arrays: Sequence[Any]) -> Any:
        """Pack the leaves' arrays, in order. `library` is numpy or jax.numpy."""

    @abstractmethod
    def parts(self, array: Any) -> list[Any]:
        """Unpack an array into the leaves' arrays, the inverse of `join`."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the leaves, without padding."""
        return tuple(leaf for leaf in self.leaves if leaf is not None)

    @property
    def first(self) -> int:
        """The leaf that carries the packed array."""
        return min(self.numbers)

    @property
    def others(self) -> tuple[int, ...]:
        """The leaves that are empty."""
        return tuple(leaf for leaf in self.numbers if leaf != self.first)

    def pack(self, arrays: Mapping[int, Any]) -> Any:
        """Return the packed array of the leaves' arrays, by number: on the host if all of them are on the host."""
        own = [arrays[leaf] for leaf in self.numbers]
        return self.join(np, own) if all(isinstance(x, np.ndarray) for x in own) else _join(self, own)

    def unpack(self, array: Any) -> dict[int, Any]:
        """Return the leaves' arrays, by number."""
        parts = self.parts(array) if isinstance(array, np.ndarray) else _parts(self, array)
        return dict(zip(self.numbers, parts, strict=True))


@partial(jax.jit, static_argnums=0)  # an array may lie on devices of several processes
def _join(packed: Packed, arrays: Sequence[jax.Array]) -> jax.Array:
    return packed.join(jnp, arrays)


@partial(jax.jit, static_argnums=0)
def _parts(packed: Packed, array: jax.Array) -> list[jax.Array]:
    return packed.parts(array)


@dataclass(frozen=True)
class Packing:
    """All packed arrays of a program, in order. Leaves are those of the function's arguments, by number.

    An array may be packed again: weights are joined, and the joined array is stored with padding.
    """

    slots: tuple[Packed, ...]

    def __bool__(self) -> bool:
        return bool(self.slots)

    def __str__(self) -> str:
        return f"{sum(len(s.numbers) for s in self.slots)} weights packed in {len(self.slots)} arrays"

    @property
    def shapes(self) -> dict[int, Shape]:
        """The shapes of packed leaves in the user's arguments, by number."""
        pairs = (pair for s in reversed(self.slots) for pair in zip(s.leaves, s.shapes, strict=True))
        return {leaf: shape for leaf, shape in pairs if leaf is not None}

    def pack(self, leaves: Sequence[Any], start: int = 0) -> list[Any]:
        """Return the leaves as the plan takes them. Packed leaves stay as they are.

        Args:
            leaves: consecutive leaves of the user's arguments.
            start: the number of the first one.
        """
        packed = list(leaves)
        for s in self.slots:
            own = [(leaf - start, shape) for leaf, shape in zip(s.leaves, s.shapes, strict=True) if leaf is not None]
            if all(0 <= k < len(packed) and jnp.shape(packed[k]) == shape for k, shape in own):
                array = s.pack({k: x for k, x in enumerate(packed, start)})
                library: Any = np if isinstance(array, np.ndarray) else jnp
                packed[s.first - start] = array
                for k in s.others:
                    packed[k - start] = library.zeros((0,), array.dtype)
        return packed

    def unpack(self, leaves: Sequence[Any], start: int = 0) -> list[Any]:
        """Return the leaves as the user has them. Leaves that are not packed stay as they are. Arguments as for `pack`."""
        unpacked = list(leaves)
        for s in reversed(self.slots):
            k = s.first - start
            if 0 <= k < len(unpacked) and jnp.shape(unpacked[k]) == s.stacked:
                for leaf, x in s.unpack(unpacked[k]).items():
                    unpacked[leaf - start] = x
        return unpacked


NOTHING = Packing(())
