"""Alternatives to the types of one argument or operator, each with the best plan that has them.

Each alternative is found by an exact search that excludes, for that node, the types of all plans found before.
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
class NodeTypes:
    """The types of a node's operands and results."""

    operands: tuple[Type, ...]
    results: tuple[Type, ...]


@dataclass(frozen=True, eq=False)
class Alternative:
    """Types of a node, and the best plan with them."""

    types: NodeTypes
    candidate: Candidate


def types_of(node: Node, assignment: Assignment) -> NodeTypes:
    """Return the types that an assignment gives a node of the serial graph."""
    return NodeTypes(tuple(assignment.operands[id(node), p][-1] for p in range(len(node.operands))), assignment.results[id(node)])


def alternatives(
    family: PlanFamily, node: Node, chosen: Candidate, limit: float, most: int
) -> tuple[Alternative | None, list[Alternative]]:
    """Return the best plan with a node's present types, and the best plans with other types, the fastest first.

    Types that differ only by interchangeable axes count as equal. All plans fit the limit and obey the constraints, except those on
    this node.

    Args:
        family: the plan's family.
        node: the node of the serial graph.
        chosen: the plan's point of the frontier.
        limit: bytes on one device.
        most: the largest number of plans with other types.
    """
    present = _way(node, chosen.assignment)
    same = _best(family, node, SplitSet(frozenset({present}), True), limit)
    others, excluded = list[Alternative](), {present}
    while len(others) < most:
        other = _best(family, node, SplitSet(frozenset(excluded), False), limit)
        if other is None:
            break
        others.append(other)
        excluded.add(_way(node, other.candidate.assignment))
    return same, sorted(others, key=lambda a: a.candidate.time)


def _way(node: Node, assignment: Assignment) -> Way:
    types = types_of(node, assignment)
    return way_of(list(zip(*types.operands, *types.results, strict=True)), assignment.axes)


def _best(family: PlanFamily, node: Node, ways: SplitSet, limit: float) -> Alternative | None:
    """Return the fastest plan in which a node has one of the allowed types, or None if none exists or fits."""

    def overrides(dimensions: ProgramDimensions) -> Mapping[int, Mask]:
        return {dimensions.opened.of_node[id(node)]: (ways,)}

    search: Search = replace(family.search, restrict=replace(family.bound, overrides=overrides), say=lambda stage: None)
    candidate = search.under(limit) if possible(search) else None
    return None if candidate is None else Alternative(types_of(node, candidate.assignment), candidate)
