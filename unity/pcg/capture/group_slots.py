"""Packing of weights that different groups of devices use: one weight of each group becomes a slice of an array.

The array is partitioned over the groups, so a device holds its own group's weight alone. Weights are matched by shape as far as
possible, and padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any

import jax
from jax import lax

from unity.pcg.capture.capture import graph_of
from unity.pcg.capture.packed_arguments import Packed
from unity.pcg.ir.graph import Node, Value
from unity.pcg.ir.payloads import PackedPart
from unity.pcg.ir.program import Tensor
from unity.pcg.ir.tracing import trace
from unity.pcg.types.parallel_type import Shape


@dataclass(frozen=True)
class Slots(Packed):
    """One leaf of every group, stacked along a new first dimension. All are padded to one shape.

    Attributes:
        unpadded: the shape of each group's leaf; empty for a group without one.
    """

    unpadded: tuple[Shape, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.unpadded

    @property
    def shape(self) -> Shape:
        """The shape of one slice: the largest size of every dimension."""
        shapes = [shape for leaf, shape in zip(self.leaves, self.shapes, strict=True) if leaf is not None]
        return tuple(map(max, zip(*shapes, strict=True)))

    @property
    def stacked(self) -> Shape:
        return (len(self.leaves), *self.shape)

    def join(self, library: Any, arrays: Sequence[Any]) -> Any:
        remaining, slices = iter(arrays), []
        for leaf, shape in zip(self.leaves, self.shapes, strict=True):
            x = library.zeros(self.shape, arrays[0].dtype) if leaf is None else next(remaining)
            padding = [(0, n - m) for n, m in zip(self.shape, shape, strict=True)] if leaf is not None else []
            slices.append(library.pad(x, padding) if any(n for _, n in padding) else x)
        return library.stack(slices)

    def parts(self, array: Any) -> list[Any]:
        groups = enumerate(zip(self.leaves, self.shapes, strict=True))
        return [array[(g, *(slice(n) for n in shape))] for g, (leaf, shape) in groups if leaf is not None]


@dataclass(frozen=True)
class Leaf:
    """A weight: its number among the leaves of all arguments, and its tensor."""

    number: int
    tensor: Tensor


def slots_of(groups: Sequence[Sequence[Leaf]]) -> Iterator[Slots]:
    """Yield the packed arrays: each takes at most one weight of every group.

    Weights of equal shapes come first, then weights of equal rank and dtype if padding needs no more memory than separate arrays,
    then single weights. A single weight with zeros for the other groups saves no memory, but its gradient needs no sum over groups.
    """
    remaining = [list(leaves) for leaves in groups]
    for key_of, minimum in ((str, 2), (lambda t: (t.ndim, t.dtype), 2), (lambda t: id(t), 1)):
        keys: dict[Any, None] = dict.fromkeys(key_of(x.tensor) for leaves in remaining for x in leaves)
        for key in keys:
            columns = [_largest_first(leaves, key_of, key) for leaves in remaining]
            for row in zip_longest(*columns):
                slots = Slots(tuple(x and x.number for x in row), tuple(x.tensor.shape if x else () for x in row))
                separate = [prod(x.tensor.shape) for x in row if x]
                if len(separate) >= minimum and prod(slots.shape) <= sum(separate):
                    yield slots
                    remaining = [[x for x in leaves if x not in row] for leaves in remaining]


def _largest_first(leaves: Collection[Leaf], key_of: Callable[[Tensor], Any], key: Any) -> list[Leaf]:
    """Return the leaves with this key, largest first."""
    return sorted((x for x in leaves if key_of(x.tensor) == key), key=lambda x: (-x.tensor.nbytes, x.number))


def part_of(start: Node, shape: Shape, source: str) -> Value:
    """Return a group's own weight, from its slice of the packed array: the slice without padding.

    Args:
        start: the input node of the slice.
        shape: the shape of the weight.
        source: the user's line.
    """
    if start.tensors[0].shape == shape:
        return Value(start)
    program = trace(partial(_unpad, shape=shape), [start.tensors[0].struct])
    (end,) = graph_of(program, ["slot"]).outputs
    return Value(replace(end.node, operands=(Value(start),), payload=PackedPart(), source=source))


def is_part(node: Node) -> bool:
    """Return whether an operator removes the padding of a packed weight. Its result is recomputed where it is read, never kept."""
    return isinstance(node.payload, PackedPart) and node.operands[0].node.kind == "input"


def _unpad(x: jax.Array, shape: Shape) -> jax.Array:
    return lax.slice(x, (0,) * x.ndim, shape)
