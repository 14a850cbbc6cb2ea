"""Groups of uses of a value that share a copy of it, and thereby one change of type."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from unity.pcg.ir.graph import PCG, TAIL, Node, Value
from unity.pcg.parallel.stages import ends_of
from unity.pcg.types.factors import facts_of

GraphUse = tuple[Node | PCG, int]  # an operator and the position of an operand, or a graph and that of an output


def uses_by_branch(graph: PCG, v: Value, groups: Mapping[int, int]) -> Collection[list[GraphUse]]:
    """Group the uses of a value by branch, as branches run on different devices. Outputs count where no branch reads the value.

    A pipeline's tail reads the carries where they are, and so does not use them here.

    Args:
        graph: The graph of the value.
        v: The value.
        groups: The branch of each operator inside branches, by the operator's id.
    """
    uses: dict[int | None, list[GraphUse]] = {}
    for user, p in graph.users[id(v.node)]:
        if user.operands[p] == v and not (user.kind == TAIL and p in ends_of(user).carried):
            uses.setdefault(groups.get(id(user)), []).append((user, p))
    if uses.keys() <= {None} and id(v.node) not in groups:
        uses.setdefault(None, []).extend((graph, k) for k, output in enumerate(graph.outputs) if output == v)
    return uses.values()


def similar_uses(uses: Sequence[GraphUse]) -> Collection[list[GraphUse]]:
    """Group the uses of a value: products of one kind that read it as the same operand form a group; any other use is alone."""
    similar: dict[object, list[GraphUse]] = {}
    for user, p in uses:
        likeness = (user.kind, p) if isinstance(user, Node) and facts_of(user.kind).product else (id(user), p)
        similar.setdefault(likeness, []).append((user, p))
    return similar.values()
