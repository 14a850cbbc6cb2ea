"""From two graphs to their difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from unity.diff.graphs.difference import Added, Changed, Diff, Frame, Reference, Removed, name_of, translated, unnamed
from unity.diff.graphs.matching import matching
from unity.pcg.ir.graph import PCG, Node, Value


def diff(before: PCG, after: PCG) -> Diff:
    """How to make `after` of `before`, with as few nodes removed and added as `matching` says. Graphs inside are compared too."""
    return between(before, after, matching(before, after))


def between(before: PCG, after: PCG, partner: Mapping[int, int]) -> Diff:
    """The difference of two graphs, some of whose nodes are the same: numbers of the first one's → those of the second's."""
    names = _Names(before, after, partner)
    old, new = before.nodes, after.nodes
    changed = (_changed((i, j), old[i], new[j], names) for i, j in sorted(partner.items()))
    return Diff(
        *names.frames,
        tuple(Removed(i, bare(n)) for i, n in enumerate(old) if i not in partner),
        tuple(Added(j, bare(new[j]), names.after(new[j].operands)) for j in names.added),
        tuple(c for c in changed if c is not None),
        _if_other(names.before(Value(n) for n in before.inputs), names.after(Value(n) for n in after.inputs)),
        _if_other(names.before(before.outputs), names.after(after.outputs)),
    )


def frame(graph: PCG) -> Frame:
    """What a graph is, apart from its operators."""
    return Frame(any(n.types for n in graph.nodes), graph.axes, len(graph.nodes), graph.key)


def bare(node: Node) -> Node:
    """A node without what it reads."""
    return replace(node, operands=())


def _lost(node: Node, before: Frame, after: Frame) -> bool:
    """Whether a node is held in some way along an axis that the second graph does not have."""
    return any(s.kind != "U" and a not in after.axes for t in node.types for a, s in zip(before.axes, t, strict=True))


class _Names:
    """References to the values of both graphs."""

    def __init__(self, before: PCG, after: PCG, partner: Mapping[int, int]) -> None:
        self.frames = frame(before), frame(after)
        kept = {j: i for i, j in partner.items()}
        self.added = [j for j in range(len(after.nodes)) if j not in kept]
        place = {j: k for k, j in enumerate(self.added)}
        self.old = {id(n): (False, i) for i, n in enumerate(before.nodes)}
        self.new = {id(n): (False, kept[j]) if j in kept else (True, place[j]) for j, n in enumerate(after.nodes)}

    def before(self, values: Iterable[Value]) -> tuple[Reference, ...]:
        return tuple(Reference(*self.old[id(v.node)], v.index) for v in values)

    def after(self, values: Iterable[Value]) -> tuple[Reference, ...]:
        return tuple(Reference(*self.new[id(v.node)], v.index) for v in values)


def _if_other(before: tuple[Reference, ...], after: tuple[Reference, ...]) -> tuple[Reference, ...] | None:
    return after if before != after else None


def _changed(numbers: tuple[int, int], old: Node, new: Node, names: _Names) -> Changed | None:
    fields = dict(_fields(old, new, names))
    operands = names.before(old.operands), names.after(new.operands)
    inside = diff(old.inside, new.inside) if old.inside is not None and new.inside is not None else None
    inside = inside if inside is not None and (inside or inside.changed) else None
    if not fields and operands[0] == operands[1] and inside is None:
        return None
    return Changed(*numbers, replace(bare(new), inside=None), fields, operands if operands[0] != operands[1] else None, inside)


def _fields(old: Node, new: Node, names: _Names) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """What differs between two nodes, but for operands and graphs inside."""
    for field in ("tensors", "source", "scope"):
        pair = getattr(old, field), getattr(new, field)
        if pair[0] != pair[1]:
            yield field, pair
    if name_of(old) != name_of(new):
        yield "name", (name_of(old), name_of(new))
    attributes = unnamed(old), unnamed(new)
    if repr(sorted(attributes[0].items())) != repr(sorted(attributes[1].items())):  # of 1, 1.0 and True no two are the same
        yield "attributes", attributes
    if translated(old, *names.frames) != new.types or _lost(old, *names.frames):
        yield "types", (old.types, new.types)
    programs = old.body or old.outline, new.body or new.outline
    if (programs[0] and programs[0].key) != (programs[1] and programs[1].key):
        yield "program", programs
    if old.attributes.get("policy") != new.attributes.get("policy"):
        yield "policy", (old.policy, new.policy)
