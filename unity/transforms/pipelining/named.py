"""Operators that were traced again, at the lines of those that they were made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile

from unity.pcg.capture.capture import graph_of
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.program import Body
from unity.transforms.pipelining.splice import within


def named(graph: PCG, before: PCG) -> PCG:
    """A graph at another's lines, if both have the same operators in the same order; otherwise as it is."""
    return beginning(graph, before) if _kinds(graph) == _kinds(before) else graph


def beginning(graph: PCG, before: PCG) -> PCG:
    """A graph at another's lines, as far as both begin with the same operators in the same order."""
    changed = {}
    for node, old in takewhile(lambda pair: pair[0].kind == pair[1].kind, zip(_operators(graph), _operators(before), strict=False)):
        inside = node.inside
        if inside is not None and old.inside is not None:
            inside = named(inside, old.inside)
        changed[id(node)] = replace(node, inside=inside, source=old.source, scope=old.scope)
    return with_nodes(graph, changed)


def with_steps(graph: PCG, scope: str, step: Body) -> PCG:
    """A graph, the operators in its only scan of a scope at the lines of those of a step that the scan was made from."""
    (loop,) = [n for n in graph.nodes if n.kind == "scan" and within(n.scope, scope)]
    assert loop.inside is not None
    before = graph_of(step, [f"operand {p}" for p in range(len(step.inputs))])
    return with_nodes(graph, {id(loop): replace(loop, inside=beginning(loop.inside, before))})


def _operators(graph: PCG) -> list[Node]:
    return [n for n in graph.nodes if n.kind not in ("input", "constant")]


def _kinds(graph: PCG) -> list[str]:
    return [n.kind for n in _operators(graph)]


def with_nodes(graph: PCG, changed: Mapping[int, Node]) -> PCG:
    """A graph with other nodes instead of some (by id), which read what those read."""
    new: dict[int, Node] = {}
    for node in graph.nodes:
        made = changed.get(id(node), node)
        operands = tuple(Value(new[id(v.node)], v.index) if id(v.node) in new else v for v in made.operands)
        same = all(v.node is w.node for v, w in zip(operands, made.operands, strict=True))
        new[id(node)] = made if same else replace(made, operands=operands)
    return PCG(graph.inputs, tuple(Value(new[id(v.node)], v.index) for v in graph.outputs), graph.axes)
