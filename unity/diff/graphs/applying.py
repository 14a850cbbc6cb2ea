"""From a graph and a difference to the other graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from unity.base.errors import PlanError
from unity.diff.graphs.difference import Changed, Diff, Reference, name_of, translated, unnamed
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.program import Body


def apply(diff: Diff, before: PCG) -> PCG:
    """The second graph, made of the first: it shares with that what did not change. Raises PlanError for another graph."""
    if (before.key, len(before.nodes)) != (diff.before.key, diff.before.nodes):
        raise PlanError(
            f"a diff is applied to the graph that it starts from: that has the hash {diff.before.key}"
            f" and {diff.before.nodes} nodes, this one {before.key} and {len(before.nodes)}"
        )
    return _Builder(diff, before).graph()


class _Builder:
    def __init__(self, diff: Diff, before: PCG) -> None:
        self.diff, self.nodes = diff, before.nodes
        self.number = {id(n): i for i, n in enumerate(before.nodes)}
        self.changed = {c.number: c for c in diff.changed}
        self.made: dict[tuple[bool, int], Node] = {}
        self.inputs = diff.inputs if diff.inputs is not None else self.kept([Value(n) for n in before.inputs])
        self.outputs = diff.outputs if diff.outputs is not None else self.kept(before.outputs)

    def graph(self) -> PCG:
        for root in (*self.inputs, *self.outputs):
            self.make((root.added, root.node))
        return PCG(
            tuple(self.made[r.added, r.node] for r in self.inputs), tuple(map(self.value, self.outputs)), self.diff.after.axes
        )

    def kept(self, values: Sequence[Value]) -> tuple[Reference, ...]:
        return tuple(Reference(False, self.number[id(v.node)], v.index) for v in values)

    def value(self, r: Reference) -> Value:
        return Value(self.made[r.added, r.node], r.result)

    def make(self, root: tuple[bool, int]) -> None:
        """Makes a node and all that it reads, operands first: no recursion, graphs are deep."""
        stack = [root]
        while stack:
            name = stack[-1]
            missing = [] if name in self.made else [(r.added, r.node) for r in self.reads(name)]
            missing = [other for other in missing if other not in self.made]
            if missing:
                stack += missing
            else:
                stack.pop()
                if name not in self.made:
                    self.made[name] = self.node(name)

    def reads(self, name: tuple[bool, int]) -> tuple[Reference, ...]:
        added, number = name
        if added:
            return self.diff.added[number].operands
        changed = self.changed.get(number)
        return changed.operands[1] if changed and changed.operands else self.kept(self.nodes[number].operands)

    def node(self, name: tuple[bool, int]) -> Node:
        added, number = name
        operands = tuple(map(self.value, self.reads(name)))
        if added:
            return replace(self.diff.added[number].node, operands=operands)
        old, frames = self.nodes[number], (self.diff.before, self.diff.after)
        types = translated(old, *frames)
        changes = _changes(old, self.changed[number]) if number in self.changed else {}
        same = all(v.node is w.node and v.index == w.index for v, w in zip(operands, old.operands, strict=False))
        if same and len(operands) == len(old.operands) and types == old.types and not changes:
            return old
        return replace(old, **{"operands": operands, "types": types, **changes})


def _changes(old: Node, changed: Changed) -> dict[str, Any]:
    """A changed node's fields as they are now."""
    new = {field: after for field, (_, after) in changed.fields.items()}
    found: dict[str, Any] = {}
    if "attributes" in new or "name" in new:
        name = new.pop("name") if "name" in new else name_of(old)
        plain = new.pop("attributes") if "attributes" in new else unnamed(old)
        found["attributes"] = plain if name is None else {**plain, "name": name}
    if "program" in new:
        program = new.pop("program")
        found |= {"body": program, "outline": None} if isinstance(program, Body) else {"body": None, "outline": program}
    if changed.inside is not None:
        assert old.inside is not None
        found["inside"] = apply(changed.inside, old.inside)
    return {**new, **found}
