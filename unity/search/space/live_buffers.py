"""What is held on one device, and why; and which value's memory another value lies in."""

from __future__ import annotations

from dataclasses import dataclass

from unity.pcg.capture.group_slots import is_part
from unity.pcg.ir.graph import CONSTRAIN, PARALLELIZATION, PCG, UNCHANGED, Node, Value
from unity.pcg.types.parallel_type import Type, copies

ARGUMENTS, GRADIENTS, SLOTS, RESULTS = "arguments", "gradients", "optimizer slots", "results"
NOTHING_MOVES = ("replicate", "unreplicate", "view")
NOTHING_RUNS = ((CONSTRAIN,), ("stop_gradient",))  # programs
KEPT, CHANGED, AGAIN, WORKING = "kept for the backward pass", "changed copies", "computed again", "working set"
COTANGENTS = "cotangents"
FLIGHT = "on its way between steps"
REUSED, BACKEND, WIDENED = "in the place of later gradients", "the backend's own", "as the backend's wide numbers"


@dataclass(frozen=True)
class Held:
    """Bytes on one device, why they are held, and the operator that made them."""

    why: str
    node: Node
    nbytes: float


def local(v: Value, graph: PCG) -> float:
    """Bytes of a value on one device."""
    return v.tensor.nbytes / copies(v.type, graph.axes)


def stays(node: Node) -> bool:
    """Whether a node's value lies in its operand's memory, since nothing moves, and nothing runs."""
    return node.kind in NOTHING_MOVES or (node.body is not None and node.body.primitives in NOTHING_RUNS)


def unmoved(v: Value) -> Value:
    """The value whose memory this one is."""
    while stays(v.node):
        v = v.node.operands[0]
    return v


def whole(v: Value) -> Value:
    """The value that this one is, however its type was changed."""
    while v.node.kind in UNCHANGED:
        v = v.node.operands[0]
    return v


class Lying:
    """All values of one graph: their bytes on one device, and in whose memory they lie. Looked up, as it is asked many times.

    `unmoved`: the value whose memory a value is. `kept`: the one that is kept for it: where nothing moves, or what is gathered
    again, it is what that is made of.
    """

    def __init__(self, graph: PCG) -> None:
        self.nbytes: dict[Value, float] = {}
        self.unmoved: dict[Value, Value] = {}
        self.kept: dict[Value, Value] = {}
        parts: dict[Type, int] = {}
        for node in graph.nodes:
            same = stays(node)
            again = same or is_part(node) or (node.kind in PARALLELIZATION and bool(node.attributes.get("again")))
            for v, tensor, type_ in zip(node.results, node.tensors, node.types, strict=True):
                if type_ not in parts:
                    parts[type_] = copies(type_, graph.axes)
                self.nbytes[v] = tensor.nbytes / parts[type_]
                self.unmoved[v] = self.unmoved[node.operands[0]] if same else v
                self.kept[v] = self.kept[node.operands[0]] if again else v
