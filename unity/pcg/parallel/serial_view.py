"""The serial graph of a parallel graph, and the correspondence between the nodes of the two."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.pcg.ir.payloads import Recompute


def serial_graph(graph: PCG) -> PCG:
    """Return a parallel graph without parallelization operators (the identity on values), types and recomputation."""
    copies: dict[int, Node] = {}
    forwarded: dict[int, Value] = {}  # the operand of each parallelization operator, in the serial graph

    def serial(v: Value) -> Value:
        return forwarded[id(v.node)] if id(v.node) in forwarded else Value(copies[id(v.node)], v.index)

    for node in graph.nodes:
        if node.kind in PARALLELIZATION:
            forwarded[id(node)] = serial(node.operands[0])
        else:
            inside = serial_graph(node.inside) if node.inside is not None else None
            operands = tuple(map(serial, node.operands))
            copies[id(node)] = replace(node, operands=operands, inside=inside, types=(), again=Recompute.NOTHING)
    return PCG(tuple(copies[id(n)] for n in graph.inputs), tuple(map(serial, graph.outputs)))


def twins(serial: PCG, parallel: PCG) -> Iterator[tuple[Node, Node]]:
    """Yield every node of a serial graph with its counterpart in the parallel graph built from it.

    Both graphs list their nodes in the same order, but for the parallelization operators of the parallel one.
    """
    operators = (node for node, _ in parallel.walk() if node.kind not in PARALLELIZATION)
    return zip((node for node, _ in serial.walk()), operators, strict=True)
