"""Transfer of users' lines to operators that were traced again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile

from unity.pcg.capture.capture import graph_of
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.program import Body
from unity.transforms.pipelining.splice import within


def named(graph: PCG, before: PCG) -> PCG:
    """Return a graph with another's lines, if both have the same operators in the same order; otherwise unchanged."""
    return beginning(graph, before) if _kinds(graph) == _kinds(before) else graph


def beginning(graph: PCG, before: PCG) -> PCG:
    """Return a graph with another's lines, for the common prefix of their operators."""
    changed = {}
    for node, old in takewhile(lambda pair: pair[0].kind == pair[1].kind, zip(_operators(graph), _operators(before), strict=False)):
        inside = node.inside
        if inside is not None and old.inside is not None:
            inside = named(inside, old.inside)
        changed[id(node)] = replace(node, inside=inside, source=old.source, scope=old.scope)
    return with_nodes(graph, changed)


def with_steps(graph: PCG, scope: str, step: Body) -> PCG:
    """Return a graph with the lines of a step's operators in its only scan of a scope, which was made from that step."""
    (loop,) = [n for n in graph.nodes if n.kind == "scan" and within(n.scope, scope)]
    assert loop.inside is not None
    before = graph_of(step, [f"operand {p}" for p in range(len(step.inputs))])
    return with_nodes(graph, {id(loop): replace(loop, inside=beginning(loop.inside, before))})


def _operators(graph: PCG) -> list[Node]:
    return [n for n in graph.nodes if n.kind not in ("input", "constant")]


def _kinds(graph: PCG) -> list[str]:
    return [n.kind for n in _operators(graph)]


def with_nodes(graph: PCG, changed: Mapping[int, Node]) -> PCG:
    """Return a graph with some nodes, by id, replaced by others with the same operands."""
    new: dict[int, Node] = {}
    for node in graph.nodes:
        replacement = changed.get(id(node), node)
        operands = tuple(Value(new[id(v.node)], v.index) if id(v.node) in new else v for v in replacement.operands)
        same = all(v.node is w.node for v, w in zip(operands, replacement.operands, strict=True))
        new[id(node)] = replacement if same else replace(replacement, operands=operands)
    return PCG(graph.inputs, tuple(Value(new[id(v.node)], v.index) for v in graph.outputs), graph.axes)
