"""The differences of two graphs as a list of edits in words, each at a source line of the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from unity.base.formatting import short
from unity.diff.graph_diff import ChangedNode, GraphDiff, diff_matched
from unity.diff.matching import matching
from unity.diff.placements import Placement, change_in_words, in_words, is_moved, placements
from unity.diff.skeleton import is_parallelization
from unity.pcg.analysis.recomputation_marks import in_words as recomputation_in_words
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.user_lines import line_behind
from unity.pcg.parallel.axis_names import AxisNames

REMOVED, ADDED, CHANGED = "-", "+", "~"
VERBS = {ADDED: "now computes", REMOVED: "no longer computes"}  # before the kind of an operator that only one program has


@dataclass(frozen=True)
class Edit:
    """One difference.

    Attributes:
        mark: `REMOVED`, `ADDED` or `CHANGED`.
        topic: "operator" (another computation), "type" (another parallel type), "move" (the same slices on other devices), or
            "change" (a parallelization operator).
        line: the source line.
        kind: the kind of operator.
        what: the difference in words.
    """

    mark: str
    topic: str
    line: str
    kind: str
    what: str


def edits(before: PCG, after: PCG, partner: Mapping[int, int], names: tuple[AxisNames, AxisNames]) -> tuple[Edit, ...]:
    """Return all edits: first what is removed, then the rest in the order of the second graph.

    Args:
        before: the first graph.
        after: the second graph.
        partner: the matched nodes, as `matching` returns them.
        names: the names of the mesh axes of each graph.
    """
    return tuple(_edits(before, after, partner, names))


def _edits(before: PCG, after: PCG, partner: Mapping[int, int], names: tuple[AxisNames, AxisNames]) -> Iterator[Edit]:
    of_before, of_after = (n if n.axes == g.axes else AxisNames(g.axes) for n, g in zip(names, (before, after), strict=True))
    names = of_before, of_after
    difference = diff_matched(before, after, partner)
    for r in difference.removed:
        yield _single_edit(REMOVED, before.nodes[r.number], names[0])
    for a in difference.added:
        yield _single_edit(ADDED, after.nodes[a.number], names[1])
    pair = _GraphPair(before, after, partner, names)
    for c in sorted(difference.differences, key=lambda c: c.now):
        old, new = before.nodes[c.number], after.nodes[c.now]
        line = line_of(new)
        yield from (Edit(CHANGED, topic, line, kind_of(new), what) for topic, what in pair.differences(c, old, new))
        if old.inside is not None and new.inside is not None and c.inside:
            yield from _edits(old.inside, new.inside, matching(old.inside, new.inside), names)
    yield from _boundary_edits(difference, before, after, names)


def line_of(node: Node) -> str:
    """Return the source line that a node is shown at. A parallelization operator has the line of the value that it changes."""
    return line_behind(node) if is_parallelization(node) or node.kind == "input" else short(node.source)


def kind_of(node: Node) -> str:
    """Return the kind of a node as users know it."""
    return "argument" if node.kind == "input" else node.kind


def _single_edit(mark: str, node: Node, names: AxisNames) -> Edit:
    """Return the edit of a node that only one graph has, with the names of its axes."""
    if is_parallelization(node):
        (operand,) = node.operands
        again = ", again in the backward pass" if node.again else ""
        before, after = _placements(operand.node, names)[operand.index], _placements(node, names)[0]
        return Edit(mark, "change", line_of(node), node.kind, f"{change_in_words(before, after)}{again}")
    tensors = ", ".join(map(str, node.tensors))
    placed = f", {'; '.join(map(in_words, _placements(node, names)))}" if names.axes and node.types else ""
    return Edit(mark, "operator", line_of(node), kind_of(node), f"{tensors}{placed}")


def changes_of(
    c: ChangedNode, old: Node, new: Node, before: PCG, after: PCG, partner: Mapping[int, int], names: tuple[AxisNames, AxisNames]
) -> Iterator[tuple[str, str]]:
    """Yield the topic and the words of every difference of a matched node of two graphs."""
    return _GraphPair(before, after, partner, names).differences(c, old, new)


@dataclass(frozen=True, eq=False)
class _GraphPair:
    """Two graphs and their matched nodes, from which the differences of matched nodes are described."""

    before: PCG
    after: PCG
    partner: Mapping[int, int]
    names: tuple[AxisNames, AxisNames]

    def differences(self, c: ChangedNode, old: Node, new: Node) -> Iterator[tuple[str, str]]:
        """Yield the topic and the words of every difference of a matched node."""
        if "tensors" in c.fields:
            one, other = c.fields["tensors"]
            yield "operator", f"{', '.join(map(str, one))} → {', '.join(map(str, other))}"
        elif "program" in c.fields:
            yield "operator", _program_words(*c.fields["program"])
        if "attributes" in c.fields:
            yield from _attribute_words(*c.fields["attributes"])
        if "types" in c.fields:
            yield from self.result_types(old, new)
        elif c.operands is not None and not is_parallelization(new):
            yield from self.operand_types(old, new)
        if c.operands is not None:
            yield from self.rewired_operands(old, new)

    def result_types(self, old: Node, new: Node) -> Iterator[tuple[str, str]]:
        pairs = zip(_placements(old, self.names[0]), _placements(new, self.names[1]), strict=False)
        several = len(new.tensors) > 1
        for k, (one, other) in enumerate(pairs):
            if one != other:
                yield _topic(one, other), f"{f'result {k}: ' if several else ''}{change_in_words(one, other)}"

    def operand_types(self, old: Node, new: Node) -> Iterator[tuple[str, str]]:
        for k, (v, w) in enumerate(zip(old.operands, new.operands, strict=False)):
            one, other = _placements(v.node, self.names[0])[v.index], _placements(w.node, self.names[1])[w.index]
            if one != other:
                yield _topic(one, other), f"operand {k}: {change_in_words(one, other)}"

    def rewired_operands(self, old: Node, new: Node) -> Iterator[tuple[str, str]]:
        """Yield the operands that are other values than before, apart from their types."""
        roots = [list(map(_root, node.operands)) for node in (old, new)]
        if len(roots[0]) != len(roots[1]):
            yield "move", f"reads {len(roots[1])} values, read {len(roots[0])}"
        for k, (v, w) in enumerate(zip(*roots, strict=False)):
            if self.matched.get(id(v.node)) is not w.node or v.index != w.index:
                yield "move", f"operand {k} is {_value_words(w)}, was {_value_words(v)}"

    @cached_property
    def matched(self) -> Mapping[int, Node]:
        """The second graph's node of every matched node of the first, by identity."""
        return {id(self.before.nodes[i]): self.after.nodes[j] for i, j in self.partner.items()}


def _placements(node: Node, names: AxisNames) -> tuple[Placement, ...]:
    """Return the placements of a node's results. In a serial graph every result is whole."""
    return placements([names.type(t) for t in node.types], names.shown) if node.types else ((),) * len(node.tensors)


def _root(v: Value) -> Value:
    """Return the value before all parallelization operators that led to a value."""
    while is_parallelization(v.node):
        v = v.node.operands[0]
    return v


def _value_words(v: Value) -> str:
    line = line_of(v.node)
    return f"{kind_of(v.node)}{f' ({line})' if line else ''}"


def _topic(before: Placement, after: Placement) -> str:
    return "move" if is_moved(before, after) else "type"


def _program_words(before: Any, after: Any) -> str:
    """Describe the primitives that only one of two programs with equal results has."""
    names = [list(dict.fromkeys(program.primitives)) if program else [] for program in (before, after)]
    removed, added = ([n for n in side if n not in rest] for side, rest in (names, reversed(names)))
    phrases = [f"with {', '.join(added)}"] if added else []
    phrases += [f"without {', '.join(removed)}"] if removed else []
    return f"computed {', '.join(phrases)}" if phrases else "computed with other parameters"


def _attribute_words(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for k in sorted({*before, *after}):
        if repr(before.get(k)) == repr(after.get(k)):
            continue
        if k == "again":
            yield "type", recomputation_in_words(int(after.get(k, 0)))
        else:
            yield "operator", f"{k}: {before.get(k)} → {after.get(k)}"


def _boundary_edits(diff: GraphDiff, before: PCG, after: PCG, names: tuple[AxisNames, AxisNames]) -> Iterator[Edit]:
    """Yield the edits of a graph's boundary: the order of arguments, and the number and types of results."""
    if diff.inputs is not None and len(before.inputs) == len(after.inputs) and not any(r.added for r in diff.inputs):
        yield Edit(CHANGED, "operator", "", "arguments", "are in another order")
    if diff.outputs is None:
        return
    if len(before.outputs) != len(after.outputs):
        yield Edit(CHANGED, "operator", "", "results", f"{len(after.outputs)}, were {len(before.outputs)}")
    for k, (v, w) in enumerate(zip(before.outputs, after.outputs, strict=False)):
        one, other = _placements(v.node, names[0])[v.index], _placements(w.node, names[1])[w.index]
        if one != other:
            yield Edit(CHANGED, _topic(one, other), line_of(w.node), f"result {k}", f"{change_in_words(one, other)}")
