"""The part of a graph that is matched first: its operators without parallelization operators, and labels of their computations.

Parallelization operators are skipped, so that operands are those of the serial graph. A label is a small integer, equal for equal
content; the two skeletons of a comparison share one `Labels`.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping
from functools import cached_property
from typing import Any

from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.pcg.ir.payloads import Input

End = tuple[int, int]  # a value: the index of its node, and which of the node's results it is


class Labels:
    """A numbering of hashable values: equal values get equal numbers."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def of(self, content: Hashable) -> int:
        return self.numbers.setdefault(content, len(self.numbers))


def is_parallelization(node: Node) -> bool:
    """Return whether a node is a parallelization operator, which changes the type of one value and not its contents."""
    return node.kind in PARALLELIZATION and len(node.operands) == len(node.tensors) == 1


def name_of(node: Node) -> str | None:
    """Return a node's name, or None if it has none."""
    return node.payload.name if isinstance(node.payload, Input) else None


def unnamed(node: Node) -> dict[str, Any]:
    """Return a node's attributes without its name."""
    return {k: v for k, v in node.attributes.items() if k != "name"}


class Skeleton:
    """One of two graphs that are matched. A node is named by its index in `graph.nodes`, where operands come before users."""

    def __init__(self, graph: PCG, labels: Labels) -> None:
        self.graph, self.labels = graph, labels
        self.nodes = graph.nodes
        self.number = {id(n): k for k, n in enumerate(self.nodes)}
        self.roots: dict[int, End] = {}  # by parallelization operator, the value whose type it changes
        for k, node in enumerate(self.nodes):
            if is_parallelization(node):
                self.roots[k] = self.root(node.operands[0])
        self.operators = [k for k in range(len(self.nodes)) if k not in self.roots]
        self.inputs = [self.number[id(n)] for n in graph.inputs]
        self.operands = {k: tuple(map(self.root, self.nodes[k].operands)) for k in self.operators}
        self.outputs = tuple(map(self.root, graph.outputs))
        self.users: dict[int, list[tuple[int, int, int]]] = {k: [] for k in self.operators}  # (user, operand position, result)
        for k in self.operators:
            for position, (n, index) in enumerate(self.operands[k]):
                self.users[n].append((k, position, index))

    def root(self, v: Value) -> End:
        """Return the value before all parallelization operators that led to a value."""
        number = self.number[id(v.node)]
        return self.roots.get(number, (number, v.index))

    @cached_property
    def signature(self) -> Mapping[int, int]:
        """A label for each operator of its computation from its operands, however it is parallelized."""
        return {k: self.labels.of(_signature(self.nodes[k], self.labels)) for k in self.operators}

    @cached_property
    def form(self) -> Mapping[int, int]:
        """A label for each operator of its kind and of whether it has a nested graph: matched operators agree in it."""
        return {k: self.labels.of((self.nodes[k].kind, self.nodes[k].inside is None)) for k in self.operators}

    def above(self, inputs: Mapping[int, Hashable]) -> dict[int, int]:
        """Return a label for each operator of the whole computation that leads to it.

        Args:
            inputs: an identity for nodes that count as inputs, without their operands. Equal identities are one input.
        """
        above: dict[int, int] = {}
        for k in self.operators:
            if k in inputs:
                above[k] = self.labels.of(("input", inputs[k]))
            else:
                operands = tuple((above[n], index) for n, index in self.operands[k])
                above[k] = self.labels.of(("above", self.signature[k], operands))
        return above

    def below(self, inputs: Mapping[int, Hashable]) -> dict[int, int]:
        """Return a label for each operator of all computations that use its results, and of the inputs that these read.

        Args:
            inputs: an identity for each input that both graphs have.
        """
        outputs: dict[int, list[tuple[int, int]]] = {}
        for k, (n, index) in enumerate(self.outputs):
            outputs.setdefault(n, []).append((k, index))
        below: dict[int, int] = {}
        for k in reversed(self.operators):
            uses = sorted((below[user], position, index) for user, position, index in self.users[k])
            read_inputs = tuple(self.labels.of(inputs[n]) if n in inputs else -1 for n, _ in self.operands[k])
            below[k] = self.labels.of(("below", self.signature[k], read_inputs, tuple(uses), tuple(outputs.get(k, ()))))
        return below

    def leading_to_inputs(self, inputs: Container[int]) -> set[int]:
        """Return the operators that read one of some inputs, themselves or through a user of their results."""
        readers: set[int] = set()
        for k in reversed(self.operators):
            if any(n in inputs for n, _ in self.operands[k]) or any(user in readers for user, _, _ in self.users[k]):
                readers.add(k)
        return readers

    @cached_property
    def content(self) -> int:
        """A label of the whole graph, however it is parallelized."""
        above = self.above({n: position for position, n in enumerate(self.inputs)})
        tensors = tuple(str(self.nodes[n].tensors) for n in self.inputs)
        return self.labels.of(("graph", tensors, tuple((above[n], index) for n, index in self.outputs)))


def _signature(node: Node, labels: Labels) -> Hashable:
    program = node.body or node.outline
    inside = Skeleton(node.inside, labels).content if node.inside is not None else None
    computing = {k: v for k, v in sorted(unnamed(node).items()) if k != "again"}  # recomputation aside
    return (node.kind, repr(computing), tuple(map(str, node.tensors)), program.key if program else "", inside)
