"""The difference of two graphs as a value: `diff` computes it, `apply` turns the first graph into the second.

A node that both graphs have is named by its index in the first graph's `nodes`, an added node by its index in `added`. Operator
names and source lines are recorded, too, so that `apply` can restore them, but graphs that differ in nothing else compare as equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from unity.base.documents import Natural, Record
from unity.base.errors import PlanError
from unity.diff.matching import matching
from unity.diff.skeleton import name_of, unnamed
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.graph_json import payload_and_again
from unity.pcg.ir.payloads import Remat
from unity.pcg.ir.program import Body
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import UNUSED, Type

LABELS = frozenset({"name", "source", "scope"})  # fields that do not count as a difference


class Reference(NamedTuple):
    """A value of the second graph: a result of an added node, or of a node of both graphs."""

    added: bool
    node: int
    result: int

    def __str__(self) -> str:
        return f"{'+' if self.added else ''}{self.node}.{self.result}"


References = tuple[Reference, ...]


@dataclass(frozen=True, eq=False)
class RemovedNode:
    """A node that only the first graph has: its index there, and the node without its operands."""

    number: int
    node: Node


@dataclass(frozen=True, eq=False)
class AddedNode:
    """A node that only the second graph has: its index there, the node without its operands, and references to the operands."""

    number: int
    node: Node
    operands: References


@dataclass(frozen=True, eq=False)
class ChangedNode:
    """A node of both graphs whose fields, operands or nested graph differ.

    Attributes:
        number: the index of the node in the first graph.
        now: its index in the second graph.
        node: the second graph's node, without its operands and its nested graph.
        fields: the values before and after of every field that differs: tensors, attributes (without the name), types, program,
            policy, name, source, scope.
        operands: the operands before and after, if they differ.
        inside: the difference of the nested graphs, if they differ.
    """

    number: int
    now: int
    node: Node
    fields: Mapping[str, tuple[Any, Any]]
    operands: tuple[References, References] | None
    inside: GraphDiff | None

    @property
    def different(self) -> bool:
        """Whether more differs than labels: the name, the source line, the scope."""
        return self.operands is not None or not LABELS.issuperset(self.fields) or bool(self.inside)


class GraphHeader(Record):
    """The facts about a graph apart from its operators: whether its nodes have types, the mesh axes, the node count, the hash."""

    typed: bool
    axes: tuple[Axis, ...]
    nodes: Natural
    key: str


@dataclass(frozen=True, eq=False)
class GraphDiff:
    """The edits that turn one graph into another. False if the graphs are equal.

    `inputs` and `outputs` are those of the second graph, or None if they are the first graph's.
    """

    before: GraphHeader
    after: GraphHeader
    removed: tuple[RemovedNode, ...]
    added: tuple[AddedNode, ...]
    changed: tuple[ChangedNode, ...]
    inputs: References | None
    outputs: References | None

    @cached_property
    def differences(self) -> tuple[ChangedNode, ...]:
        """The changed nodes, without those whose labels alone differ."""
        return tuple(c for c in self.changed if c.different)

    def __bool__(self) -> bool:
        headers = (self.before.typed, self.before.axes) != (self.after.typed, self.after.axes)
        parts = (self.removed, self.added, self.differences)
        return headers or any(parts) or self.inputs is not None or self.outputs is not None


def diff(before: PCG, after: PCG) -> GraphDiff:
    """Return the edits from `before` to `after`, nested graphs included, for the pairs of nodes that `matching` chooses."""
    return diff_matched(before, after, matching(before, after))


def diff_matched(before: PCG, after: PCG, partner: Mapping[int, int]) -> GraphDiff:
    """Return the edits from `before` to `after`, given the second graph's index of every node that both graphs have."""
    references = _References(before, after, partner)
    old, new = before.nodes, after.nodes
    changed = (_changed((i, j), old[i], new[j], references) for i, j in sorted(partner.items()))
    return GraphDiff(
        *references.headers,
        tuple(RemovedNode(i, _without_operands(n)) for i, n in enumerate(old) if i not in partner),
        tuple(AddedNode(j, _without_operands(new[j]), references.after(new[j].operands)) for j in references.added),
        tuple(c for c in changed if c is not None),
        _if_other(references.before(Value(n) for n in before.inputs), references.after(Value(n) for n in after.inputs)),
        _if_other(references.before(before.outputs), references.after(after.outputs)),
    )


class _References:
    """The references of all values of both graphs."""

    def __init__(self, before: PCG, after: PCG, partner: Mapping[int, int]) -> None:
        self.headers = _header(before), _header(after)
        first_index = {j: i for i, j in partner.items()}
        self.added = [j for j in range(len(after.nodes)) if j not in first_index]
        place = {j: k for k, j in enumerate(self.added)}
        self.old = {id(n): (False, i) for i, n in enumerate(before.nodes)}
        self.new = {id(n): (False, first_index[j]) if j in first_index else (True, place[j]) for j, n in enumerate(after.nodes)}

    def before(self, values: Iterable[Value]) -> References:
        return tuple(Reference(*self.old[id(v.node)], v.index) for v in values)

    def after(self, values: Iterable[Value]) -> References:
        return tuple(Reference(*self.new[id(v.node)], v.index) for v in values)


def _header(graph: PCG) -> GraphHeader:
    return GraphHeader(any(n.types for n in graph.nodes), graph.axes, len(graph.nodes), graph.key)


def _without_operands(node: Node) -> Node:
    return replace(node, operands=())


def _if_other(before: References, after: References) -> References | None:
    return after if before != after else None


def _changed(numbers: tuple[int, int], old: Node, new: Node, references: _References) -> ChangedNode | None:
    fields = dict(_fields(old, new, references.headers))
    operands = references.before(old.operands), references.after(new.operands)
    inside = diff(old.inside, new.inside) if old.inside is not None and new.inside is not None else None
    inside = inside if inside is not None and (inside or inside.changed) else None
    if not fields and operands[0] == operands[1] and inside is None:
        return None
    node = replace(_without_operands(new), inside=None)
    return ChangedNode(*numbers, node, fields, operands if operands[0] != operands[1] else None, inside)


def _fields(old: Node, new: Node, headers: tuple[GraphHeader, GraphHeader]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield every field in which two nodes differ, with both values; operands and nested graphs are left out."""
    for field in ("tensors", "source", "scope"):
        pair = getattr(old, field), getattr(new, field)
        if pair[0] != pair[1]:
            yield field, pair
    if name_of(old) != name_of(new):
        yield "name", (name_of(old), name_of(new))
    attributes = unnamed(old), unnamed(new)
    if repr(sorted(attributes[0].items())) != repr(sorted(attributes[1].items())):  # not ==, by which 1, 1.0 and True are equal
        yield "attributes", attributes
    if translated_types(old, *headers) != new.types or _uses_lost_axis(old, *headers):
        yield "types", (old.types, new.types)
    programs = old.body or old.outline, new.body or new.outline
    if (programs[0] and programs[0].key) != (programs[1] and programs[1].key):
        yield "program", programs
    if isinstance(old.payload, Remat) and isinstance(new.payload, Remat) and old.payload.policy != new.payload.policy:
        yield "policy", (old.policy, new.policy)


def translated_types(node: Node, before: GraphHeader, after: GraphHeader) -> tuple[Type, ...]:
    """Return a node's types on the second graph's axes, for the same placement. A node without types is replicated."""
    if not after.typed:
        return ()
    types = node.types or ((UNUSED,) * len(before.axes),) * len(node.tensors)
    states_by_axis = [dict(zip(before.axes, t, strict=True)) for t in types]
    return tuple(tuple(states.get(a, UNUSED) for a in after.axes) for states in states_by_axis)


def _uses_lost_axis(node: Node, before: GraphHeader, after: GraphHeader) -> bool:
    """Return whether a node's types use an axis that the second graph does not have."""
    return any(s.kind != "U" and a not in after.axes for t in node.types for a, s in zip(before.axes, t, strict=True))


def apply(diff: GraphDiff, before: PCG) -> PCG:
    """Return the second graph, built from the first, with which it shares all nodes that did not change.

    Raises:
        PlanError: `before` is not the graph that the difference starts from.
    """
    if (before.key, len(before.nodes)) != (diff.before.key, diff.before.nodes):
        raise PlanError(
            f"a diff is applied to the graph that it starts from: that has the hash {diff.before.key}"
            f" and {diff.before.nodes} nodes, this one {before.key} and {len(before.nodes)}"
        )
    return _Builder(diff, before).graph()


class _Builder:
    """A builder of the second graph. A node is named by whether it is added, and its index in `added` or in the first graph."""

    def __init__(self, diff: GraphDiff, before: PCG) -> None:
        self.diff, self.nodes = diff, before.nodes
        self.number = {id(n): i for i, n in enumerate(before.nodes)}
        self.changed = {c.number: c for c in diff.changed}
        self.built: dict[tuple[bool, int], Node] = {}
        self.inputs = diff.inputs if diff.inputs is not None else self.references([Value(n) for n in before.inputs])
        self.outputs = diff.outputs if diff.outputs is not None else self.references(before.outputs)

    def graph(self) -> PCG:
        for root in (*self.inputs, *self.outputs):
            self.build((root.added, root.node))
        inputs = tuple(self.built[r.added, r.node] for r in self.inputs)
        return PCG(inputs, tuple(map(self.value, self.outputs)), self.diff.after.axes)

    def references(self, values: Sequence[Value]) -> References:
        """Return the references of values of the first graph."""
        return tuple(Reference(False, self.number[id(v.node)], v.index) for v in values)

    def value(self, r: Reference) -> Value:
        return Value(self.built[r.added, r.node], r.result)

    def build(self, root: tuple[bool, int]) -> None:
        """Build a node and all nodes that it reads, operands first. A stack, not recursion, because graphs are deep."""
        stack = [root]
        while stack:
            name = stack[-1]
            missing = [] if name in self.built else [(r.added, r.node) for r in self.operands(name)]
            missing = [other for other in missing if other not in self.built]
            if missing:
                stack += missing
            else:
                stack.pop()
                if name not in self.built:
                    self.built[name] = self.node(name)

    def operands(self, name: tuple[bool, int]) -> References:
        added, number = name
        if added:
            return self.diff.added[number].operands
        changed = self.changed.get(number)
        return changed.operands[1] if changed and changed.operands else self.references(self.nodes[number].operands)

    def node(self, name: tuple[bool, int]) -> Node:
        added, number = name
        operands = tuple(map(self.value, self.operands(name)))
        if added:
            return replace(self.diff.added[number].node, operands=operands)
        old = self.nodes[number]
        types = translated_types(old, self.diff.before, self.diff.after)
        fields = _new_fields(old, self.changed[number]) if number in self.changed else {}
        same_operands = all(v.node is w.node and v.index == w.index for v, w in zip(operands, old.operands, strict=False))
        if same_operands and len(operands) == len(old.operands) and types == old.types and not fields:
            return old
        return replace(old, **{"operands": operands, "types": types, **fields})


def _new_fields(old: Node, changed: ChangedNode) -> dict[str, Any]:
    """Return the fields of a changed node in the second graph, as arguments of `dataclasses.replace`."""
    after = {field: new for field, (_, new) in changed.fields.items()}
    fields = attribute_fields(old, after)
    after = {field: new for field, new in after.items() if field not in ("name", "attributes")}
    if "program" in after:
        fields |= program_fields(after.pop("program"))
    if changed.inside is not None:
        assert old.inside is not None
        fields["inside"] = apply(changed.inside, old.inside)
    return {**after, **fields}


def attribute_fields(node: Node, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a node's payload and recomputation, as fields, after its name and attributes are replaced by those in `values`."""
    name, attributes = values.get("name", name_of(node)), values.get("attributes", unnamed(node))
    return payload_and_again(node.kind, attributes if name is None else {**attributes, "name": name})


def program_fields(program: Any) -> dict[str, Any]:
    """Return the two fields of a node that hold a program: a body, or the outline of one that was read from a file."""
    return {"body": program, "outline": None} if isinstance(program, Body) else {"body": None, "outline": program}
