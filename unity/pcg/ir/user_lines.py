"""The user's line behind a node of a graph."""

from __future__ import annotations

from unity.base.formatting import pattern, short
from unity.pcg.ir.graph import PCG, Node


def line_behind(node: Node) -> str:
    """Return the user's line behind a parallelization operator, or the argument: its own, or that of its operand."""
    while not node.source and node.operands:
        node = node.operands[0].node
    return short(node.source) or pattern(node.name)


def source_of_use(node: Node, graph: PCG) -> str:
    """Return the source of a node of a graph; of an argument or a change of its type, which have none, that of its first use."""
    uses = [node]
    for use in uses:  # grows: the uses of a change of type are uses of its operand
        if use.source:
            return use.source
        uses += [user for user, _ in graph.users[id(use)]]
    return ""


def spoken(node: Node) -> tuple[str, ...]:
    """The names that users may call an operator by: its kind, its line, the scopes that it is in, and its kind at any of these."""
    names = node.scope.split("/") if node.scope else []
    places = [short(node.source).partition(" (")[0], *("/".join(names[: k + 1]) for k in range(len(names)))]
    return (node.kind, *(place for place in places if place), *(f"{node.kind} at {place}" for place in places if place))
