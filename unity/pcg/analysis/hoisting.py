"""What the steps of a scan make of its constants alone: JAX makes it once, before the first step.

When JAX differentiates a scan, it runs what does not depend on the carry or on what is taken in steps ahead of the loop; XLA does
the same to a loop that is not differentiated. So such an operator runs less often than the graph that it is in, forward. Backward
each step has a gradient for the constants, and what a step computes again, it computes in its own turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unity.pcg.ir.graph import PCG, Node
from unity.pcg.propagation.scan_programs import SCANNED


def hoisted(graph: PCG) -> Mapping[int, int]:
    """By id(node): how many times less often than the graph around it a node runs forward, where that is more than once. Inputs of
    graphs inside of others are among these nodes."""
    found: dict[int, int] = {}
    _graph(graph, [1] * len(graph.inputs), False, found)
    return found


def kept_once(graph: PCG) -> Mapping[int, int]:
    """The same of nodes outside of remats alone: of what they make, so many times less is kept for the backward pass, too."""
    again = {id(n) for node, _ in graph.walk() if node.kind == "remat" and node.inside is not None for n, _ in node.inside.walk()}
    return {key: k for key, k in hoisted(graph).items() if key not in again}


def _graph(graph: PCG, given: Sequence[int], again: bool, found: dict[int, int]) -> list[int]:
    """`given`: the same of the graph's inputs. `again`: it is inside of a remat. Returns that of its outputs."""
    less = {id(node): k for node, k in zip(graph.inputs, given, strict=True)}
    for node in graph.nodes:
        if node.kind == "input":
            continue
        operands = [less[id(v.node)] for v in node.operands]
        if node.inside is not None:
            results = _graph(node.inside, _inputs(node, operands), again or node.kind == "remat", found)
            operands = results if node.kind == "remat" else [1]
        if again and node.attributes.get("again"):  # a checkpoint in a checkpoint: JAX leaves that where it is
            operands = [1]
        less[id(node)] = min(operands, default=1)
    found.update((key, k) for key, k in less.items() if k > 1)
    return [less[id(v.node)] for v in graph.outputs]


def _inputs(node: Node, operands: Sequence[int]) -> list[int]:
    """The same of the inputs of a graph inside: a scan's constants come from outside of all its steps."""
    assert node.inside is not None
    if node.kind == "remat":
        return list(operands)
    constants = int(node.attributes["consts"]) if node.kind in SCANNED else 0
    length = int(node.attributes["length"]) if constants else 1
    return [length * operands[p] if p < constants else 1 for p in range(len(node.inside.inputs))]
