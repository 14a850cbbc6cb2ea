"""Arrays of a function's arguments that are one array for a plan: `plan.shard` makes it, and `plan.unshard` takes it apart.

A function's arguments are whole arrays to JAX, and an array lies on all devices of a mesh, in equal parts. What shall lie on some
of them only, or be divided where its parts cannot, becomes one array with others. The user's tree keeps its structure: the first
leaf of a set carries the array, and the others are empty.
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
    """Leaves, by number, that are one array (None: a place that no leaf fills)."""

    leaves: tuple[int | None, ...]

    @property
    @abstractmethod
    def shapes(self) -> tuple[Shape, ...]:
        """Of the leaves."""

    @property
    @abstractmethod
    def stacked(self) -> Shape:
        """The shape of the array."""

    @abstractmethod
    def join(self, library: Any, given: Sequence[Any]) -> Any:
        """The array of the leaves' own, in their order."""

    @abstractmethod
    def parts(self, array: Any) -> list[Any]:
        """What `join` was given."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The leaves that there are."""
        return tuple(leaf for leaf in self.leaves if leaf is not None)

    @property
    def first(self) -> int:
        """The leaf that carries the array."""
        return min(self.numbers)

    @property
    def others(self) -> tuple[int, ...]:
        """The leaves that are empty."""
        return tuple(leaf for leaf in self.numbers if leaf != self.first)

    def pack(self, arrays: Mapping[int, Any]) -> Any:
        """The array, of the leaves' own. What is on the host stays there."""
        given = [arrays[leaf] for leaf in self.numbers]
        return self.join(np, given) if all(isinstance(x, np.ndarray) for x in given) else _join(self, given)

    def unpack(self, array: Any) -> dict[int, Any]:
        """The leaves' own arrays."""
        parts = self.parts(array) if isinstance(array, np.ndarray) else _parts(self, array)
        return dict(zip(self.numbers, parts, strict=True))


@partial(jax.jit, static_argnums=0)  # an array may lie on devices of several processes
def _join(one: Packed, given: Sequence[jax.Array]) -> jax.Array:
    return one.join(jnp, given)


@partial(jax.jit, static_argnums=0)
def _parts(one: Packed, array: jax.Array) -> list[jax.Array]:
    return one.parts(array)


@dataclass(frozen=True)
class Packing:
    """All sets of a program. Leaves are those of the function's arguments, by number."""

    slots: tuple[Packed, ...]

    def __bool__(self) -> bool:
        return bool(self.slots)

    def __str__(self) -> str:
        return f"{sum(len(s.numbers) for s in self.slots)} weights packed in {len(self.slots)} arrays"

    @property
    def shapes(self) -> dict[int, Shape]:
        """The shapes that leaves have before they are packed."""
        return {leaf: shape for s in self.slots for leaf, shape in zip(s.leaves, s.shapes, strict=True) if leaf is not None}

    def pack(self, leaves: Sequence[Any], start: int = 0) -> list[Any]:
        """The leaves as the plan takes them; `start`: the number of the first of them. What is packed already stays as it is."""
        found = list(leaves)
        for s in self.slots:
            own = [(leaf - start, shape) for leaf, shape in zip(s.leaves, s.shapes, strict=True) if leaf is not None]
            if all(0 <= k < len(found) and jnp.shape(found[k]) == shape for k, shape in own):
                array = s.pack({k: x for k, x in enumerate(leaves, start)})
                library: Any = np if isinstance(array, np.ndarray) else jnp
                found[s.first - start] = array
                for k in s.others:
                    found[k - start] = library.zeros((0,), array.dtype)
        return found

    def unpack(self, leaves: Sequence[Any], start: int = 0) -> list[Any]:
        """The leaves as the user has them; `start`: the number of the first of them. What is not packed stays as it is."""
        found = list(leaves)
        for s in self.slots:
            k = s.first - start
            if 0 <= k < len(found) and jnp.shape(found[k]) == s.stacked:
                for leaf, x in s.unpack(found[k]).items():
                    found[leaf - start] = x
        return found


NOTHING = Packing(())
