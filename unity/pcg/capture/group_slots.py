"""One array for a weight of every group of devices, with a slice for each, so that a device holds its own group's only.

Weights of groups are paired by shape, as well as they fit, and padded with zeros.
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
from unity.pcg.ir.program import Tensor, close
from unity.pcg.types.parallel_type import Shape


@dataclass(frozen=True)
class Slots(Packed):
    """A leaf of every group, one after another in a new first dimension. All are padded to one shape."""

    own: tuple[Shape, ...]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.own

    @property
    def shape(self) -> Shape:
        """Of one slot: the largest size of every dimension."""
        given = [shape for leaf, shape in zip(self.leaves, self.shapes, strict=True) if leaf is not None]
        return tuple(map(max, zip(*given, strict=True)))

    @property
    def stacked(self) -> Shape:
        return (len(self.leaves), *self.shape)

    def join(self, library: Any, given: Sequence[Any]) -> Any:
        left, found = iter(given), []
        for leaf, shape in zip(self.leaves, self.shapes, strict=True):
            x = library.zeros(self.shape, given[0].dtype) if leaf is None else next(left)
            free = [(0, n - m) for n, m in zip(self.shape, shape, strict=True)] if leaf is not None else []
            found.append(library.pad(x, free) if any(n for _, n in free) else x)
        return library.stack(found)

    def parts(self, array: Any) -> list[Any]:
        groups = enumerate(zip(self.leaves, self.shapes, strict=True))
        return [array[(g, *(slice(n) for n in shape))] for g, (leaf, shape) in groups if leaf is not None]


@dataclass(frozen=True)
class Leaf:
    """A weight, by its number among the leaves of all arguments."""

    number: int
    tensor: Tensor


def slots_of(groups: Sequence[Sequence[Leaf]]) -> Iterator[Slots]:
    """Sets of the groups' weights: of equal shapes, then of as many dimensions where padding takes no more than a copy of each
    would; then what is left.

    Alone, with zeros for the other groups, it spares no memory, but its gradient need not be added up over groups.
    """
    rest = [list(leaves) for leaves in groups]
    for alike, least in ((str, 2), (lambda t: (t.ndim, t.dtype), 2), (lambda t: id(t), 1)):
        keys: dict[Any, None] = dict.fromkeys(alike(x.tensor) for leaves in rest for x in leaves)
        for key in keys:
            same = [sorted(_of(leaves, alike, key), key=lambda x: (-x.tensor.nbytes, x.number)) for leaves in rest]
            for row in zip_longest(*same):
                found = Slots(tuple(x and x.number for x in row), tuple(x.tensor.shape if x else () for x in row))
                if sum(x is not None for x in row) >= least and prod(found.shape) <= sum(prod(x.tensor.shape) for x in row if x):
                    yield found
                    rest = [[x for x in leaves if x not in row] for leaves in rest]


def _of(leaves: Collection[Leaf], alike: Callable[[Tensor], Any], key: Any) -> list[Leaf]:
    return [x for x in leaves if alike(x.tensor) == key]


def part_of(start: Node, shape: Shape, source: str) -> Value:
    """What a group has of its slot."""
    if start.tensors[0].shape == shape:
        return Value(start)
    closed = jax.make_jaxpr(partial(_first, shape=shape))(start.tensors[0].struct)
    (end,) = graph_of(close(closed), ["slot"]).outputs
    return Value(replace(end.node, operands=(Value(start),), attributes={"part": True}, source=source))


def is_part(node: Node) -> bool:
    """Whether an operator takes a group's part of its slot: it is taken again where it is needed, and not kept."""
    return bool(node.attributes.get("part")) and node.operands[0].node.kind == "input"


def _first(x: jax.Array, shape: Shape) -> jax.Array:
    return lax.slice(x, (0,) * x.ndim, shape)
