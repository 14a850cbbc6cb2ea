"""A parallel graph without its parallelization: what it computes, whoever computes which part."""

from __future__ import annotations

from dataclasses import replace

from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value


def erased(graph: PCG) -> PCG:
    """The serial graph: parallelization operators leave values as they are, so their users read what they read."""
    new: dict[int, Node] = {}
    same: dict[int, Value] = {}

    def of(v: Value) -> Value:
        return same[id(v.node)] if id(v.node) in same else Value(new[id(v.node)], v.index)

    for node in graph.nodes:
        if node.kind in PARALLELIZATION:
            same[id(node)] = of(node.operands[0])
        else:
            inside = erased(node.inside) if node.inside is not None else None
            attributes = {k: v for k, v in node.attributes.items() if k != "again"}  # when it is computed, not what
            new[id(node)] = replace(node, operands=tuple(map(of, node.operands)), inside=inside, attributes=attributes, types=())
    return PCG(tuple(new[id(n)] for n in graph.inputs), tuple(map(of, graph.outputs)))
