"""What else a tensor or an operator could be, and what the whole plan would cost then.

Each alternative is the best plan of an exact search in which that one site may not be as it was in those found before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from unity.constraints.conflicts import possible
from unity.pcg.ir.graph import Node
from unity.pcg.parallel.parallelize import Assignment
from unity.pcg.types.parallel_type import Type
from unity.plan.plan_family import PlanFamily
from unity.search.session import Candidate, Search
from unity.search.space.dimensions import ProgramDimensions
from unity.search.space.masks import Mask, SplitSet, Way, way_of


@dataclass(frozen=True)
class Ends:
    """The types of what a node takes and gives."""

    operands: tuple[Type, ...]
    results: tuple[Type, ...]


@dataclass(frozen=True, eq=False)
class Alternative:
    """One way to have a node, and the best plan with it."""

    ends: Ends
    candidate: Candidate


def ends_of(node: Node, assignment: Assignment) -> Ends:
    """The types that a strategy gives a node of the serial graph."""
    return Ends(tuple(assignment.operands[id(node), p][-1] for p in range(len(node.operands))), assignment.results[id(node)])


def alternatives(
    made: PlanFamily, node: Node, chosen: Candidate, limit: float, most: int
) -> tuple[Alternative | None, list[Alternative]]:
    """The best plan where the node is as it is, and the best ones where it is not, each of another kind, the fastest first.

    All fit the limit, and obey the constraints but those on this node. Interchangeable axes are not told apart.
    """
    now = _way(node, chosen.assignment)
    same = _best(made, node, SplitSet(frozenset({now}), True), limit)
    found, seen = list[Alternative](), {now}
    while len(found) < most:
        other = _best(made, node, SplitSet(frozenset(seen), False), limit)
        if other is None:
            break
        found.append(other)
        seen.add(_way(node, other.candidate.assignment))
    return same, sorted(found, key=lambda a: a.candidate.time)


def _way(node: Node, assignment: Assignment) -> Way:
    ends = ends_of(node, assignment)
    return way_of(list(zip(*ends.operands, *ends.results, strict=True)), assignment.axes)


def _best(made: PlanFamily, node: Node, ways: Ways, limit: float) -> Alternative | None:
    """The fastest plan with some ways to have a node; None: none is possible, or fits."""

    def instead(dimensions: ProgramDimensions) -> Mapping[int, Mask]:
        return {dimensions.opened.of_node[id(node)]: (ways,)}

    search: Search = replace(made.search, restrict=replace(made.bound, instead=instead), say=lambda stage: None)
    candidate = search.under(limit) if possible(search) else None
    return None if candidate is None else Alternative(ends_of(node, candidate.assignment), candidate)
