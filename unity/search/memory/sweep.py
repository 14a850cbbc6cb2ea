"""The sweep over a graph's nodes, in order, and over the graphs inside them: what each adds to the memory of a device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import islice

from unity.pcg.ir.graph import BRANCHES, LOOPS, PCG, STAGES, TAIL, UNCHANGED, Node
from unity.pcg.parallel.branches import groups_of
from unity.search.memory.nested_memory import (
    accumulates,
    memory_of_accumulation,
    memory_of_branches,
    memory_of_loop,
    memory_of_remat,
    memory_of_tail,
)
from unity.search.memory.operator_memory import OperatorMemory, memory_of_change, memory_of_operator
from unity.search.memory.region import Region
from unity.search.memory.residuals import OUTERMOST, Nesting, ResidualCollector, Setting
from unity.search.space.live_buffers import Buffer


def sweep(graph: PCG, setting: Setting, nesting: Nesting = OUTERMOST, always: Collection[Buffer] = ()) -> Region:
    """Return the memory of a graph on one device.

    Args:
        graph: the graph of a program, or one inside a node.
        setting: the facts of the program.
        nesting: what the graph is inside of.
        always: buffers that are live throughout the step; the memory of gradients among them may be reused before.
    """
    collector, inside = ResidualCollector(graph, setting, nesting), dict[int, Region]()
    operators: list[OperatorMemory] = []
    for node in collector.nodes:
        before = len(collector.chosen)
        added = _memory_of(node, collector, inside)
        operators.append(replace(added, values=frozenset(islice(collector.chosen, before, None))))
    return Region(collector, operators, inside, always)


def _memory_of(node: Node, collector: ResidualCollector, inside: dict[int, Region]) -> OperatorMemory:
    """Return the memory of a node, and record that of the graph nested in it in `inside`."""
    if node.kind in UNCHANGED or collector.stays(node):
        return memory_of_change(node, collector)
    if node.kind in (BRANCHES, STAGES):
        nesting = collector.nesting.inside(node, accumulates=False)
        groups = [sweep(group.graph, collector.setting, nesting) for group in groups_of(node)]
        return memory_of_branches(node, collector, groups)
    if node.inside is None:
        return memory_of_operator(node, collector)
    adds_up = accumulates(node, collector)
    region = inside[id(node)] = sweep(node.inside, collector.setting, collector.nesting.inside(node, adds_up))
    if node.kind == TAIL:
        return memory_of_tail(node, collector, region)
    if adds_up:
        return memory_of_accumulation(node, collector, region)
    if node.kind in LOOPS:
        return memory_of_loop(node, collector, region)
    assert node.kind == "remat"
    return memory_of_remat(node, collector, region)
