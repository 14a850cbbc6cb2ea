"""A difference of two graphs as a list of edits in words, each at a line of the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from unity.base.formatting import short
from unity.diff.graphs.comparing import between
from unity.diff.graphs.difference import Changed, Diff
from unity.diff.graphs.matching import matching
from unity.diff.graphs.skeleton import is_change
from unity.diff.graphs.words import Marks, marks, moved, said
from unity.pcg.analysis.rematerialization import in_words
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.user_lines import line_behind

REMOVED, ADDED, CHANGED = "-", "+", "~"


@dataclass(frozen=True)
class Edit:
    """Something that is otherwise: `mark` says how, `line` where, `kind` which operator, `what` in words.

    `topic`: "operator" (what is computed), "type" (who holds and computes which part), "move" (the same, elsewhere), "change" (a
    parallelization operator).
    """

    mark: str
    topic: str
    line: str
    kind: str
    what: str


def edits(before: PCG, after: PCG, partner: Mapping[int, int]) -> tuple[Edit, ...]:
    """All edits, in the order of the second graph; what is removed comes first. `partner`: as `matching` gives it."""
    return tuple(_edits(before, after, partner))


def _edits(before: PCG, after: PCG, partner: Mapping[int, int]) -> Iterator[Edit]:
    diff = between(before, after, partner)
    for r in diff.removed:
        yield _alone(REMOVED, before.nodes[r.number], before)
    for a in diff.added:
        yield _alone(ADDED, after.nodes[a.number], after)
    sides = _Sides(before, after, partner)
    for c in sorted(diff.differences, key=lambda c: c.now):
        old, new = before.nodes[c.number], after.nodes[c.now]
        line = place(new)
        yield from (Edit(CHANGED, topic, line, called(new), what) for topic, what in sides.differences(c, old, new))
        if old.inside is not None and new.inside is not None and c.inside:
            yield from _edits(old.inside, new.inside, matching(old.inside, new.inside))
    yield from _ends(diff, before, after)


def place(node: Node) -> str:
    """Where a node is shown: its line; a parallelization operator's is that of what it changes."""
    return line_behind(node) if is_change(node) or node.kind == "input" else short(node.source)


def called(node: Node) -> str:
    """What a node is called: arguments are all of one kind."""
    return "argument" if node.kind == "input" else node.kind


def _alone(mark: str, node: Node, graph: PCG) -> Edit:
    if is_change(node):
        (operand,) = node.operands
        again = ", again in the backward pass" if node.attributes.get("again") else ""
        what = f"{said(_marks(operand.node, graph)[operand.index])} → {said(_marks(node, graph)[0])}{again}"
        return Edit(mark, "change", place(node), node.kind, what)
    tensors = ", ".join(map(str, node.tensors))
    held = f", {'; '.join(map(said, _marks(node, graph)))}" if graph.axes and node.types else ""
    return Edit(mark, "operator", place(node), called(node), f"{tensors}{held}")


@dataclass(frozen=True, eq=False)
class _Sides:
    """Both graphs, and which node of the first is which of the second."""

    before: PCG
    after: PCG
    partner: Mapping[int, int]

    def differences(self, c: Changed, old: Node, new: Node) -> Iterator[tuple[str, str]]:
        """What is otherwise with a node that is in both, by topic."""
        if "tensors" in c.fields:
            one, other = c.fields["tensors"]
            yield "operator", f"{', '.join(map(str, one))} → {', '.join(map(str, other))}"
        elif "program" in c.fields:
            yield "operator", _another(*c.fields["program"])
        if "attributes" in c.fields:
            yield from _attributes(*c.fields["attributes"])
        if "types" in c.fields:
            yield from self.types(old, new)
        elif c.operands is not None and not is_change(new):
            yield from self.operand_types(old, new)
        if c.operands is not None:
            yield from self.rewired(old, new)

    def types(self, old: Node, new: Node) -> Iterator[tuple[str, str]]:
        pairs = zip(_marks(old, self.before), _marks(new, self.after), strict=False)
        several = len(new.tensors) > 1
        for k, (one, other) in enumerate(pairs):
            if one != other:
                yield _topic(one, other), f"{f'result {k}: ' if several else ''}{said(one)} → {said(other)}"

    def operand_types(self, old: Node, new: Node) -> Iterator[tuple[str, str]]:
        for k, (v, w) in enumerate(zip(old.operands, new.operands, strict=False)):
            one, other = _marks(v.node, self.before)[v.index], _marks(w.node, self.after)[w.index]
            if one != other:
                yield _topic(one, other), f"operand {k}: {said(one)} → {said(other)}"

    def rewired(self, old: Node, new: Node) -> Iterator[tuple[str, str]]:
        """Operands that are other values, however those are held."""
        roots = [list(map(root, node.operands)) for node in (old, new)]
        if len(roots[0]) != len(roots[1]):
            yield "move", f"reads {len(roots[1])} values, read {len(roots[0])}"
        for k, (v, w) in enumerate(zip(*roots, strict=False)):
            if self.kept.get(id(v.node)) is not w.node or v.index != w.index:
                yield "move", f"operand {k} is {_said(w)}, was {_said(v)}"

    @cached_property
    def kept(self) -> Mapping[int, Node]:
        """Nodes of the first graph, by identity, as they are in the second."""
        return {id(self.before.nodes[i]): self.after.nodes[j] for i, j in self.partner.items()}


def _marks(node: Node, graph: PCG) -> Marks:
    """How devices hold a node's results; in a serial graph, whole."""
    return marks(node.types, graph.axes) if node.types else ((),) * len(node.tensors)


def root(v: Value) -> Value:
    """The value that this one is, whatever types it went through."""
    while is_change(v.node):
        v = v.node.operands[0]
    return v


def _said(v: Value) -> str:
    where = place(v.node)
    return f"{called(v.node)}{f' ({where})' if where else ''}"


def _topic(one: Any, other: Any) -> str:
    return "move" if moved(one, other) else "type"


def _another(one: Any, other: Any) -> str:
    """A program that makes a tensor like the old one's."""
    names = [list(dict.fromkeys(program.primitives)) if program else [] for program in (one, other)]
    gone, new = ([n for n in side if n not in rest] for side, rest in (names, reversed(names)))
    said = [f"with {', '.join(new)}"] if new else []
    said += [f"without {', '.join(gone)}"] if gone else []
    return f"computed {', '.join(said)}" if said else "computed with other parameters"


def _attributes(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for k in sorted({*one, *other}):
        if repr(one.get(k)) == repr(other.get(k)):
            continue
        if k == "again":
            yield "type", in_words(int(other.get(k, 0)))
        else:
            yield "operator", f"{k}: {one.get(k)} → {other.get(k)}"


def _ends(diff: Diff, before: PCG, after: PCG) -> Iterator[Edit]:
    """Arguments in another order, and results that are other values."""
    if diff.inputs is not None and len(before.inputs) == len(after.inputs) and not any(r.added for r in diff.inputs):
        yield Edit(CHANGED, "operator", "", "arguments", "are in another order")
    if diff.outputs is None:
        return
    if len(before.outputs) != len(after.outputs):
        yield Edit(CHANGED, "operator", "", "results", f"{len(after.outputs)}, were {len(before.outputs)}")
    for k, (v, w) in enumerate(zip(before.outputs, after.outputs, strict=False)):
        one, other = _marks(v.node, before)[v.index], _marks(w.node, after)[w.index]
        if one != other:
            yield Edit(CHANGED, _topic(one, other), place(w.node), f"result {k}", f"{said(one)} → {said(other)}")
