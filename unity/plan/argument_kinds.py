"""The arguments of a plan by kind: those of one shape and type whose names differ in a layer's number alone."""

from __future__ import annotations

from dataclasses import dataclass

from unity.base.formatting import pattern
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.types.parallel_type import Type
from unity.search.memory.memory import local


@dataclass(frozen=True)
class ArgumentKind:
    """Arguments of one shape and type whose names differ in numbers only.

    Attributes:
        name: the name, with `*` for its numbers.
        node: one of the arguments.
        paths: the names of all of them.
        whole: the bytes of all of them.
        here: the bytes of their pieces on one device.
    """

    name: str
    node: Node
    paths: tuple[str, ...]
    whole: float
    here: float

    @property
    def count(self) -> int:
        """The number of arguments."""
        return len(self.paths)


def argument_kinds(graph: PCG) -> tuple[ArgumentKind, ...]:
    """Return the arguments of a parallel graph, those that take the most memory on a device first."""
    by_content: dict[tuple[str, str, tuple[Type, ...]], ArgumentKind] = {}
    for node in graph.inputs:
        name, whole, here = pattern(node.name or "input"), node.tensors[0].nbytes, local(Value(node), graph)
        key = name, str(node.tensors[0]), node.types
        kind = by_content.get(key, ArgumentKind(name, node, (), 0.0, 0.0))
        by_content[key] = ArgumentKind(name, kind.node, (*kind.paths, node.name), kind.whole + whole, kind.here + here)
    return tuple(sorted(by_content.values(), key=lambda k: -k.here))
