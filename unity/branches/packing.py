"""Weights of branches, packed: one array for a weight of every group, with a slice for each, so that a device holds its own only.

A function's arguments are whole arrays to JAX, and an array lies on all devices of a mesh, in equal parts. So that a weight lies
on some of them only, weights of all groups become one array, partitioned in its first dimension; smaller ones are padded with
zeros. The user's tree keeps its structure. The first leaf of a set carries the array, and the others are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unity.pcg.body import Tensor, close
from unity.pcg.branches import groups_of
from unity.pcg.capture import graph_of
from unity.pcg.graph import PCG, Node, Value

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Slots:
    """One set: the leaf of every group, by its number (None: a group has none), and its shape. All are padded to one shape."""

    leaves: tuple[int | None, ...]
    shapes: tuple[Shape, ...]

    @property
    def shape(self) -> Shape:
        """Of one slot: the largest size of every dimension."""
        given = [shape for leaf, shape in zip(self.leaves, self.shapes, strict=True) if leaf is not None]
        return tuple(map(max, zip(*given, strict=True)))

    @property
    def first(self) -> int:
        """The leaf that carries the array."""
        return min(leaf for leaf in self.leaves if leaf is not None)

    @property
    def others(self) -> tuple[int, ...]:
        """The leaves that are empty."""
        return tuple(leaf for leaf in self.leaves if leaf is not None and leaf != self.first)

    @property
    def stacked(self) -> Shape:
        """The shape of the array."""
        return (len(self.leaves), *self.shape)

    def pack(self, arrays: Mapping[int, Any]) -> Any:
        """The array, of the leaves' own. What is on the host stays there."""
        given = [arrays[leaf] for leaf in self.leaves if leaf is not None]
        return self.stack(np, given) if all(isinstance(x, np.ndarray) for x in given) else _stack(self, given)

    def stack(self, library: Any, given: Sequence[Any]) -> Any:
        """The array of the leaves' own, those of the groups that have one."""
        left, found = iter(given), []
        for leaf, shape in zip(self.leaves, self.shapes, strict=True):
            x = library.zeros(self.shape, given[0].dtype) if leaf is None else next(left)
            free = [(0, n - m) for n, m in zip(self.shape, shape, strict=True)] if leaf is not None else []
            found.append(library.pad(x, free) if any(n for _, n in free) else x)
        return library.stack(found)

    def unpack(self, array: Any) -> dict[int, Any]:
        """The leaves' own arrays."""
        numbers = [leaf for leaf in self.leaves if leaf is not None]
        parts = self.parts(array) if isinstance(array, np.ndarray) else _parts(self, array)
        return dict(zip(numbers, parts, strict=True))

    def parts(self, array: Any) -> list[Any]:
        """What `stack` was given."""
        groups = enumerate(zip(self.leaves, self.shapes, strict=True))
        return [array[(g, *(slice(n) for n in shape))] for g, (leaf, shape) in groups if leaf is not None]


@partial(jax.jit, static_argnums=0)  # an array may lie on devices of several processes
def _stack(slots: Slots, given: Sequence[jax.Array]) -> jax.Array:
    return slots.stack(jnp, given)


@partial(jax.jit, static_argnums=0)
def _parts(slots: Slots, array: jax.Array) -> list[jax.Array]:
    return slots.parts(array)


class Set(Protocol):
    """Leaves that one array takes the place of: the first of them carries it, and the others are empty."""

    @property
    def leaves(self) -> tuple[int | None, ...]: ...

    @property
    def shapes(self) -> tuple[Shape, ...]: ...

    @property
    def first(self) -> int: ...

    @property
    def others(self) -> tuple[int, ...]: ...

    @property
    def stacked(self) -> Shape: ...

    def pack(self, arrays: Mapping[int, Any]) -> Any: ...

    def unpack(self, array: Any) -> dict[int, Any]: ...


@dataclass(frozen=True)
class Packing:
    """All sets of a program. Leaves are those of the function's arguments, by number."""

    slots: tuple[Set, ...]

    def __bool__(self) -> bool:
        return bool(self.slots)

    def __str__(self) -> str:
        count = sum(leaf is not None for s in self.slots for leaf in s.leaves)
        return f"{count} weights packed in {len(self.slots)} arrays"

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


def packed(graph: PCG, nodes: Sequence[Node], differentiated: Collection[int]) -> tuple[PCG, Packing]:
    """A graph with branches, their weights packed where that makes what a device holds smaller."""
    slots: list[Slots] = []
    inputs: dict[int, Node] = {}  # by id of an argument: what it becomes
    made: dict[int, Node] = {}  # by id of branches
    for node in nodes:
        found = list(_slots(_own(graph, node, differentiated)))
        for s in found:
            old = graph.inputs[s.first]
            inputs[id(old)] = replace(old, tensors=(Tensor(s.stacked, old.tensors[0].dtype),))
            for k in s.others:
                inputs[id(graph.inputs[k])] = replace(graph.inputs[k], tensors=(Tensor((0,), old.tensors[0].dtype),))
        made[id(node)] = _with_slots(graph, node, found, inputs)
        slots += found
    new: dict[int, Node] = {}
    for node in graph.nodes:
        after = inputs.get(id(node), made.get(id(node), node))
        operands = tuple(Value(new.get(id(v.node), v.node), v.index) for v in after.operands)
        same = all(v.node is w.node for v, w in zip(operands, after.operands, strict=True))
        new[id(node)] = after if same else replace(after, operands=operands)
    outputs = tuple(Value(new[id(v.node)], v.index) for v in graph.outputs)
    return PCG(tuple(new[id(n)] for n in graph.inputs), outputs, graph.axes), Packing(tuple(slots))


@dataclass(frozen=True)
class _Leaf:
    number: int
    tensor: Tensor


def _own(graph: PCG, node: Node, differentiated: Collection[int]) -> list[list[_Leaf]]:
    """Of every group the weights that nothing but it reads."""
    assert node.inside is not None
    found = []
    position = {id(n): k for k, n in enumerate(graph.inputs)}
    read = [{id(v.node) for n in group.graph.nodes for v in n.operands} for group in groups_of(node)]
    ends = {id(v.node) for v in graph.outputs}
    for group, here in enumerate(read):
        leaves = []
        for v, start in zip(node.operands, node.inside.inputs, strict=True):
            k = position.get(id(v.node), -1)
            alone = len(graph.users[id(v.node)]) == 1 and id(v.node) not in ends
            elsewhere = any(id(start) in other for g, other in enumerate(read) if g != group)
            if k in differentiated and v.tensor.floating and alone and id(start) in here and not elsewhere:
                leaves.append(_Leaf(k, v.tensor))
        found.append(leaves)
    return found


def _slots(groups: list[list[_Leaf]]) -> Iterator[Slots]:
    """Sets of equal shapes, then of as many dimensions where padding takes no more than a copy of each would; then what is left.

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


def _of(leaves: Collection[_Leaf], alike: Callable[[Tensor], Any], key: Any) -> list[_Leaf]:
    return [x for x in leaves if alike(x.tensor) == key]


def _with_slots(graph: PCG, node: Node, slots: Sequence[Slots], inputs: Mapping[int, Node]) -> Node:
    """Branches that read sets instead of weights."""
    assert node.inside is not None
    gone = {leaf for s in slots for leaf in s.leaves if leaf is not None}
    position = {id(n): k for k, n in enumerate(graph.inputs)}
    leaf_of = [position.get(id(v.node), -1) for v in node.operands]
    kept = [p for p, leaf in enumerate(leaf_of) if leaf not in gone]
    starts = {leaf_of[p]: node.inside.inputs[p] for p in range(len(leaf_of)) if leaf_of[p] in gone}
    operands = [node.operands[p] for p in kept]
    inner: dict[int, Node] = {id(node.inside.inputs[p]): node.inside.inputs[p] for p in kept}
    ends = [node.inside.inputs[p] for p in kept]
    for s in slots:
        array = inputs[id(graph.inputs[s.first])]
        tensor, number = Tensor(s.shape, array.tensors[0].dtype), len(operands)
        start = Node("input", (), (tensor,), attributes={"index": number, "name": f"slot {number}"})
        operands.append(Value(graph.inputs[s.first]))
        ends.append(start)
        for leaf, shape in zip(s.leaves, s.shapes, strict=True):
            if leaf is not None:
                inner[id(starts[leaf])] = start if shape == s.shape else _part(start, shape, node.source)
    for n in node.inside.nodes:
        if n.kind != "input":
            inner[id(n)] = replace(n, operands=tuple(Value(inner[id(v.node)], v.index) for v in n.operands))
    inside = PCG(tuple(ends), tuple(Value(inner[id(v.node)], v.index) for v in node.inside.outputs))
    attributes = {**node.attributes, "packed": " ".join(str(k) for k in range(len(kept), len(operands)))}
    return replace(node, operands=tuple(operands), inside=inside, attributes=attributes)


def _part(start: Node, shape: Shape, source: str) -> Node:
    """What a group has of its slot."""
    closed = jax.make_jaxpr(partial(_first, shape=shape))(start.tensors[0].struct)
    (end,) = graph_of(close(closed), ["slot"]).outputs
    return replace(end.node, operands=(Value(start),), source=source)


def _first(x: jax.Array, shape: Shape) -> jax.Array:
    return lax.slice(x, (0,) * x.ndim, shape)
