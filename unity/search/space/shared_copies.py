"""The users of a value that share a copy of it: what they need in the same other type is changed once, as in `parallelize`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from unity.pcg.ir.graph import PCG, TAIL, Node, Value
from unity.pcg.types.factors import facts_of

User = tuple[Node | PCG, int]  # an operator and the position of an operand, or a graph and that of an output


def users_by_branch(graph: PCG, v: Value, groups: Mapping[int, int]) -> Collection[list[User]]:
    """Return the operands that are a value, and the outputs of the graph: those of each branch, or all of them.

    Branches run on different devices, so they share nothing. A pipeline's tail is left out, as it reads the carries where they are.

    Args:
        graph: The graph of the value.
        v: The value.
        groups: The branch of each operator inside branches, by the operator's id.
    """
    users: dict[int | None, list[User]] = {}
    for user, p in graph.users[id(v.node)]:
        if user.operands[p] == v and user.kind != TAIL:
            users.setdefault(groups.get(id(user)), []).append((user, p))
    if users.keys() == {None}:
        users[None] += [(graph, k) for k, output in enumerate(graph.outputs) if output == v]
    return users.values()


def similar_users(users: Sequence[User]) -> Collection[list[User]]:
    """Return users of one value, those together that are products of one kind and read it as the same operand."""
    similar: dict[object, list[User]] = {}
    for user, p in users:
        likeness = (user.kind, p) if isinstance(user, Node) and facts_of(user.kind).product else (id(user), p)
        similar.setdefault(likeness, []).append((user, p))
    return similar.values()
