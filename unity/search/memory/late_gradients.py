"""Gradients of weights that a backend computes late, and what waits for them.

XLA's scheduler for GPUs overlaps collectives with computing, and gradients of weights are what nothing else waits for. It runs each
as late as possible: from the end of the backward pass on, one beside every collective. Those of the first operators run last. A
product of a weight then runs not at its own turn but at an earlier operator's, and until that turn, the cotangent of its result and
the operand that its gradient reads are live.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from unity.pcg.ir.graph import Node, Value
from unity.pcg.parallel.traffic import TRAFFIC
from unity.pcg.types.factors import facts_of


def late_turns(nodes: Sequence[Node], flow: Callable[[Value], bool]) -> dict[int, int]:
    """Return the operators that multiply by a weight, by number, with the operator at whose backward turn its gradient runs.

    Args:
        nodes: The operators of the outermost graph, in order.
        flow: Returns whether a gradient flows to a value.
    """
    weighted: list[int] = []
    collectives = [0] * len(nodes)  # of the backward pass, by the operator at whose turn they run
    for i, node in enumerate(nodes):
        if facts_of(node.kind).product and any(flow(v) and weight_of(v) is not None for v in node.operands):
            weighted.append(i)
        if TRAFFIC.get(node.kind, ("", ""))[1] and flow(node.operands[0]):
            collectives[0 if weight_of(Value(node)) is not None else i] += 1
    until = list(accumulate(collectives))
    return {i: min(i, bisect_left(until, rank) if until[-1] >= rank else 0) for rank, i in enumerate(weighted, 1)}


def weight_of(v: Value) -> Node | None:
    """Return the argument that a value is computed from alone, or None."""
    while len(v.node.operands) == 1:
        v = v.node.operands[0]
    return v.node if v.node.kind == "input" else None


def waiting(count: int, live: Sequence[tuple[float, int, int]]) -> list[float]:
    """Return for every turn the bytes of buffers, each live from one turn to another, both included: (bytes, first, last)."""
    change = [0.0] * (count + 1)
    for nbytes, first, last in live:
        if first <= last:
            change[first] += nbytes
            change[last + 1] -= nbytes
    return list(accumulate(change))[:count]
