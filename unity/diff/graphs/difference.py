"""What is different between two graphs, as a value: nodes removed, added and changed, and the graph's own ends and axes.

Nodes that are in both graphs go by their number in the first one's `nodes`, added ones by their place in `added`. What a node is
called, and on which line of the user's it is, is recorded too, so that the second graph can be made from the first; but graphs
that differ in nothing else are not different.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from unity.pcg.ir.graph import Node
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, Type

LABELS = frozenset({"name", "source", "scope"})  # fields that make no difference


class Reference(NamedTuple):
    """A value of the second graph: a result of a node that is kept from the first one, or of one that is added."""

    added: bool
    node: int
    result: int

    def __str__(self) -> str:
        return f"{'+' if self.added else ''}{self.node}.{self.result}"


@dataclass(frozen=True, eq=False)
class Removed:
    """A node of the first graph alone, by its number there, without its operands."""

    number: int
    node: Node


@dataclass(frozen=True, eq=False)
class Added:
    """A node of the second graph alone, by its number there, without its operands; and what it reads."""

    number: int
    node: Node
    operands: tuple[Reference, ...]


@dataclass(frozen=True, eq=False)
class Changed:
    """A node of both graphs that is otherwise in the second. `fields`: before and after, of those that differ, which are among
    tensors, attributes (without a name), types, program, policy, and what makes no difference: name, source, scope.

    `operands`: what it reads before and after, if that differs. `inside`: how the graph inside of it differs.
    """

    number: int  # in the first graph
    now: int  # in the second
    node: Node  # as it is after, without its operands and the graph inside
    fields: Mapping[str, tuple[Any, Any]]
    operands: tuple[tuple[Reference, ...], tuple[Reference, ...]] | None
    inside: Diff | None

    @property
    def different(self) -> bool:
        """Whether more differs than what it is called."""
        return self.operands is not None or not LABELS.issuperset(self.fields) or bool(self.inside)


@dataclass(frozen=True)
class Frame:
    """What a graph is, apart from its operators: whether it has types, the axes that they speak of, how many nodes, its hash."""

    typed: bool
    axes: tuple[Axis, ...]
    nodes: int
    key: str


def translated(node: Node, before: Frame, after: Frame) -> tuple[Type, ...]:
    """The types of a node that holds the same as before, on the second graph's axes. What has no types is whole everywhere."""
    if not after.typed:
        return ()
    types = node.types or ((UNUSED,) * len(before.axes),) * len(node.tensors)
    known = [dict(zip(before.axes, t, strict=True)) for t in types]
    return tuple(tuple(states.get(a, UNUSED) for a in after.axes) for states in known)


def name_of(node: Node) -> str | None:
    """What a node is called, if it has a name."""
    name = node.attributes.get("name")
    return name if isinstance(name, str) else None


def unnamed(node: Node) -> dict[str, Any]:
    """A node's attributes, but for its name."""
    return {k: v for k, v in node.attributes.items() if k != "name" or not isinstance(v, str)}


@dataclass(frozen=True, eq=False)
class Diff:
    """How to make one graph of another. False where there is no difference.

    `inputs`, `outputs`: those of the second graph, if they are not the first one's.
    """

    before: Frame
    after: Frame
    removed: tuple[Removed, ...]
    added: tuple[Added, ...]
    changed: tuple[Changed, ...]
    inputs: tuple[Reference, ...] | None
    outputs: tuple[Reference, ...] | None

    @cached_property
    def differences(self) -> tuple[Changed, ...]:
        """The changed nodes, without those that are only called otherwise."""
        return tuple(c for c in self.changed if c.different)

    def __bool__(self) -> bool:
        frames = (self.before.typed, self.before.axes) != (self.after.typed, self.after.axes)
        parts = (self.removed, self.added, self.differences)
        return frames or any(parts) or self.inputs is not None or self.outputs is not None
