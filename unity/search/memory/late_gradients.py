"""Gradients of weights that a backend computes late, and what waits for them.

XLA's scheduler for GPUs overlaps collectives with computing, and gradients of weights are what nothing else waits for. It runs each
as late as possible. One that is all-reduced, or scattered, runs at the end of the backward pass, or before the next operator that
communicates inside, such as a batch norm. The others run from the end of the backward pass on, one beside each collective, those of
the first operators last. Until a gradient runs, the cotangent of its product's result and the operand that it reads are live.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

from unity.pcg.ir.graph import Node, Value
from unity.pcg.parallel.traffic import TRAFFIC
from unity.pcg.types.factors import facts_of


def late_turns(nodes: Sequence[Node], flow: Callable[[Value], bool], inside: Collection[int] = ()) -> dict[int, int]:
    """Return the operators that multiply by a weight, by number, with the operator at whose backward turn its gradient runs.

    Args:
        nodes: The operators of the outermost graph, in order.
        flow: Returns whether a gradient flows to a value.
        inside: The numbers of operators that communicate inside.
    """
    readers = {v: i for i, node in enumerate(nodes) for v in node.operands}
    reduced = {readers[Value(n)] for n in nodes if _backward(n) and weight_of(Value(n)) is not None and Value(n) in readers}
    collectives = [0] * len(nodes)  # between operators, by the operator at whose turn they run
    borders = {0, *inside}
    for i, node in enumerate(nodes):
        if i in inside or (_backward(node) and flow(node.operands[0]) and weight_of(Value(node)) is None):
            collectives[i] += 1
    until, last, rank, late = list(accumulate(collectives)), sorted(borders), 0, dict[int, int]()
    for i, node in enumerate(nodes):
        if not (facts_of(node.kind).product and any(flow(v) and weight_of(v) is not None for v in node.operands)):
            continue
        if i in reduced:
            late[i] = last[bisect_left(last, i) - 1] if i else 0
            continue
        rank += 1
        late[i] = min(i, bisect_left(until, rank) if until[-1] >= rank else 0)
    return late


def _backward(node: Node) -> bool:
    """Return whether a node is a change of type with a collective in the backward pass."""
    return bool(TRAFFIC.get(node.kind, ("", ""))[1])


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
