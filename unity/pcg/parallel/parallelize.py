"""From a serial graph and a type for everything in it to a parallel graph, every change of type an explicit operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from unity.base.errors import ParallelTypeError
from unity.pcg.analysis.rematerialization import INNER, WHOLE
from unity.pcg.ir.graph import PCG, THROUGH, Node, Value
from unity.pcg.parallel.resharding import steps
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import Type, misfit


@dataclass(frozen=True)
class Assignment:
    """A strategy: what type everything has. Nodes are those of the serial graph, by identity.

    `operands[id(node), position]` lists the types that an operand goes through, the last being the one that the operator
    wants; a shared copy makes it two. `outputs[id(graph), k]` likewise. `again` marks operands that are gathered once more in
    the backward pass instead of being kept; `recomputed` operators whose inner values are computed once more there, `rerun` those
    that run once more as wholes, for the one operator that reads them.
    """

    axes: tuple[Axis, ...]
    results: Mapping[int, tuple[Type, ...]]
    operands: Mapping[tuple[int, int], tuple[Type, ...]]
    outputs: Mapping[tuple[int, int], tuple[Type, ...]]
    again: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    recomputed: frozenset[int] = field(default_factory=frozenset)
    rerun: frozenset[int] = field(default_factory=frozenset)


def parallelize(graph: PCG, assignment: Assignment) -> PCG:
    """The parallel graph that an assignment describes. Equal changes of one value are made once.

    Raises ParallelTypeError where a tensor cannot have the type that it is given.
    """
    return _Builder(assignment).graph(graph, None)


class _Builder:
    """Copies a graph, putting parallelization operators where types change."""

    def __init__(self, assignment: Assignment) -> None:
        self.a = assignment

    def graph(self, graph: PCG, given: tuple[Type, ...] | None) -> PCG:
        """`given`: the inputs' types where they are not assigned but follow from outside (a remat's)."""
        values: dict[Value, Value] = {}
        changed: dict[tuple[Value, tuple[Type, ...]], Value] = {}
        inputs = []
        for k, node in enumerate(graph.inputs):
            types = (given[k],) if given is not None else self.a.results[id(node)]
            inputs.append(self.typed(node, (), types))
            values[Value(node)] = Value(inputs[-1])
        for node in graph.nodes:
            if node.kind == "input":
                continue
            operands = tuple(self.operand(node, p, values[v], changed) for p, v in enumerate(node.operands))
            made = self.typed(node, operands, self.a.results.get(id(node), ()))
            values.update(zip(node.results, made.results, strict=True))
        outputs = tuple(
            self.change(values[v], self.a.outputs.get((id(graph), k), ()), changed, False) for k, v in enumerate(graph.outputs)
        )
        return PCG(tuple(inputs), outputs, self.a.axes)

    def operand(self, node: Node, p: int, v: Value, changed: dict) -> Value:
        return self.change(v, self.a.operands.get((id(node), p), ()), changed, (id(node), p) in self.a.again)

    def change(self, v: Value, through: tuple[Type, ...], changed: dict, again: bool) -> Value:
        for k, goal in enumerate(through):
            last = again and k == len(through) - 1
            key = (v, goal)
            if last:
                v = self.convert(v, goal, True)
            else:
                if key not in changed:
                    changed[key] = self.convert(v, goal, False)
                v = changed[key]
        return v

    def convert(self, v: Value, goal: Type, again: bool) -> Value:
        axes = self.a.axes
        if v.type == goal:
            return v
        self.fits(v, goal, "")
        found = steps(v.type, goal, axes)
        attributes = {"again": True} if again else {}
        for k, step in enumerate(found):
            after = goal if k == len(found) - 1 else step.after
            v = Value(Node(step.kind, (v,), (v.tensor,), attributes=attributes, types=(after,), source=v.node.source))
        if not found:
            v = Value(Node("view", (v,), (v.tensor,), types=(goal,), source=v.node.source))
        return v

    def typed(self, node: Node, operands: tuple[Value, ...], types: tuple[Type, ...]) -> Node:
        inside = node.inside
        if inside is not None:
            inside = self.graph(inside, tuple(v.type for v in operands) if node.kind in THROUGH else None)
            if node.kind in THROUGH:
                types = tuple(v.type for v in inside.outputs)
        again = WHOLE if id(node) in self.a.rerun else INNER if id(node) in self.a.recomputed else 0
        attributes = {**node.attributes, "again": again} if again else node.attributes
        made = replace(node, operands=operands, types=types, inside=inside, attributes=attributes)
        for v in made.results:
            self.fits(v, v.type, node.source)
        return made

    def fits(self, v: Value, type_: Type, source: str) -> None:
        problem = misfit(v.tensor.shape, type_, self.a.axes)
        if problem:
            where = source or v.node.source or v.node.kind
            raise ParallelTypeError(f"{where}: {v.node.kind}: {problem} (docs: types#divisibility)")
