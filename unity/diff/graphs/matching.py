"""Which node of one graph is which of another.

Nodes are matched by what they compute first, then by what is around them:

1. inputs, by name and tensor, then by position and tensor, then by name alone;
2. operators that are computed from the same *and* used for the same, then those computed from the same (as a Merkle hash says,
   bottom up), then those used for the same with the same arguments (the same, top down: so one changed leaf does not unmatch all
   that follows it);
3. operators that compute the same of their operands (their *signature*), where they are neighbours of what is matched, the pair
   first that agrees in most edges; then those left, aligned in order, as repeated layers are;
4. operators of one kind that compute something else (another shape, another program), where they are neighbours of what is
   matched; then those of one line of the user's;
5. parallelization operators, by the value that they change, from what to what, and for whom.

What "minimal" means. Exact: of the operators of each signature as many are matched as both graphs have, so no matching of
operators to their like leaves fewer over; of those that are computed from the same matched inputs by the same operators, as many
are matched to one another as both graphs have; and graphs that differ in nothing are matched node by node. A heuristic: *which*
of several equal operators is matched to which, and what else is taken to be one operator changed. To rewire the fewest operands
is a quadratic assignment problem.
"""

from __future__ import annotations

from collections.abc import Hashable

from unity.diff.graphs.changes import join_changes
from unity.diff.graphs.difference import name_of
from unity.diff.graphs.pairing import Pairs
from unity.diff.graphs.skeleton import Labels, Skeleton
from unity.pcg.ir.graph import PCG


def matching(before: PCG, after: PCG) -> dict[int, int]:
    """Numbers of nodes of the first graph (in `nodes`) and those of the second that they are matched to."""
    labels = Labels()
    pairs = Pairs(Skeleton(before, labels), Skeleton(after, labels))
    _inputs(pairs)
    _by_content(pairs)
    for one, other in ((pairs.before.signature, pairs.after.signature), (pairs.before.form, pairs.after.form)):
        pairs.grow(one, other)
        if one is pairs.before.signature:
            pairs.aligned(one, other)
            pairs.grow(one, other)
            pairs.equal(one, other)
    pairs.equal(_lines(pairs.before), _lines(pairs.after))
    join_changes(pairs)
    return pairs.partner


def _inputs(pairs: Pairs) -> None:
    """Arguments keep their names, or at least their places."""
    sides = [[(k, n, side.nodes[n]) for k, n in enumerate(side.inputs)] for side in (pairs.before, pairs.after)]
    exact = [{n: (name, node.tensors) for _, n, node in side if (name := name_of(node)) is not None} for side in sides]
    placed = [{n: (k, node.tensors) for k, n, node in side} for side in sides]
    named = [{n: name for _, n, node in side if (name := name_of(node)) is not None} for side in sides]
    for before, after in (exact, placed, named):
        pairs.equal(before, after)


def _by_content(pairs: Pairs) -> None:
    """Operators that are computed from the same, or used for the same. (All losses end alike: where no argument says for what
    something is used, being used alike is no evidence.)"""
    sides = pairs.before, pairs.after
    kept: list[dict[int, Hashable]] = [{i: i for i in pairs.partner}, {j: i for i, j in pairs.partner.items()}]
    lost = [{n: (k, n) for n in side.inputs} for k, side in enumerate(sides)]
    ups = [side.above({**gone, **same}) for side, gone, same in zip(sides, lost, kept, strict=True)]
    downs = [side.below(same) for side, same in zip(sides, kept, strict=True)]
    near = [_around(side, up, down) for side, up, down in zip(sides, ups, downs, strict=True)]
    both = [{k: (up[k], down[k]) for k in up} for up, down in zip(ups, downs, strict=True)]
    sure = [{k: down[k] for k in side.with_arguments(same)} for side, down, same in zip(sides, downs, kept, strict=True)]
    for before, after in (near, both, ups, sure):
        pairs.equal(before, after)


def _around(side: Skeleton, up: dict[int, int], down: dict[int, int]) -> dict[int, Hashable]:
    """What tells apart equal operators that are used alike: what they are used together with."""
    return {k: (up[k], down[k], tuple(sorted((up[user], position, index) for user, position, index in side.users[k]))) for k in up}


def _lines(side: Skeleton) -> dict[int, Hashable]:
    """The kind of each operator with its line, where it has one. Arguments have none."""
    return {k: (form, side.nodes[k].source) for k, form in side.form.items() if side.nodes[k].source}
