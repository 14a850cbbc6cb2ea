"""Values that are live through an operator's turn: produced before it, read after it, and neither its operands nor its results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from unity.pcg.ir.graph import Node, Value


def live_through(nodes: Sequence[Node], nbytes: Mapping[Value, float], ends: Iterable[Value]) -> list[float]:
    """Return for every operator, in order, the bytes of values (in training, of cotangents) that are live through its turn.

    Args:
        nodes: The operators.
        nbytes: The bytes of every value on one device, 0 if it takes no memory.
        ends: Values that are read after all operators.
    """
    number = {id(node): i for i, node in enumerate(nodes)}
    last: dict[Value, int] = {}
    for i, node in enumerate(nodes):
        last.update((v, i) for v in node.operands)
    last.update((v, len(nodes)) for v in ends)
    change = [0.0] * (len(nodes) + 1)
    for v, end in last.items():
        start = number.get(id(v.node), -1)
        if end > start + 1:
            change[start + 1] += nbytes[v]
            change[end] -= nbytes[v]
    live, totals = 0.0, list[float]()
    for i, node in enumerate(nodes):
        live += change[i]
        own = sum(nbytes[v] for v in dict.fromkeys(node.operands) if last[v] > i)
        totals.append(max(0.0, live - own))
    return totals
