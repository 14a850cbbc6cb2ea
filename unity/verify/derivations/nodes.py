"""Normal forms of values: graphs of operators in which reshapes and transposes are no operators.

A value is a node seen through a rearrangement. A node is an operator of values, with a layout of its own that its operands
determine, so that two programs which differ only in how their tensors are laid out have the same nodes. Equal nodes are one
object of a store, and are named by the hash of all that they are made of.

A constructor (`constructors.py`) gives the value of an operator of other values. A change of some values is carried to what is
made of them by constructing that again.
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
from unity.verify.derivations.layouts import beside, in_order, parts, still

Params = tuple[Any, ...]  # texts, numbers, and tuples of those


@dataclass(frozen=True, eq=False)
class CanonicalNode:
    """An operator applied to values. `tensor` is its type in its own layout; `number` tells what was made before what."""

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
    """A node, seen through a rearrangement of its own layout."""

    node: CanonicalNode
    view: Rearrangement

    @property
    def shape(self) -> Shape:
        return self.view.target

    @property
    def text(self) -> str:
        """Equal for equal values of a store, and for no others."""
        return f"{self.node.hash} {text_of(self.view)}"


def text_of(view: Rearrangement) -> str:
    """A rearrangement as text. Where it comes from is known."""
    return f"{view.sizes} {view.permutation} {view.target}"


class NodeStore:
    """All nodes that have been made, each once."""

    def __init__(self) -> None:
        self._nodes: dict[str, CanonicalNode] = {}
        self._functions: dict[str, list[Equation]] = {}

    def node(self, kind: str, params: Params, operands: tuple[CanonicalValue, ...], tensor: Tensor) -> CanonicalNode:
        """The node that is made of these."""
        text = "\n".join([kind, repr(params), str(tensor), *(x.text for x in operands)])
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        if name not in self._nodes:
            self._nodes[name] = CanonicalNode(name, kind, params, operands, tensor, len(self._nodes))
        return self._nodes[name]

    def as_it_is(self, kind: str, params: Params, operands: tuple[CanonicalValue, ...], tensor: Tensor) -> CanonicalValue:
        """The node, seen as it lies."""
        return CanonicalValue(self.node(kind, params, operands, tensor), unchanged(tensor.shape))

    def make(self, kind: str, params: Params, operands: Iterable[CanonicalValue], dtype: Any) -> CanonicalValue:
        """An operator of values."""
        return CONSTRUCTORS[kind](self, params, tuple(operands), dtype)

    def function(self, e: Equation) -> int:
        """Which of the functions that the text of an equation does not tell apart it has: the first of them is 0, and so on.

        Functions are compared as objects; their number, unlike those, is the same in every process that reads the same program.
        """
        known = self._functions.setdefault(e.signature, [])
        if not any(other.identity == e.identity for other in known):
            known.append(e)
        return next(k for k, other in enumerate(known) if other.identity == e.identity)

    def rearranged(self, view: Rearrangement, x: CanonicalValue) -> CanonicalValue:
        """A value seen through one more rearrangement."""
        both = after(view, x.view)
        if both is not None:
            return settled(CanonicalValue(x.node, both))
        turned = transposed(view.sizes, view.permutation)
        for step in (reshaped(view.source, view.sizes), turned, reshaped(turned.target, view.target)):
            both = after(step, x.view)
            if both is None:
                x = self.as_it_is("laid", (), (x,), tensor_type(x.shape, x.node.tensor.dtype))
                both = step
            x = settled(CanonicalValue(x.node, both))
        return x


def settled(x: CanonicalValue) -> CanonicalValue:
    """The same value. What is repeated is all the same, so its parts may as well lie in the order in which they are seen."""
    if x.node.kind != "broadcast":
        return x
    n, *inner = x.node.shape
    flat = reshaped(x.node.shape, (n, prod(inner)))
    back = after(flat, x.view.inverse())
    found = parts(back) if back is not None else None
    if back is None or found is None:
        return x
    turned = after(beside((in_order(found[0]), still(prod(inner)))), back)
    whole = after(flat.inverse(), turned) if turned is not None else None
    return CanonicalValue(x.node, whole.inverse()) if whole is not None else x


def substituted(
    store: NodeStore, outputs: Iterable[CanonicalValue], instead: Mapping[CanonicalNode, CanonicalValue]
) -> tuple[CanonicalValue, ...]:
    """Values in which other values take the place of some nodes."""
    outputs = tuple(outputs)
    new: dict[CanonicalNode, CanonicalValue] = {}
    for node in reachable(outputs):
        operands = tuple(_of(store, new, x) for x in node.operands)
        if node in instead:
            new[node] = instead[node]
        elif any(a is not b for a, b in zip(operands, node.operands, strict=True)):
            new[node] = store.make(node.kind, node.params, operands, node.tensor.dtype)
    return tuple(_of(store, new, x) for x in outputs)


def _of(store: NodeStore, new: Mapping[CanonicalNode, CanonicalValue], x: CanonicalValue) -> CanonicalValue:
    return store.rearranged(x.view, new[x.node]) if x.node in new else x


def reachable(values: Iterable[CanonicalValue]) -> list[CanonicalNode]:
    """The nodes that values are made of, operands before what uses them."""
    found: set[CanonicalNode] = set()
    stack = [x.node for x in values]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(x.node for x in node.operands)
    return sorted(found, key=lambda n: n.number)


Constructor = Callable[[NodeStore, Params, tuple[CanonicalValue, ...], Any], CanonicalValue]
CONSTRUCTORS: dict[str, Constructor] = {}


def constructs(*kinds: str) -> Callable[[Constructor], Constructor]:
    """Registers how nodes of some kinds are made."""

    def register(constructor: Constructor) -> Constructor:
        CONSTRUCTORS.update(dict.fromkeys(kinds, constructor))
        return constructor

    return register
