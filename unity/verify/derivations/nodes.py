"""Canonical values: graphs of operators without reshapes and transposes.

A value is a view of a node through a rearrangement. A node is an operator applied to values, in a layout that its operands
determine, so that two programs which differ only in the layout of their tensors have the same nodes. A store has equal nodes only
once, and refers to them by a hash of their contents.

A constructor (`constructors.py`) applies an operator to values. When values are replaced, their users are constructed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from unity.pcg.ir.program import Equation, Tensor, tensor_type
from unity.pcg.types.parallel_type import Shape
from unity.substitutions.language.rearrangement import Rearrangement, after, reshaped, transposed, unchanged
from unity.verify.derivations.layouts import beside, in_source_order, parts, unmoved

Params = tuple[Any, ...]  # texts, numbers, and tuples of those


@dataclass(frozen=True, eq=False)
class CanonicalNode:
    """An operator applied to values. `tensor` is the type in the node's own layout; `number` counts nodes in order of creation."""

    hash: str
    kind: str
    params: Params
    operands: tuple[CanonicalValue, ...]
    tensor: Tensor
    number: int = field(repr=False)

    @property
    def shape(self) -> Shape:
        return self.tensor.shape


@dataclass(frozen=True)
class CanonicalValue:
    """A node, viewed through a rearrangement of its layout."""

    node: CanonicalNode
    view: Rearrangement

    @property
    def shape(self) -> Shape:
        return self.view.target

    @property
    def text(self) -> str:
        """A text that only equal values share."""
        return f"{self.node.hash} {text_of(self.view)}"


def text_of(view: Rearrangement) -> str:
    """Return a rearrangement of a known source as text."""
    return f"{view.sizes} {view.permutation} {view.target}"


class NodeStore:
    """All nodes, each once."""

    def __init__(self) -> None:
        self._nodes: dict[str, CanonicalNode] = {}
        self._functions: dict[str, list[Equation]] = {}

    def node(self, kind: str, params: Params, operands: tuple[CanonicalValue, ...], tensor: Tensor) -> CanonicalNode:
        """Return the node with these contents."""
        text = "\n".join([kind, repr(params), str(tensor), *(x.text for x in operands)])
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        if name not in self._nodes:
            self._nodes[name] = CanonicalNode(name, kind, params, operands, tensor, len(self._nodes))
        return self._nodes[name]

    def unarranged(self, kind: str, params: Params, operands: tuple[CanonicalValue, ...], tensor: Tensor) -> CanonicalValue:
        """Return a node, viewed in its own layout."""
        return CanonicalValue(self.node(kind, params, operands, tensor), unchanged(tensor.shape))

    def make(self, kind: str, params: Params, operands: Iterable[CanonicalValue], dtype: Any) -> CanonicalValue:
        """Apply an operator, by its constructor."""
        return CONSTRUCTORS[kind](self, params, tuple(operands), dtype)

    def function(self, e: Equation) -> int:
        """Return the number of the function among a primitive's parameters, which its text does not identify.

        Functions are compared as objects, and numbered from 0 in order of appearance: the number is the same in every process that
        reads the same program.
        """
        equations = self._functions.setdefault(e.signature, [])
        if not any(other.identity == e.identity for other in equations):
            equations.append(e)
        return next(k for k, other in enumerate(equations) if other.identity == e.identity)

    def rearranged(self, view: Rearrangement, x: CanonicalValue) -> CanonicalValue:
        """View a value through one more rearrangement.

        Where the two cannot be composed, a "laid" node makes the first one explicit.
        """
        both = after(view, x.view)
        if both is not None:
            return canonically_viewed(CanonicalValue(x.node, both))
        transposition = transposed(view.sizes, view.permutation)
        for step in (reshaped(view.source, view.sizes), transposition, reshaped(transposition.target, view.target)):
            both = after(step, x.view)
            if both is None:
                x = self.unarranged("laid", (), (x,), tensor_type(x.shape, x.node.tensor.dtype))
                both = step
            x = canonically_viewed(CanonicalValue(x.node, both))
        return x


def canonically_viewed(x: CanonicalValue) -> CanonicalValue:
    """Return an equal value with a canonical view. The repetitions of a broadcast are equal, so they can be in any order."""
    if x.node.kind != "broadcast":
        return x
    n, *inner = x.node.shape
    flat = reshaped(x.node.shape, (n, prod(inner)))
    back = after(flat, x.view.inverse())
    dimensions = parts(back) if back is not None else None
    if back is None or dimensions is None:
        return x
    ordered = after(beside((in_source_order(dimensions[0]), unmoved(prod(inner)))), back)
    view = after(flat.inverse(), ordered) if ordered is not None else None
    return CanonicalValue(x.node, view.inverse()) if view is not None else x


def substituted(
    store: NodeStore, outputs: Iterable[CanonicalValue], instead: Mapping[CanonicalNode, CanonicalValue]
) -> tuple[CanonicalValue, ...]:
    """Replace some nodes of values by other values."""
    outputs = tuple(outputs)
    new: dict[CanonicalNode, CanonicalValue] = {}
    for node in reachable(outputs):
        operands = tuple(_replaced(store, new, x) for x in node.operands)
        if node in instead:
            new[node] = instead[node]
        elif any(a is not b for a, b in zip(operands, node.operands, strict=True)):
            new[node] = store.make(node.kind, node.params, operands, node.tensor.dtype)
    return tuple(_replaced(store, new, x) for x in outputs)


def _replaced(store: NodeStore, new: Mapping[CanonicalNode, CanonicalValue], x: CanonicalValue) -> CanonicalValue:
    return store.rearranged(x.view, new[x.node]) if x.node in new else x


def reachable(values: Iterable[CanonicalValue]) -> list[CanonicalNode]:
    """Return all nodes of values, operands before their users."""
    nodes: set[CanonicalNode] = set()
    stack = [x.node for x in values]
    while stack:
        node = stack.pop()
        if node not in nodes:
            nodes.add(node)
            stack.extend(x.node for x in node.operands)
    return sorted(nodes, key=lambda n: n.number)


Constructor = Callable[[NodeStore, Params, tuple[CanonicalValue, ...], Any], CanonicalValue]
CONSTRUCTORS: dict[str, Constructor] = {}


def constructs(*kinds: str) -> Callable[[Constructor], Constructor]:
    """Register the decorated function as the constructor of nodes of some kinds."""

    def register(constructor: Constructor) -> Constructor:
        CONSTRUCTORS.update(dict.fromkeys(kinds, constructor))
        return constructor

    return register
