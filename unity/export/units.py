"""What a parallel graph is written as: one piece for each operator, with the gathers that are made again for it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from unity.export.tracing import Program, local_program
from unity.pcg.analysis.rematerialization import runs_again
from unity.pcg.capture.repetition import signature
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value


@dataclass(frozen=True, eq=False)
class Unit:
    """An operator, the changes of type (and the operators) that are made again whenever it runs, and what all of them read."""

    node: Node
    gathers: tuple[Node, ...]
    operands: tuple[Value, ...]

    @property
    def results(self) -> tuple[Value, ...]:
        return self.node.results

    @property
    def key(self) -> Hashable:
        """Equal for units that do the same with their operands."""
        number = {v: ("operand", k) for k, v in enumerate(self.operands)}
        parts: list[Hashable] = [(str(v.tensor), v.type) for v in self.operands]
        for k, node in enumerate((*self.gathers, self.node)):
            identity = node.body.identity if node.body is not None else ()
            parts.append((signature(node), identity, id(node.policy), *(number[v] for v in node.operands)))
            number.update((v, ("made", k + v.index)) for v in node.results)
        return tuple(parts)

    def program(self, graph: PCG) -> Program:
        """What runs on one device, traced."""
        given = [Node("input", (), (v.tensor,), types=(v.type,)) for v in self.operands]
        new = {v: Value(n) for v, n in zip(self.operands, given, strict=True)}
        for node in (*self.gathers, self.node):
            copied = replace(node, operands=tuple(new[v] for v in node.operands))
            new.update(zip(node.results, copied.results, strict=True))
        return local_program(PCG(tuple(given), tuple(new[v] for v in self.results), graph.axes))


def units(graph: PCG) -> list[Unit]:
    """A graph's units, in order."""
    later: set[int] = set()
    found = []
    for node in graph.nodes:
        if runs_again(node) or (
            node.kind in PARALLELIZATION
            and (id(node.operands[0].node) in later or (node.kind != "view" and node.attributes.get("again")))
        ):
            later.add(id(node))
        elif node.kind != "input":
            found.append(_unit(node, later))
    return found + [_unit(v.node, later) for v in dict.fromkeys(graph.outputs) if id(v.node) in later]


def _unit(node: Node, later: set[int]) -> Unit:
    gathers: dict[int, Node] = {}
    operands: dict[Value, None] = {}

    def read(values: Sequence[Value]) -> None:
        for v in values:
            if id(v.node) in later:
                read(v.node.operands)
                gathers.setdefault(id(v.node), v.node)
            else:
                operands.setdefault(v)

    read(node.operands)
    return Unit(node, tuple(gathers.values()), tuple(operands))
