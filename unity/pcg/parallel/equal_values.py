"""Value numbering of a parallel graph: values and cotangents that are equal get equal numbers.

The compiler runs equal collectives of equal values once. Two gathers of one value are equal, also if one of them gathers it
behind a `stop_gradient`, or if the value is computed twice: for that reason, from weights that one of two losses does not train, or
by calls that stay apart for their gradients (`pcg.capture.value_numbering`). Gathers of two equal cotangents are equal, too: an
addition forwards its cotangent to both operands, and a residual stream and the branch beside it are often gathered alike, as are
two inputs of products with one weight. A weight that a remat or a loop reads, and an operator outside of it, is one value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache

from unity.pcg.ir.differentiable_dependence import differentiated
from unity.pcg.ir.gradient_flow import wanted_by
from unity.pcg.ir.graph import CONSTRAIN, PCG, UNCHANGED, Node, Value
from unity.pcg.ir.program import Body
from unity.pcg.propagation.placement import moved_waists, placing
from unity.pcg.propagation.propagation import Solution
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import REPLICATED, UNUSED, State

Around = Callable[[int], tuple[tuple[Hashable, ...], int] | None]


class ValueNumbering:
    """Numbers, which are any hashable values, for the values of one parallel graph and for their cotangents.

    Equal values have equal numbers.

    Attributes:
        n_axes: the number of mesh axes.
        uses: the users of each value, as (node, operand); None is an output of the graph.
        first: for each operator, the first operator in the graph that computes the same.
        known: the first operator with each program and operands, in this graph and those around it.
        outside: for each operator whose operands are all values around the graph, the first operator that computes the same, and
            the steps of the loops that it can be hoisted out of.
        around: returns the value around a nested graph that an input of it is, with the steps of the loop between them; None if
            it is another one in every step.
    """

    def __init__(self, graph: PCG, around: Around = lambda position: None, known: dict[Hashable, Node] | None = None) -> None:
        self.n_axes = len(graph.axes)
        self.around = around
        self.known = {} if known is None else known
        self.positions = {id(node): k for k, node in enumerate(graph.inputs)}
        self.uses: dict[Value, list[tuple[Node, int] | None]] = {}
        for node in graph.nodes:
            for position, v in enumerate(node.operands):
                self.uses.setdefault(v, []).append((node, position))
        for v in graph.outputs:
            self.uses.setdefault(v, []).append(None)
        self.first: dict[Node, Node] = {}
        self.outside: dict[Node, tuple[int, int]] = {}
        by_key: dict[Hashable, Node] = {}
        for node in graph.nodes:
            if node.body is not None:
                key = (node.body.value_key, node.types, *(self.value(v) for v in node.operands))
                self.first[node] = by_key.setdefault(key, node)
                self._compare_outside(node, node.body)

    def _compare_outside(self, node: Node, body: Body) -> None:
        """Find the first operator of all graphs that computes the same from the same operands."""
        outside = [self._outside(v) for v in node.operands]
        numbers = [self.value(v) if o is None else o[0] for v, o in zip(node.operands, outside, strict=True)]
        if node.operands:
            first = self.known.setdefault((body.value_key, node.types, *numbers), node)
            steps = [o[1] for o in outside if o is not None]
            if len(steps) == len(outside):
                self.outside[node] = id(first), min(steps)

    def value(self, v: Value) -> tuple[Hashable, ...]:
        """Return the number of a value: the operator that computes it, and the changes of type since then that moved data."""
        origin, changes = self._origin(v)
        return (id(self.first.get(origin.node, origin.node)), origin.index, *changes)

    def _origin(self, v: Value) -> tuple[Value, list[Hashable]]:
        """Return the result of an operator that a value is, and the changes of type since then that moved data."""
        changes = []
        while v.node.kind in UNCHANGED or _forwards_operand(v.node):
            if v.node.kind in UNCHANGED and v.node.kind not in ("replicate", "unreplicate", "view", CONSTRAIN):
                changes.append(_change_key(v.node))
            v = v.node.operands[0]
        return v, changes

    def value_outside(self, v: Value) -> tuple[tuple[Hashable, ...], int]:
        """Return the number of a value in the outermost graph in which it has one, and the steps of all loops between."""
        return self._outside(v) or (self.value(v), 1)

    def _outside(self, v: Value) -> tuple[tuple[Hashable, ...], int] | None:
        origin, changes = self._origin(v)
        if origin.node in self.outside:
            first, steps = self.outside[origin.node]
            return (first, origin.index, *changes), steps
        position = self.positions.get(id(origin.node))
        outside = None if position is None else self.around(position)
        return outside and ((*outside[0], *changes), outside[1])

    def cotangent(self, v: Value, products: int = 1) -> Hashable:
        """Return the number of a value's cotangent.

        A cotangent that is forwarded unchanged has the number of its unique source. That of a value that is split has the numbers
        of the parts' cotangents, and that of an operand of a product the numbers of the result's and of the other operand.

        Args:
            v: the value.
            products: the number of products that the cotangent is followed through. Those of a long chain would be compared at
                each of its values.
        """
        changes = []
        while True:
            uses = self.uses.get(v, [])
            use = uses[0] if len(uses) == 1 else None
            if use is None:
                return (id(v.node), v.index, *changes)
            node, position = use
            if node.kind in UNCHANGED:
                if not forwards_cotangent(node):
                    changes.append(_change_key(node))
                v = Value(node)
                continue
            source = None if node.body is None else self._source_inside(node, node.body, node.body.inputs[position])
            if source is None:
                if products and node.body is not None and _is_product(node.body):
                    other, result = self.value(node.operands[1 - position]), self.cotangent(Value(node), products - 1)
                    return ("product", node.body.key, position, *node.types, v.type, other, result, *changes)
                return (id(v.node), v.index, *changes)
            if not isinstance(source, Value):
                return (*source, *changes)
            v = source

    def _source_inside(self, node: Node, body: Body, variable: int) -> Value | tuple[Hashable, ...] | None:
        """Return the source of the cotangent of a variable in an operator's body, if every device forwards it unchanged.

        The source is a result of the operator, or the number of another variable's cotangent or of its parts'.
        """
        solutions = placing(body, tuple(v.type for v in node.operands), node.types, self.n_axes)
        moved = moved_waists(solutions)
        total = summand_of(body, variable, moved)
        parts = () if total in moved else parts_of(body, total)
        if any(s is not None and any(_state(s, v) != _state(s, variable) for v in (total, *parts)) for s in solutions):
            return None
        if parts:
            return ("parts", body.tensors[total].shape, *(self._number_inside(node, body, p) for p in parts))
        if total in body.outputs and not _is_read(body, total):
            return Value(node, body.outputs.index(total))
        return None if total == variable else (id(node), "inside", total)

    def _number_inside(self, node: Node, body: Body, variable: int) -> Hashable:
        """Return the number of the cotangent of a variable in an operator's body."""
        source = self._source_inside(node, body, variable)
        return self.cotangent(source) if isinstance(source, Value) else source or (id(node), "inside", variable)


def _is_product(body: Body) -> bool:
    """Return whether a program is a product of its two inputs alone."""
    return len(body.equations) == 1 and facts_of(body.equations[0].name).product and len(body.inputs) == 2


def _forwards_operand(node: Node) -> bool:
    """Return whether an operator does nothing but stop the gradient, or name a value for checkpoint policies."""
    names = {e.name for e in node.body.equations} if node.body is not None else set()
    return bool(names) and names <= {"stop_gradient", "name"} and node.types[0] == node.operands[0].type


def forwards_cotangent(node: Node) -> bool:
    """Return whether a change of type forwards the cotangent of its result to its operand unchanged.

    It does for a sum, whose summands have the sum's cotangent, and for a value that all devices hold and one contributes to a sum.
    """
    if node.kind == "contribute":
        return all(s in (t, UNUSED) for s, t in zip(node.operands[0].type, node.types[0], strict=True))
    return node.kind in ("reduce", "view", CONSTRAIN)


def _change_key(node: Node) -> Hashable:
    """Return a key of a change of type. It does not tell replicated-for-use from unused, where devices hold the same values."""
    types = (node.operands[0].type, node.types[0])
    return (node.kind.removesuffix("_replicate"), *(tuple(UNUSED if s == REPLICATED else s for s in t) for t in types))


def _state(solution: Solution, variable: int) -> State:
    return UNUSED if variable in solution.unused else solution.states[variable]


def _is_read(body: Body, variable: int) -> bool:
    return any(variable in e.operands for e in body.equations)


@lru_cache(maxsize=65536)
def summand_of(body: Body, variable: int, moved: frozenset[int] = frozenset()) -> int:
    """Return the last variable of the chain of additions that a variable is a summand of, or the first that is moved inside.

    Every variable of the chain must have no other user that a gradient comes back from. Without an addition, return the variable.
    """
    active = wanted_by(body, (True,) * len(body.outputs))
    while variable not in body.outputs and variable not in moved:
        users = [e for e in body.equations if not active.isdisjoint(e.results) for a in differentiated(e) if a == variable]
        if len(users) != 1 or users[0].name not in ("add", "add_any", "name"):
            return variable
        variable = users[0].results[0]
    return variable


@lru_cache(maxsize=65536)
def parts_of(body: Body, variable: int) -> tuple[int, ...]:
    """Return the variables that a variable is split into, if the split is its only user; otherwise an empty tuple."""
    users = [e for e in body.equations for a in e.operands if a == variable]
    split = len(users) == 1 and users[0].name == "split" and variable not in body.outputs
    return users[0].results if split else ()
