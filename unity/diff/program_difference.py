"""The first difference of two programs: the earliest operator or argument that one has, or computes otherwise, and its line.

It is most often the line that was edited: whatever follows it in the program may differ because of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from unity.diff.edits import ADDED, REMOVED, VERBS, changes_of, kind_of, line_of
from unity.diff.graph_diff import AddedNode, ChangedNode, RemovedNode, diff_matched
from unity.diff.matching import matching
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.parallel.axis_names import AxisNames

_ARGUMENT = {ADDED: "is a new argument", REMOVED: "is no argument any more"}


@dataclass(frozen=True)
class FirstDifference:
    """A source line, or an argument's path, and what became different there."""

    line: str
    text: str

    def __str__(self) -> str:
        return f"{self.line} {self.text}" if self.line else self.text


def first_difference(before: PCG, after: PCG) -> FirstDifference | None:
    """Return the first difference of two captured programs, None if they compute the same in the same order."""
    return next(_in_order(before, after), None)


def _in_order(before: PCG, after: PCG) -> Iterator[FirstDifference]:
    """Yield the differences in the order of the second graph, arguments first; of nested graphs that differ, the first one."""
    partner = matching(before, after)
    difference = diff_matched(before, after, partner)
    places: list[tuple[float, AddedNode | RemovedNode | ChangedNode]] = [(a.number, a) for a in difference.added]
    for r in difference.removed:
        earlier = (partner[k] for k in range(r.number - 1, -1, -1) if k in partner)
        places.append((next(earlier, -1) + 0.5, r))
    places += [(c.now, c) for c in difference.differences]
    for _, d in sorted(places, key=lambda p: p[0]):
        match d:
            case AddedNode():
                yield _single(ADDED, after.nodes[d.number])
            case RemovedNode():
                yield _single(REMOVED, before.nodes[d.number])
            case ChangedNode():
                yield from _changed(d, before, after, partner)
    if difference.outputs is not None:
        yield FirstDifference("", "the results are other values")


def _changed(c: ChangedNode, before: PCG, after: PCG, partner: Mapping[int, int]) -> Iterator[FirstDifference]:
    """Yield the first difference of a node that both programs have, or of the graphs nested in it."""
    old, new = before.nodes[c.number], after.nodes[c.now]
    if c.inside and old.inside is not None and new.inside is not None:
        inside = first_difference(old.inside, new.inside)
        if inside is not None:
            yield inside
        return
    names = AxisNames(before.axes), AxisNames(after.axes)
    what = next((what for _, what in changes_of(c, old, new, before, after, partner, names)), "")
    yield FirstDifference(line_of(new), what if new.kind == "input" else f"{kind_of(new)}: {what}")


def _single(mark: str, node: Node) -> FirstDifference:
    """Return the difference of a node that only one program has."""
    tensors = ", ".join(map(str, node.tensors))
    if node.kind == "input":
        return FirstDifference(line_of(node), f"{_ARGUMENT[mark]} ({tensors})")
    if node.kind == "convert_element_type" and len(node.operands) == 1:
        dtype = node.operands[0].tensor.dtype
        tensors = f"{getattr(dtype, 'name', dtype)} → {tensors}"
    return FirstDifference(line_of(node), f"{VERBS[mark]} {node.kind} ({tensors})")
