"""Rematerialization: how often the backward pass runs operators and changes of type again, and how often it reads values.

Every remat, and every operator with marked operands, is a region (`unity.pcg.analysis.recomputed_region`). What runs again in
several regions runs again once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from operator import itemgetter
from typing import TypeVar

from unity.pcg.analysis.policies import Policies, policies_of
from unity.pcg.analysis.recomputation_marks import has_marked_operands
from unity.pcg.analysis.recomputed_region import Place, RecomputedRegion, marked_region, remat_region
from unity.pcg.analysis.residuals import residuals
from unity.pcg.ir.gradient_flow import Gradients
from unity.pcg.ir.graph import BRANCHES, LOOPS, PCG, PIPELINE, STAGES, TAIL, Node
from unity.pcg.jaxprs.jaxprs import BRANCHED

GROUPED = (PIPELINE, TAIL, BRANCHES, STAGES)  # a device runs one of several alternatives, whose residuals are in one memory

K = TypeVar("K", int, Place)  # a node, by id, or a place


@dataclass(frozen=True)
class Recomputation:
    """The runs that the backward pass adds to one run of the graph around a node.

    Attributes:
        regions: what runs again.
        in_branches: by id(node), the values that a checkpoint in a branch of a conditional offloads, as in `Residuals.inner`.
    """

    regions: tuple[RecomputedRegion, ...] = ()
    in_branches: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def repeats(self, node: Node) -> Fraction:
        """Return how often a node runs again for each run of its graph."""
        return sum((region.runs(id(node)) for region in self._nodes.get(id(node), ())), Fraction())

    def alone(self, node: Node) -> Fraction:
        """Return how often a node runs again for a single operator, which shares the result with no other."""
        marked = (region.runs(id(node)) for region in self._nodes.get(id(node), ()) if region.marked)
        return sum((*marked, *(region.runs(id(node)) for region in self._apart.get(id(node), ()))), Fraction())

    def computed(self, node: Node, variable: int) -> Fraction:
        """Return how often a variable of an operator's program is recomputed."""
        return sum((region.runs(id(node)) for region in self._variables.get((id(node), variable), ())), Fraction())

    def variables_of(self, node: Node) -> tuple[tuple[int, Fraction], ...]:
        """Return the recomputed variables of an operator's program, each with the number of recomputations."""
        return tuple((v, self.computed(node, v)) for v in self._variables_by_node.get(id(node), ()))

    def is_fenced(self, change: Node) -> bool:
        """Return whether a marked change of type runs for a single operator in the forward pass, too."""
        return id(change) in self._fenced

    def is_unread(self, remat: Node, operand: int) -> bool:
        """Return whether the backward pass of a remat ignores an operand, so that it need not be kept."""
        return (id(remat), operand) in self._unread

    def saves(self, node: Node) -> bool:
        """Return whether a policy saves a value of an operator, on the device or on the host."""
        return bool(self.saved_of(node) or self.offloaded_of(node))

    def saved_of(self, node: Node) -> tuple[tuple[int, int], ...]:
        """Return the variables of an operator's program that a policy saves on the device.

        Each has the depth of the outermost remat that saves it. The variable is 0 for a change of type whose result is saved.
        """
        return tuple(self._saved_by_node.get(id(node), ()))

    def offloaded_of(self, node: Node) -> tuple[tuple[int, int], ...]:
        """Return the variables of an operator's program that a policy saves in the memory of the host, like `saved_of`.

        Those that another policy saves on the device are not among them.
        """
        return tuple(self._offloaded_by_node.get(id(node), ()))

    def host_values(self, node: Node) -> tuple[tuple[int, int, int], ...]:
        """Return all values of an operator in the memory of the host, as (variable, bytes of the whole value, depth).

        The variable has the value's sharding. The depth is that of the outermost remat that saves it, 0 without any.
        """
        body, branches = node.body, self.in_branches.get(id(node), ())
        saved = tuple((v, body.tensors[v].nbytes, depth) for v, depth in self.offloaded_of(node)) if body is not None else ()
        return (*saved, *((v, nbytes, 0) for v, nbytes in branches))

    def read(self, places: Iterable[Place]) -> tuple[Fraction, Fraction]:
        """Return how often any of these users of a value reads it in the backward pass: in all, and to recompute a result.

        A region in which a loop hoists the value counts by its runs there. The second number is that of a marked change,
        which no loop hoists out of a remat in the region.
        """
        every, passed = dict[int, Fraction](), dict[int, Fraction]()  # by id of the region
        for place in places:
            for region in self._reads.get(place, ()):
                runs = region.runs(region.producers[place])
                every[id(region)] = max(runs, every.get(id(region), runs))
                if place in region.passed:
                    runs = Fraction(1) if place in region.nested else runs
                    passed[id(region)] = max(runs, passed.get(id(region), runs))
        return sum(every.values(), Fraction()), sum(passed.values(), Fraction())

    @cached_property
    def _nodes(self) -> Mapping[int, list[RecomputedRegion]]:
        return _regions_by(self.regions, lambda region: region.nodes)

    @cached_property
    def _apart(self) -> Mapping[int, list[RecomputedRegion]]:
        return _regions_by(self.regions, lambda region: region.apart)

    @cached_property
    def _variables(self) -> Mapping[Place, list[RecomputedRegion]]:
        return _regions_by(self.regions, lambda region: region.variables)

    @cached_property
    def _reads(self) -> Mapping[Place, list[RecomputedRegion]]:
        return _regions_by(self.regions, lambda region: region.reads)

    @cached_property
    def _variables_by_node(self) -> Mapping[int, list[int]]:
        by_node: dict[int, list[int]] = {}
        for node, variable in sorted(self._variables):
            by_node.setdefault(node, []).append(variable)
        return by_node

    @cached_property
    def _fenced(self) -> frozenset[int]:
        return frozenset[int]().union(*(region.fenced for region in self.regions))

    @cached_property
    def _unread(self) -> frozenset[Place]:
        return frozenset[Place]().union(*(region.unread for region in self.regions))

    @cached_property
    def _saved_by_node(self) -> Mapping[int, list[tuple[int, int]]]:
        return _with_depths(_regions_by(self.regions, lambda region: region.saved))

    @cached_property
    def _offloaded_by_node(self) -> Mapping[int, list[tuple[int, int]]]:
        on_device = frozenset[Place]().union(*(region.saved for region in self.regions))
        return _with_depths(_regions_by(self.regions, lambda region: region.offloaded - on_device))


def _regions_by(
    regions: Iterable[RecomputedRegion], members: Callable[[RecomputedRegion], Iterable[K]]
) -> dict[K, list[RecomputedRegion]]:
    """Return the regions that have a node or a place among some of their members, by the node or place."""
    by_member: dict[K, list[RecomputedRegion]] = {}
    for region in regions:
        for member in members(region):
            by_member.setdefault(member, []).append(region)
    return by_member


def _with_depths(saved: Mapping[Place, Iterable[RecomputedRegion]]) -> dict[int, list[tuple[int, int]]]:
    """Return saved variables by id(node), each with the depth of the outermost remat that saves it."""
    by_node: dict[int, list[tuple[int, int]]] = {}
    for (node, variable), regions in sorted(saved.items(), key=itemgetter(0)):
        by_node.setdefault(node, []).append((variable, min(region.depth for region in regions)))
    return by_node


def recomputation(graph: PCG, flow: Gradients, kept: Collection[str] = GROUPED) -> Recomputation:
    """Return the recomputation of a graph, serial or parallel, and of the graphs nested in it.

    Args:
        graph: The graph.
        flow: Where gradients flow.
        kept: The kinds of nodes inside of which policies offload nothing.
    """
    return Recomputation(tuple(_regions(graph, flow, _Around(), kept)), offloaded_in_branches(graph, flow, kept))


def has_conditional(node: Node) -> bool:
    """Return whether the program of an operator has a conditional, in whose branches there may be checkpoints."""
    return node.body is not None and any(e.name in BRANCHED for e in node.body.equations)


def offloaded_in_branches(
    graph: PCG, flow: Gradients, kept: Collection[str] = GROUPED, looped: bool = False
) -> dict[int, tuple[tuple[int, int], ...]]:
    """Return the values that checkpoints in branches of conditionals offload, as `Recomputation.in_branches`.

    In a remat they would be sent and fetched in its backward pass alone: there, they stay on the device.

    Args:
        graph: The graph.
        flow: Where gradients flow.
        kept: The kinds of nodes inside of which policies offload nothing.
        looped: Whether the graph is nested in a loop.
    """
    values: dict[int, tuple[tuple[int, int], ...]] = {}
    for node in graph.nodes:
        if node.inside is not None and node.kind not in kept and node.kind != "remat":
            values |= offloaded_in_branches(node.inside, flow, kept, looped or node.kind in LOOPS)
        if node.body is not None and has_conditional(node) and any(map(flow, node.results)):
            needed = residuals(node.body, tuple(map(flow, node.operands)), looped)
            values |= {id(node): tuple(needed.inner[k] for k in needed.hosted)} if needed.hosted else {}
    return values


@dataclass(frozen=True)
class _Around:
    """The context of a nested graph.

    looped: it is nested in a loop.
    fenced: it is nested in a remat that is nested in a loop.
    policies: those of the remats around it.
    depth: the number of remats around it.
    offloads: policies may offload values: it is in no stage and no branch, whose residuals stay on the device.
    """

    looped: bool = False
    fenced: bool = False
    policies: Policies = ()
    depth: int = 0
    offloads: bool = True


def _regions(graph: PCG, flow: Gradients, around: _Around, kept: Collection[str]) -> Iterator[RecomputedRegion]:
    """Yield every remat, and every operator with marked operands, of a graph and of the graphs nested in it."""
    for node in graph.nodes:
        if node.inside is not None:
            offloads = around.offloads and node.kind not in kept
            inner = replace(around, looped=around.looped or node.kind in LOOPS, offloads=offloads)
            if node.kind == "remat":
                policies = around.policies + policies_of(node, around.offloads)
                inner = _Around(around.looped, around.looped, policies, around.depth + 1, around.offloads)
                yield remat_region(node, flow, policies, inner.depth, around.looped)
            yield from _regions(node.inside, flow, inner, kept)
        elif node.body is not None and has_marked_operands(node):
            yield marked_region(node, flow, around.policies, around.depth, around.looped, around.fenced)
