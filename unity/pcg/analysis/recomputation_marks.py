"""Marks of operators and changes of type that the backward pass recomputes.

A node's `again` marks a change of type whose result is recomputed, and an operator whose inner values (`Recompute.INNER`) or whole
result (`Recompute.WHOLE`) are recomputed. In the latter case the operator runs again together with its only user, as in a remat
around both.
"""

from __future__ import annotations

from unity.pcg.ir.graph import PARALLELIZATION, Node, Value
from unity.pcg.ir.payloads import Recompute


def in_words(again: int) -> str:
    """Describe which part of an operator the backward pass recomputes. `again` is its number in a file (`Recompute`)."""
    words = ("all of it is kept", "inner values are computed again in the backward pass", "it runs again in the backward pass")
    return words[again]


def runs_again(node: Node) -> bool:
    """Return whether an operator's result is not kept, but recomputed for its user."""
    return node.kind not in PARALLELIZATION and node.again == Recompute.WHOLE


def has_marked_operands(node: Node) -> bool:
    """Return whether an operand of an operator is the result of an operator or a change of type marked "again"."""
    return any(runs_again(v.node) or len(through_marked_changes(v)) > 1 for v in node.operands)


def through_marked_changes(v: Value) -> list[Value]:
    """Return an operand, and the values before each of the marked changes of type that lead to it, down to the one that is kept."""
    values = [v]
    while v.node.kind in PARALLELIZATION and v.node.again:
        v = v.node.operands[0]
        values.append(v)
    return values
