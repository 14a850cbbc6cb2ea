"""The first difference of two programs: the earliest operator or argument that one has, or computes otherwise, and its line.

It is what a person changed: whatever follows it in the program may differ because of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from unity.diff.edits import ADDED, CHANGED, REMOVED, changes_of, kind_of, line_of
from unity.diff.graph_diff import diff_matched
from unity.diff.matching import matching
from unity.pcg.ir.graph import PCG, Node

_VERBS = {ADDED: "now computes", REMOVED: "no longer computes"}
_READS = {ADDED: "is a new argument", REMOVED: "is no argument any more"}


@dataclass(frozen=True)
class FirstDifference:
    """A source line, or an argument's path, and what became different there."""

    line: str
    text: str

    def __str__(self) -> str:
        return f"{self.line} {self.text}" if self.line else self.text


def first_difference(before: PCG, after: PCG) -> FirstDifference | None:
    """Return the first difference of two captured programs, None if they compute the same in the same order."""
    partner = matching(before, after)
    return next((_inside(d) if isinstance(d, tuple) else d for d in _in_order(before, after, partner)), None)


def _inside(graphs: tuple[PCG, PCG]) -> FirstDifference | None:
    return first_difference(*graphs)


def _in_order(before: PCG, after: PCG, partner: Mapping[int, int]) -> Iterator[FirstDifference | tuple[PCG, PCG]]:
    """Yield the differences in the order of the second graph, arguments first; of nested graphs that differ, both graphs."""
    difference = diff_matched(before, after, partner)
    places: list[tuple[float, FirstDifference | tuple[PCG, PCG]]] = []
    for a in difference.added:
        places.append((a.number, _single(ADDED, after.nodes[a.number])))
    for r in difference.removed:
        earlier = (partner[k] for k in range(r.number - 1, -1, -1) if k in partner)
        places.append((next(earlier, -1) + 0.5, _single(REMOVED, before.nodes[r.number])))
    for c in difference.differences:
        old, new = before.nodes[c.number], after.nodes[c.now]
        if c.inside and old.inside is not None and new.inside is not None:
            places.append((c.now, (old.inside, new.inside)))
        else:
            what = next((what for _, what in changes_of(c, old, new, before, after, partner)), "")
            kind = "" if new.kind == "input" else f"{kind_of(new)}: "
            places.append((c.now, FirstDifference(line_of(new), f"{kind}{what}")))
    yield from (d for _, d in sorted(places, key=lambda p: p[0]))
    if difference.outputs is not None:
        yield FirstDifference("", "the results are other values")


def _single(mark: str, node: Node) -> FirstDifference:
    """Return the difference that a node makes which only one program has."""
    assert mark != CHANGED
    tensors = ", ".join(map(str, node.tensors))
    if node.kind == "input":
        return FirstDifference(line_of(node), f"{_READS[mark]} ({tensors})")
    if node.kind == "convert_element_type" and len(node.operands) == 1:
        dtype = node.operands[0].tensor.dtype
        tensors = f"{getattr(dtype, 'name', dtype)} → {tensors}"
    return FirstDifference(line_of(node), f"{_VERBS[mark]} {node.kind} ({tensors})")
