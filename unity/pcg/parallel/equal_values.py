"""Which values of a graph are one and the same for the compiler, so that it runs equal collectives of them once.

Two gathers of one value are equal, also if one is of the value behind a `stop_gradient`, or if it is computed twice for that: from
weights that one of two losses leaves as they are. So are gathers of two cotangents that are one value: an addition hands its
cotangent to both of its operands, and a residual stream and the branch beside it are often gathered alike.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache

from unity.pcg.ir.gradient_flow import wanted_by
from unity.pcg.ir.graph import CONSTRAIN, PCG, UNCHANGED, Node, Value
from unity.pcg.ir.program import Body
from unity.pcg.propagation.placement import placing
from unity.pcg.propagation.propagation import Solution
from unity.pcg.types.parallel_type import REPLICATED, UNUSED, State


class Names:
    """Names for the values of one parallel graph, and for their cotangents: those that are equal have equal names."""

    def __init__(self, graph: PCG) -> None:
        self.n_axes = len(graph.axes)
        self.uses: dict[Value, list[tuple[Node, int] | None]] = {}  # None: an output of the graph
        for node in graph.nodes:
            for position, v in enumerate(node.operands):
                self.uses.setdefault(v, []).append((node, position))
        for v in graph.outputs:
            self.uses.setdefault(v, []).append(None)
        self.first: dict[Node, Node] = {}  # of operators that compute the same
        known: dict[Hashable, Node] = {}
        for node in graph.nodes:
            if node.body is not None:
                key = (node.body.key, node.types, *(self.value(v) for v in node.operands))
                self.first[node] = known.setdefault(key, node)

    def value(self, v: Value) -> Hashable:
        """A value is named by what was changed, and the changes that did something to it."""
        changes = []
        while v.node.kind in UNCHANGED or _handed_on(v.node):
            if v.node.kind in UNCHANGED and v.node.kind not in ("replicate", "unreplicate", "view", CONSTRAIN):
                changes.append(_change(v.node))
            v = v.node.operands[0]
        return (id(self.first.get(v.node, v.node)), v.index, *changes)

    def cotangent(self, v: Value) -> Hashable:
        """A cotangent is named by the only place that it comes from unchanged, if there is one; of what is split, by its parts'."""
        changes = []
        while True:
            uses = self.uses.get(v, [])
            use = uses[0] if len(uses) == 1 else None
            if use is None:
                return (id(v.node), v.index, *changes)
            node, position = use
            if node.kind in UNCHANGED:
                if not _hands_back(node):
                    changes.append(_change(node))
                v = Value(node)
                continue
            found = None if node.body is None else self.inside(node, node.body, node.body.inputs[position])
            if found is None:
                return (id(v.node), v.index, *changes)
            if not isinstance(found, Value):
                return (*found, *changes)
            v = found

    def inside(self, node: Node, body: Body, variable: int) -> Value | tuple[Hashable, ...] | None:
        """What has the same cotangent as a variable of an operator's body, device by device: a result, or another variable, as a
        name; or parts of it together. None if nothing does."""
        carrier = summand_of(body, variable)
        parts = parts_of(body, carrier)
        found = placing(body, tuple(v.type for v in node.operands), node.types, self.n_axes)
        if any(s is not None and any(_state(s, v) != _state(s, variable) for v in (carrier, *parts)) for s in found):
            return None
        if parts:
            return ("parts", body.tensors[carrier].shape, *(self.part(node, body, p) for p in parts))
        if carrier in body.outputs and not _read(body, carrier):
            return Value(node, body.outputs.index(carrier))
        return None if carrier == variable else (id(node), "inside", carrier)

    def part(self, node: Node, body: Body, variable: int) -> Hashable:
        """The cotangent of a variable of an operator's body."""
        found = self.inside(node, body, variable)
        return self.cotangent(found) if isinstance(found, Value) else found or (id(node), "inside", variable)


def _handed_on(node: Node) -> bool:
    """Whether an operator does nothing but stop the gradient, or name a value for policies."""
    names = {e.name for e in node.body.equations} if node.body is not None else set()
    return bool(names) and names <= {"stop_gradient", "name"} and node.types[0] == node.operands[0].type


def _hands_back(node: Node) -> bool:
    """Whether the cotangent of a change's operand is that of its result: a sum's is that of each summand, and of a value that every
    device has and one contributes."""
    if node.kind == "contribute":
        return all(s in (t, UNUSED) for s, t in zip(node.operands[0].type, node.types[0], strict=True))
    return node.kind in ("reduce", "view", CONSTRAIN)


def _change(node: Node) -> Hashable:
    """A change of type, without what is replicated for use: that is the same value."""
    types = (node.operands[0].type, node.types[0])
    return (node.kind.removesuffix("_replicate"), *(tuple(UNUSED if s == REPLICATED else s for s in t) for t in types))


def _state(solution: Solution, variable: int) -> State:
    return UNUSED if variable in solution.unused else solution.states[variable]


def _read(body: Body, variable: int) -> bool:
    return any(variable in e.operands for e in body.equations)


@lru_cache(maxsize=65536)
def summand_of(body: Body, variable: int) -> int:
    """The last sum that a variable goes into, perhaps under another name, without being used in any other way that a gradient comes
    back."""
    wanted = wanted_by(body, (True,) * len(body.outputs))
    while variable not in body.outputs:
        users = [e for e in body.equations for a in e.operands if a == variable and not wanted.isdisjoint(e.results)]
        users = [e for e in users if e.name != "stop_gradient"]
        if len(users) != 1 or users[0].name not in ("add", "add_any", "name"):
            return variable
        variable = users[0].results[0]
    return variable


@lru_cache(maxsize=65536)
def parts_of(body: Body, variable: int) -> tuple[int, ...]:
    """The variables that a variable is split into, and is used for nothing else; none if there are no such ones."""
    users = [e for e in body.equations for a in e.operands if a == variable]
    split = len(users) == 1 and users[0].name == "split" and variable not in body.outputs
    return users[0].results if split else ()
