"""The recomputation in the backward pass of one remat: what it recomputes, and which values it reads or has saved.

It recomputes the inner values that it reads, and everything that they depend on, from the remat's operands and from the values that
its policy saves; the rest is dead code there. A remat nested in a remat runs again in the backward pass of the outer one, if its
results are read there or if its policy saves values, and again in its own. The carry of a scan inside of a remat is recomputed.

An operator with marked operands (`unity.pcg.analysis.recomputation_marks`) is a region, too, as if a remat were around it and the
marked changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache

from jax.extend.core import primitives

from unity.pcg.analysis.hoisting import hoisted_again
from unity.pcg.analysis.policies import COLLECTIVES, Policies, offloads, policies_of, replacing, save_messages, saving_answers
from unity.pcg.analysis.recomputation_marks import has_marked_operands, through_marked_changes
from unity.pcg.analysis.residuals import read_backward
from unity.pcg.ir.gradient_flow import Gradients
from unity.pcg.ir.graph import BRANCHES, LOOPS, PCG, STAGES, Node, Value, recurrent
from unity.pcg.ir.program import Body

Place = tuple[int, int]  # an operand: id(node) and position; a variable: id(node) and number; an output: id(graph) and position


@dataclass
class RecomputedRegion:
    """A remat, or an operator with marked operands, and what its backward pass recomputes.

    Attributes:
        depth: the number of remats around it, itself included.
        marked: it is an operator with marked operands.
        hoisting_factors: by id(node), the factors by which nodes run less often than their graph (`unity.pcg.analysis.hoisting`).
        nodes: the nodes that run again, by id.
        variables: variables of operators that are recomputed, with their reductions.
        reads: operands, and outputs of nested graphs, that are read.
        passed: those among `reads` that recompute a result, and do not only serve a gradient.
        nested: those among `reads` in a remat inside of the region.
        producers: the node, by id, whose result is read at a place.
        saved: variables of operators that a policy saves on the device and the recomputation reads. A change of type has the
            variable 0.
        offloaded: variables of operators that a policy saves in the memory of the host, likewise.
        unread: operands of remats that the backward pass does not read, since it reads named or offloaded values in their place.
        apart: marked changes of type, by id(node), in a remat inside of the region: they run for a single operator.
        fenced: marked changes of type, by id(node), that run for a single operator in the forward pass. If JAX runs a remat in a
            loop, or recomputes a remat in a remat, it separates the operands of the checkpoints inside of it by barriers.
    """

    depth: int = 0
    marked: bool = False
    hoisting_factors: Mapping[int, int] = field(default_factory=dict)
    nodes: set[int] = field(default_factory=set)
    variables: set[Place] = field(default_factory=set)
    reads: set[Place] = field(default_factory=set)
    passed: set[Place] = field(default_factory=set)
    nested: set[Place] = field(default_factory=set)
    producers: dict[Place, int] = field(default_factory=dict)
    saved: set[Place] = field(default_factory=set)
    offloaded: set[Place] = field(default_factory=set)
    unread: set[Place] = field(default_factory=set)
    apart: set[int] = field(default_factory=set)
    fenced: set[int] = field(default_factory=set)

    def saved_by_node(self) -> dict[int, frozenset[int]]:
        """Return the variables of operators that policies save, on the device or on the host, by id(node)."""
        by_node: dict[int, set[int]] = {}
        for node, variable in self.saved | self.offloaded:
            by_node.setdefault(node, set()).add(variable)
        return {node: frozenset(variables) for node, variables in by_node.items()}

    def runs(self, node: int) -> Fraction:
        """Return how often a node that runs again, by id, does so for each run of its graph."""
        return Fraction(1, self.hoisting_factors.get(node, 1))


def remat_region(remat: Node, flow: Gradients, policies: Policies, depth: int, looped: bool) -> RecomputedRegion:
    """Return the region of a remat.

    Args:
        remat: The remat.
        flow: Where gradients flow.
        policies: Those of the remat and the remats around it.
        depth: The number of these.
        looped: Whether the remat is nested in a loop.
    """
    assert remat.inside is not None
    outputs = [False] * len(remat.results)
    walk = _Walk(flow, policies, RecomputedRegion(depth, hoisting_factors=hoisted_again(remat, flow)))
    walk.graph(remat.inside, outputs, True, looped)
    if walk.region.saved or walk.region.offloaded:
        read = _Walk(flow, (replacing(policies),)).graph(remat.inside, outputs, True, looped)
        walk.region.unread.update((id(remat), p) for p, flag in enumerate(read) if not flag)
    return walk.region


def marked_region(node: Node, flow: Gradients, policies: Policies, depth: int, looped: bool, fenced: bool) -> RecomputedRegion:
    """Return the region of an operator with marked operands.

    Args:
        node: The operator.
        flow: Where gradients flow.
        policies: Those of the remats around it.
        depth: The number of these.
        looped: Whether it is nested in a loop.
        fenced: Whether it is nested in a remat that is nested in a loop.
    """
    walk = _Walk(flow, (*policies, save_messages), RecomputedRegion(depth, marked=True))
    walk.marked(node, looped, fenced)
    return walk.region


class _Walk:
    """A walk through one region, against the flow of data. It fills the region's sets, which only grow.

    flow: the gradient flow of the whole graph.
    policies: those of the remats around it.
    region: what is recomputed.
    in_remat: the walk is in a nested remat whose results are recomputed.
    saved_for_gradient: variables of operators in a nested remat that its policy saves for its gradient, by id(node).
    """

    def __init__(self, flow: Gradients, policies: Policies, region: RecomputedRegion | None = None) -> None:
        self.flow, self.policies, self.region = flow, policies, region or RecomputedRegion()
        self.in_remat = False
        self.saved_for_gradient: dict[int, frozenset[int]] = {}

    def graph(self, graph: PCG, outputs: Sequence[bool], backward: bool, looped: bool) -> list[bool]:
        """Record the recomputation of a graph.

        Args:
            graph: the graph.
            outputs: whether each output is needed.
            backward: whether the gradients of its nodes are computed, too.
            looped: whether the graph is nested in a loop.

        Returns:
            Whether each input is read.
        """
        live = {v for v, flag in zip(graph.outputs, outputs, strict=True) if flag}
        for q, flag in enumerate(outputs):
            self.read((id(graph), q), graph.outputs[q], flag, flag)
        for node in reversed(graph.nodes):
            if node.kind != "input":
                live.update(self.node(node, [v in live for v in node.results], backward, looped))
        return [Value(n) in live for n in graph.inputs]

    def node(self, node: Node, results: Sequence[bool], backward: bool, looped: bool) -> list[Value]:
        """Record the recomputation of a node for the needed results, and for its gradient; return the operands that are read."""
        backward = backward and any(map(self.flow, node.results))
        if node.body is not None:
            return self.operator(node, node.body, results, backward, looped)
        if node.inside is not None:
            flags = self.nested(node, node.inside, results, backward, looped)
        else:
            saved, needed = self.is_saved(node), any(results) or id(node) in self.saved_for_gradient
            flags = [needed and not saved] * len(node.operands)
            self.region.saved.update([(id(node), 0)] if needed and saved else [])
        if any(flags):
            self.region.nodes.add(id(node))
            self.region.apart.update([id(node)] if self.in_remat and node.again else [])
        for p, flag in enumerate(flags):
            self.read((id(node), p), node.operands[p], flag, flag)
        return [v for v, flag in zip(node.operands, flags, strict=True) if flag]

    def nested(self, node: Node, graph: PCG, results: Sequence[bool], backward: bool, looped: bool) -> list[bool]:
        """Record the recomputation of a nested graph; return whether each operand of its node is read."""
        if node.kind in (BRANCHES, STAGES):
            return [backward or any(results)] * len(node.operands)
        if node.kind in LOOPS:
            return self.loop(node, graph, results, backward)
        # The backward pass of a nested remat recomputes from operands and saved values: only these are needed here.
        gradient = _Walk(self.flow, self.policies + policies_of(node))
        read_by_gradient = gradient.graph(graph, [False] * len(results), backward, looped)
        self.record_saved_for_nested(graph, len(results), backward, looped)
        outer = self.in_remat, self.saved_for_gradient
        self.in_remat, self.saved_for_gradient = True, self.saved_for_gradient | gradient.region.saved_by_node()
        read_for_results = self.graph(graph, results, False, looped)
        self.in_remat, self.saved_for_gradient = outer
        return [a or b for a, b in zip(read_by_gradient, read_for_results, strict=True)]

    def loop(self, node: Node, graph: PCG, results: Sequence[bool], backward: bool) -> list[bool]:
        """Record the recomputation of a loop: of its results, and of the carries that its steps read."""
        carried, outputs = recurrent(node), list(results)
        while True:
            needed = self.graph(graph, outputs, backward, True)
            grown = [flag or (k < len(carried) and needed[carried[k]]) for k, flag in enumerate(outputs)]
            if grown == outputs:
                return needed
            outputs = grown

    def record_saved_for_nested(self, graph: PCG, results: int, backward: bool, looped: bool) -> None:
        """Record the values in a nested remat that this region's policies save for the nested remat's gradient."""
        if self.policies:
            walk = _Walk(self.flow, self.policies)
            walk.graph(graph, [False] * results, backward, looped)
            self.region.saved |= walk.region.saved
            self.region.offloaded |= walk.region.offloaded

    def operator(self, node: Node, body: Body, results: Sequence[bool], backward: bool, looped: bool) -> list[Value]:
        """Record the recomputation of an operator; return the values that are read for it.

        An operator with marked operands is a region: here it runs for its results only, and its gradient keeps the values that the
        marked changes start from.
        """
        outputs = frozenset(a for a, flag in zip(body.outputs, results, strict=True) if flag and isinstance(a, int))
        outputs |= self.saved_for_gradient.get(id(node), frozenset())
        passed, every = _needed(body, outputs, self.policies), self.for_gradient(node, body, outputs, backward, looped)
        runs = passed if has_marked_operands(node) else every
        self.record(node, runs)
        operands = []
        for p, (v, variable) in enumerate(zip(node.operands, body.inputs, strict=True)):
            self.read((id(node), p), v, variable in every.values, variable in passed.values)
            if variable in runs.values:
                operands.append(v)
            elif variable in every.values:
                operands.append(through_marked_changes(v)[-1])
        return operands

    def marked(self, node: Node, looped: bool, fenced: bool) -> None:
        """Record the recomputation of an operator with marked operands for its gradient, from where the marked changes start."""
        assert node.body is not None
        runs = self.for_gradient(node, node.body, frozenset(), any(map(self.flow, node.results)), looped)
        self.record(node, runs)
        for v, variable in zip(node.operands, node.body.inputs, strict=True):
            changes = [w.node for w in through_marked_changes(v)[:-1]]
            self.region.fenced.update(id(change) for change in changes if fenced)
            repeated = changes if variable in runs.values else []
            saved = next((k for k, change in enumerate(repeated) if self.is_saved(change)), len(repeated))
            self.region.nodes.update(id(change) for change in repeated[:saved])
            self.region.saved.update((id(change), 0) for change in repeated[saved : saved + 1])

    def is_saved(self, change: Node) -> bool:
        """Return whether a policy saves the result of a change of type."""
        return change.kind in COLLECTIVES and bool(saving_answers(self.policies, COLLECTIVES[change.kind]))

    def for_gradient(self, node: Node, body: Body, outputs: frozenset[int], backward: bool, looped: bool) -> _Needed:
        """Return the variables needed for these outputs of an operator and, with `backward`, for its gradient."""
        read = read_backward(body, tuple(map(self.flow, node.operands)), looped) if backward else frozenset()
        return _needed(body, outputs | read, self.policies)

    def record(self, node: Node, runs: _Needed) -> None:
        """Record the variables of an operator that are recomputed, and that it runs if any is."""
        region = self.region
        region.variables.update((id(node), v) for v in runs.reduced)
        for v in runs.saved:
            (region.offloaded if v in runs.offloaded else region.saved).add((id(node), v))
        region.nodes.update([id(node)] if runs.computes else [])

    def read(self, place: Place, value: Value, is_read: bool, for_result: bool) -> None:
        """Record a read of a value, if it is read: for a result that is recomputed, or for a gradient alone."""
        region = self.region
        region.passed.update([place] if for_result else [])
        if is_read:
            region.reads.add(place)
            region.producers[place] = id(value.node)
            region.nested.update([place] if self.in_remat else [])


@dataclass(frozen=True)
class _Needed:
    """The part of a body that some of its variables depend on.

    values: the variables that are computed or read.
    reduced: those among them whose sums over devices run again.
    saved: those that a policy saves.
    offloaded: those among these that every policy that saves them saves in the memory of the host.
    computes: whether any equation runs.
    """

    values: frozenset[int]
    reduced: frozenset[int]
    saved: frozenset[int]
    offloaded: frozenset[int]
    computes: bool


@lru_cache(maxsize=65536)
def _needed(body: Body, targets: frozenset[int], policies: Policies) -> _Needed:
    """Return the part of a body that these variables depend on, up to the values that a policy saves."""
    values, computed, saved, offloaded = set(targets), set[int](), set[int](), set[int]()
    for e in reversed(body.equations):
        if values.isdisjoint(e.results):
            continue
        structs = (body.tensor(a).struct for a in e.operands)
        answers = saving_answers(policies, e.primitive, *structs, **e.params)
        if not answers:
            values.update(a for a in e.operands if isinstance(a, int))
            computed.update(e.results)
        else:
            read = values.intersection(e.results)
            saved.update(read)
            offloaded.update(read if all(map(offloads, answers)) else ())
    reduced = computed if saving_answers(policies, primitives.psum_p) else values
    return _Needed(frozenset(values), frozenset(reduced), frozenset(saved), frozenset(offloaded), bool(computed))
