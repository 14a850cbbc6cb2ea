"""Live buffers of one device, the reason each is live, and which values alias."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from unity.pcg.capture.group_slots import is_part
from unity.pcg.ir.graph import PARALLELIZATION, PCG, UNCHANGED, Node, Value
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import Type, slice_count

ARGUMENTS, GRADIENTS, SLOTS, RESULTS = "arguments", "gradients", "optimizer slots", "results"
NOTHING_MOVES = ("replicate", "unreplicate", "view")
KEPT, CHANGED, AGAIN, WORKING = "kept for the backward pass", "changed copies", "computed again", "working set"
COTANGENTS = "cotangents"
FLIGHT = "on its way between steps"
OFFLOADED = "in the memory of the host"  # not of the device
UPDATED = "optimizer slots while they are updated"  # of those in the memory of the host
REUSED, BACKEND, WIDENED = "in the place of later gradients", "the backend's own", "as the backend's wide numbers"


@dataclass(frozen=True)
class Buffer:
    """A live buffer of one device: the reason it is live, the operator that produced it, and its bytes."""

    why: str
    node: Node
    nbytes: float


def local(v: Value, graph: PCG) -> float:
    """Return the bytes of a value on one device."""
    return v.tensor.nbytes / slice_count(v.type, graph.axes)


def stays(node: Node) -> bool:
    """Return whether a node's value aliases its operand, because nothing moves and nothing runs."""
    if node.kind in NOTHING_MOVES:
        return True
    # the copy of a literal has no operand
    return node.body is not None and bool(node.operands) and _is_identity(node.body.primitives)


def _is_identity(primitives: tuple[str, ...]) -> bool:
    return len(primitives) == 1 and facts_of(primitives[0]).identity


def unmoved(v: Value) -> Value:
    """Return the value that this one aliases, or the value itself."""
    while stays(v.node):
        v = v.node.operands[0]
    return v


def whole(v: Value) -> Value:
    """Return the value before all changes of its type."""
    while v.node.kind in UNCHANGED:
        v = v.node.operands[0]
    return v


class AliasTables:
    """Tables of the values of one graph, computed once because they are looked up often.

    Attributes:
        nbytes: Bytes on one device.
        unmoved: The value that each value aliases.
        kept: The value that is the residual for each value: its operand if nothing moves, or if it is gathered again.
    """

    def __init__(self, graph: PCG, apart: Iterable[Node] = ()) -> None:
        """Tabulate the values of a graph. The results of the nodes `apart` alias no operand, even where nothing moves."""
        distinct = set(map(id, apart))
        self.nbytes: dict[Value, float] = {}
        self.unmoved: dict[Value, Value] = {}
        self.kept: dict[Value, Value] = {}
        parts: dict[Type, int] = {}
        for node in graph.nodes:
            same = stays(node) and id(node) not in distinct
            again = same or is_part(node) or (node.kind in PARALLELIZATION and bool(node.again))
            for v, tensor, type_ in zip(node.results, node.tensors, node.types, strict=True):
                if type_ not in parts:
                    parts[type_] = slice_count(type_, graph.axes)
                self.nbytes[v] = tensor.nbytes / parts[type_]
                self.unmoved[v] = self.unmoved[node.operands[0]] if same else v
                self.kept[v] = self.kept[node.operands[0]] if again else v
