"""The parallel graph of a serial graph and an assignment of types: every change of type becomes an explicit operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from msgspec import structs

from unity.base.errors import ParallelTypeError
from unity.pcg.ir.graph import PCG, THROUGH, Node, Value
from unity.pcg.ir.payloads import Input, Recompute
from unity.pcg.parallel.resharding import steps
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Type, misfit


@dataclass(frozen=True)
class Assignment:
    """A strategy: the type of every value of a serial graph. Keys are ids of its nodes and graphs.

    Attributes:
        axes: the mesh.
        results: by id(node), the types of the node's results.
        operands: by (id(node), position), the types that an operand is changed to in turn: first those of the copies that it shares
            with other users (`search.space.shared_copies`), and last the one that the operator reads.
        outputs: by (id(graph), position), the types that an output of a graph is changed to.
        again: operands whose last change of type the backward pass repeats instead of keeping its result.
        recomputed: operators whose inner values the backward pass recomputes.
        rerun: operators that the backward pass recomputes as a whole, for their only user.
        hosted: weights whose optimizer's state the search put in the memory of the host.
    """

    axes: tuple[Axis, ...]
    results: Mapping[int, tuple[Type, ...]]
    operands: Mapping[tuple[int, int], tuple[Type, ...]]
    outputs: Mapping[tuple[int, int], tuple[Type, ...]]
    again: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    recomputed: frozenset[int] = field(default_factory=frozenset)
    rerun: frozenset[int] = field(default_factory=frozenset)
    hosted: frozenset[int] = field(default_factory=frozenset)


def parallelize(graph: PCG, assignment: Assignment) -> PCG:
    """Return the parallel graph that an assignment describes. Equal changes of one value share their operators.

    Raises:
        ParallelTypeError: a tensor cannot be divided as its type requires.
    """
    return _Builder(assignment).graph(graph, None)


def on_one_device(graph: PCG, recomputed: frozenset[int] = frozenset(), rerun: frozenset[int] = frozenset()) -> PCG:
    """Return the parallel graph of a serial graph on one device, whose mesh has no axes. Further arguments as in `Assignment`."""
    whole = {id(n): ((),) * len(n.tensors) for n, _ in graph.walk()}
    return parallelize(graph, Assignment((), whole, {}, {}, recomputed=recomputed, rerun=rerun))


class _Builder:
    """A copy of a graph under construction, with parallelization operators where types change."""

    def __init__(self, assignment: Assignment) -> None:
        self.a = assignment

    def graph(self, graph: PCG, input_types: tuple[Type, ...] | None) -> PCG:
        """Copy a graph. Its inputs have `input_types`, those of the operands of a remat around it, or else their assigned types."""
        values: dict[Value, Value] = {}
        changed: dict[tuple[Value, tuple[Type, ...]], Value] = {}
        inputs = []
        for k, node in enumerate(graph.inputs):
            types = (input_types[k],) if input_types is not None else self.a.results[id(node)]
            inputs.append(self.marked(self.typed(node, (), types), id(node) in self.a.hosted))
            values[Value(node)] = Value(inputs[-1])
        for node in graph.nodes:
            if node.kind == "input":
                continue
            operands = tuple(self.operand(node, p, values[v], changed) for p, v in enumerate(node.operands))
            copy = self.typed(node, operands, self.a.results.get(id(node), ()))
            values.update(zip(node.results, copy.results, strict=True))
        outputs = tuple(
            self.change(values[v], self.a.outputs.get((id(graph), k), ()), changed, False) for k, v in enumerate(graph.outputs)
        )
        return PCG(tuple(inputs), outputs, self.a.axes)

    def marked(self, node: Node, is_hosted: bool) -> Node:
        """Return an input, marked if it is a weight whose optimizer's state is in the memory of the host."""
        return replace(node, payload=structs.replace(node.payload or Input(), state_on_host=True)) if is_hosted else node

    def operand(self, node: Node, p: int, v: Value, changed: dict) -> Value:
        """Return the value that a node reads as operand `p`: its producer's copy `v` after the assigned changes of type."""
        return self.change(v, self.a.operands.get((id(node), p), ()), changed, (id(node), p) in self.a.again)

    def change(self, v: Value, through: tuple[Type, ...], changed: dict, again: bool) -> Value:
        """Return a value after changes through these types.

        `changed` caches the results of shared changes. With `again`, the last change is not shared, and the backward pass repeats
        it.
        """
        again = again and bool(through)
        for goal in through[:-1] if again else through:
            if (v, goal) not in changed:
                changed[v, goal] = self.convert(v, goal, False)
            v = changed[v, goal]
        return self.convert(v, through[-1], True) if again else v

    def convert(self, v: Value, goal: Type, again: bool) -> Value:
        """Return a value after the change to one type, as parallelization operators or a view."""
        axes = self.a.axes
        if v.type == goal:
            return v
        self.check_divisibility(v, goal, "")
        sequence = steps(v.type, goal, axes)
        mark = Recompute.WHOLE if again else Recompute.NOTHING
        for k, step in enumerate(sequence):
            after = goal if k == len(sequence) - 1 else step.after
            v = Value(Node(step.kind, (v,), (v.tensor,), types=(after,), source=v.node.source, again=mark))
        if not sequence:
            v = Value(Node("view", (v,), (v.tensor,), types=(goal,), source=v.node.source))
        return v

    def typed(self, node: Node, operands: tuple[Value, ...], types: tuple[Type, ...]) -> Node:
        """Return a copy of a node with types, on operands of the parallel graph."""
        inside = node.inside
        if inside is not None:
            inside = self.graph(inside, tuple(v.type for v in operands) if node.kind in THROUGH else None)
            if node.kind in THROUGH:
                types = tuple(v.type for v in inside.outputs)
        again = Recompute.WHOLE if id(node) in self.a.rerun else Recompute.INNER if id(node) in self.a.recomputed else node.again
        copy = replace(node, operands=operands, types=types, inside=inside, again=again)
        for v in copy.results:
            self.check_divisibility(v, v.type, node.source)
        return copy

    def check_divisibility(self, v: Value, type_: Type, source: str) -> None:
        problem = misfit(v.tensor.shape, type_, self.a.axes)
        if problem:
            where = source or v.node.source or v.node.kind
            raise ParallelTypeError(f"{where}: {v.node.kind}: {problem} (docs: types#divisibility)")
