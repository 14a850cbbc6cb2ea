"""A graph as the diff matches it: operators without what parallelizes them, and labels that say what each is and where it stands.

Changes of type are looked through, so an operator reads what it would read in the serial graph. Labels are small integers, equal
where what they stand for is equal; two skeletons that are compared share one `Labels`.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping
from functools import cached_property

from unity.diff.graphs.difference import unnamed
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value

End = tuple[int, int]  # a value: the number of its node, which of its results


class Labels:
    """Numbers for whatever can be compared: equal things have equal numbers."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def of(self, thing: Hashable) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))


def is_change(node: Node) -> bool:
    """Whether a node is a parallelization operator: one value that is the same after it, held otherwise."""
    return node.kind in PARALLELIZATION and len(node.operands) == len(node.tensors) == 1


class Skeleton:
    """One of the two graphs. Nodes go by their number in `graph.nodes`; operands come before users."""

    def __init__(self, graph: PCG, labels: Labels) -> None:
        self.graph, self.labels = graph, labels
        self.nodes = graph.nodes
        self.number = {id(n): k for k, n in enumerate(self.nodes)}
        self.roots: dict[int, End] = {}  # of each change: the value that it holds otherwise
        for k, node in enumerate(self.nodes):
            if is_change(node):
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
        """The value that this one is, whatever types it went through."""
        number = self.number[id(v.node)]
        return self.roots.get(number, (number, v.index))

    @cached_property
    def signature(self) -> Mapping[int, int]:
        """What each operator computes of its operands, however it is parallelized."""
        return {k: self.labels.of(_content(self.nodes[k], self.labels)) for k in self.operators}

    @cached_property
    def form(self) -> Mapping[int, int]:
        """The kind of each operator, and whether it has a graph inside: what all that are matched agree in."""
        return {k: self.labels.of((self.nodes[k].kind, self.nodes[k].inside is None)) for k in self.operators}

    def above(self, inputs: Mapping[int, Hashable]) -> dict[int, int]:
        """For each operator, a label of all that its results are computed from. `inputs` says which inputs are the same."""
        found: dict[int, int] = {}
        for k in self.operators:
            if k in inputs:
                found[k] = self.labels.of(("input", inputs[k]))
            else:
                operands = tuple((found[n], index) for n, index in self.operands[k])
                found[k] = self.labels.of(("above", self.signature[k], operands))
        return found

    def below(self, inputs: Mapping[int, Hashable]) -> dict[int, int]:
        """For each operator, a label of all that is done with its results, and with which arguments. `inputs`: those in both."""
        leaves: dict[int, list[tuple[int, int]]] = {}
        for k, (n, index) in enumerate(self.outputs):
            leaves.setdefault(n, []).append((k, index))
        found: dict[int, int] = {}
        for k in reversed(self.operators):
            uses = sorted((found[user], position, index) for user, position, index in self.users[k])
            given = tuple(self.labels.of(inputs[n]) if n in inputs else -1 for n, _ in self.operands[k])
            found[k] = self.labels.of(("below", self.signature[k], given, tuple(uses), tuple(leaves.get(k, ()))))
        return found

    def with_arguments(self, inputs: Container[int]) -> set[int]:
        """The operators of which an argument that is in both graphs is read, by themselves or by what follows them."""
        found: set[int] = set()
        for k in reversed(self.operators):
            if any(n in inputs for n, _ in self.operands[k]) or any(user in found for user, _, _ in self.users[k]):
                found.add(k)
        return found

    @cached_property
    def content(self) -> int:
        """A label of the whole graph, however it is parallelized."""
        above = self.above({n: position for position, n in enumerate(self.inputs)})
        tensors = tuple(str(self.nodes[n].tensors) for n in self.inputs)
        return self.labels.of(("graph", tensors, tuple((above[n], index) for n, index in self.outputs)))


def _content(node: Node, labels: Labels) -> Hashable:
    program = node.body or node.outline
    inside = Skeleton(node.inside, labels).content if node.inside is not None else None
    return (node.kind, repr(plain(node)), tuple(map(str, node.tensors)), program.key if program else "", inside)


def plain(node: Node) -> dict[str, object]:
    """A node's attributes that say what is computed: not its name, and not when it is computed. In one order."""
    attributes = unnamed(node)
    return {k: attributes[k] for k in sorted(attributes) if k != "again"}
