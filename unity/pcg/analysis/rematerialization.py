"""Rematerialization: the operators and changes of type that the backward pass recomputes, with counts.

The backward pass of a remat recomputes the inner values that it reads, and everything that they depend on, from the remat's
operands and from the values that its policy saves; the rest is dead code there. A remat nested in a remat runs again in the
backward pass of the outer one, if its results are read there or if its policy saves values, and again in its own. The carry of a
scan inside of a remat is recomputed, too.

A node's `again` marks a change of type whose result is recomputed, and an operator whose inner values (`Recompute.INNER`) or whole
result (`Recompute.WHOLE`) are recomputed. In the latter case the operator runs again together with its only user, as in a remat
around both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

from jax.extend.core import primitives

from unity.pcg.analysis.hoisting import hoisted_again
from unity.pcg.analysis.policies import COLLECTIVES, Policies, offloads, policies_of, replacing, save_messages, saving_answers
from unity.pcg.analysis.residuals import read_backward, residuals
from unity.pcg.ir.gradient_flow import Gradients
from unity.pcg.ir.graph import BRANCHES, LOOPS, PARALLELIZATION, PCG, PIPELINE, STAGES, TAIL, Node, Value, recurrent
from unity.pcg.ir.payloads import Recompute
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.jaxprs import BRANCHED

GROUPED = (PIPELINE, TAIL, BRANCHES, STAGES)  # a device runs one of several alternatives, whose residuals are in one memory


def in_words(again: int) -> str:
    """Describe which part of an operator the backward pass recomputes. `again` is its number in a file (`Recompute`)."""
    words = ("all of it is kept", "inner values are computed again in the backward pass", "it runs again in the backward pass")
    return words[again]


def runs_again(node: Node) -> bool:
    """Return whether an operator's result is not kept, but recomputed for its user."""
    return node.kind not in PARALLELIZATION and node.again == Recompute.WHOLE


Place = tuple[int, int]  # an operand: id(node) and position; a variable: id(node) and number; an output: id(graph) and position
Table = Mapping[Place, set[int]]  # regions by place


@dataclass(frozen=True)
class Recomputation:
    """The runs that the backward pass adds to one run of the graph around a node.

    A *region* is a remat, or an operator with operands marked "again"; each has a number. The tables map nodes and places to the
    regions in whose backward pass they are recomputed or read.

    Attributes:
        nodes: nodes that run again, by id(node).
        variables: variables of operators that are recomputed, with their reductions.
        reads: operands, and outputs of nested graphs, that are read.
        producers: the node, by id, whose result is read at a place.
        nested: the regions in which a place is read in a remat inside of the region.
        passed: those among the reads that recompute a result, and do not only serve a gradient.
        saved: variables of operators that a policy saves on the device and the recomputation reads. A change of type has the
            variable 0.
        offloaded: variables of operators that a policy saves in the memory of the host, likewise.
        unread: operands of remats that the backward pass does not read, since it reads named or offloaded values in their place.
        in_branches: by id(node), the values that a checkpoint in a branch of a conditional offloads, as in `Residuals.inner`.
        marked: the regions that are operators with marked operands.
        depths: by region, the number of remats around it, itself included.
        apart: marked changes of type, by id(node), with further regions in which they run for a single operator.
        fewer: by region, the factors by which nodes run less often there than their graph (`unity.pcg.analysis.hoisting`).
        fenced: marked changes of type, by id(node), that run for a single operator in the forward pass. If JAX runs a remat in a
            loop, or recomputes a remat in a remat, it separates the operands of the checkpoints inside of it by barriers.
    """

    nodes: dict[int, set[int]] = field(default_factory=dict)
    variables: dict[Place, set[int]] = field(default_factory=dict)
    reads: dict[Place, set[int]] = field(default_factory=dict)
    producers: dict[Place, int] = field(default_factory=dict)
    nested: dict[Place, set[int]] = field(default_factory=dict)
    passed: dict[Place, set[int]] = field(default_factory=dict)
    saved: dict[Place, set[int]] = field(default_factory=dict)
    offloaded: dict[Place, set[int]] = field(default_factory=dict)
    unread: dict[Place, set[int]] = field(default_factory=dict)
    in_branches: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    marked: set[int] = field(default_factory=set)
    depths: dict[int, int] = field(default_factory=dict)
    apart: dict[int, set[int]] = field(default_factory=dict)
    fewer: dict[int, Mapping[int, int]] = field(default_factory=dict)
    fenced: dict[int, set[int]] = field(default_factory=dict)

    def repeats(self, node: Node) -> Fraction:
        """Return how often a node runs again for each run of its graph."""
        return self._runs(id(node), self.nodes.get(id(node), ()))

    def alone(self, node: Node) -> Fraction:
        """Return how often a node runs again for a single operator, which shares the result with no other."""
        return self._runs(id(node), self.nodes.get(id(node), set()) & self.marked | self.apart.get(id(node), set()))

    def computed(self, node: Node, variable: int) -> Fraction:
        """Return how often a variable of an operator's program is recomputed."""
        return self._runs(id(node), self.variables.get((id(node), variable), ()))

    def _runs(self, node: int, regions: Iterable[int]) -> Fraction:
        """Return the runs of a node in some regions, for each run of its graph."""
        return sum((Fraction(1, self.fewer[region].get(node, 1)) for region in regions), Fraction())

    def is_unread(self, remat: Node, operand: int) -> bool:
        """Return whether the backward pass of a remat ignores an operand, so that it need not be kept."""
        return (id(remat), operand) in self.unread

    def saves(self, node: Node) -> bool:
        """Return whether a policy saves a value of an operator, on the device or on the host."""
        return bool(self.saved_of(node) or self.offloaded_of(node))

    def variables_of(self, node: Node) -> tuple[tuple[int, Fraction], ...]:
        """Return the recomputed variables of an operator's program, each with the number of recomputations."""
        return tuple(self._by_node.get(id(node), ()))

    def saved_of(self, node: Node) -> tuple[tuple[int, int], ...]:
        """Return the variables of an operator's program that a policy saves on the device.

        Each has the depth of the outermost remat that saves it. The variable is 0 for a change of type whose result is saved.
        """
        return tuple(self._saved_by_node.get(id(node), ()))

    def offloaded_of(self, node: Node) -> tuple[tuple[int, int], ...]:
        """Return the variables of an operator's program that a policy saves in the memory of the host, like `saved_of`."""
        return tuple(self._offloaded_by_node.get(id(node), ()))

    def host_values(self, node: Node) -> tuple[tuple[int, int, int], ...]:
        """Return all values of an operator in the memory of the host, as (variable, bytes of the whole value, depth).

        The variable has the value's sharding. The depth is that of the outermost remat that saves it, 0 without any.
        """
        body, branches = node.body, self.in_branches.get(id(node), ())
        saved = tuple((v, body.tensors[v].nbytes, depth) for v, depth in self.offloaded_of(node)) if body is not None else ()
        return (*saved, *((v, nbytes, 0) for v, nbytes in branches))

    @cached_property
    def _saved_by_node(self) -> dict[int, list[tuple[int, int]]]:
        return self._by_depth(self.saved)

    @cached_property
    def _offloaded_by_node(self) -> dict[int, list[tuple[int, int]]]:
        """The table of `offloaded_of`, without the values that another policy saves on the device."""
        return self._by_depth({place: regions for place, regions in self.offloaded.items() if place not in self.saved})

    def _by_depth(self, table: Mapping[Place, set[int]]) -> dict[int, list[tuple[int, int]]]:
        by_node: dict[int, list[tuple[int, int]]] = {}
        for (node, variable), regions in sorted(table.items()):
            by_node.setdefault(node, []).append((variable, min(self.depths[region] for region in regions)))
        return by_node

    @cached_property
    def _by_node(self) -> dict[int, list[tuple[int, Fraction]]]:
        by_node: dict[int, list[tuple[int, Fraction]]] = {}
        for (node, variable), regions in self.variables.items():
            by_node.setdefault(node, []).append((variable, self._runs(node, regions)))
        return {node: sorted(counts) for node, counts in by_node.items()}

    def read(self, places: Iterable[Place]) -> tuple[Fraction, Fraction]:
        """Return how often any of these users of a value reads it in the backward pass: in all, and to recompute a result.

        A region in which a loop hoists the value counts by its runs there. The second number is that of a marked change,
        which no loop hoists out of a remat in the region.
        """
        places = tuple(places)
        return self._reads(self.reads, places, {}), self._reads(self.passed, places, self.nested)

    def _reads(self, table: Table, places: Iterable[Place], unhoisted: Table) -> Fraction:
        """Return how often any of some places is read in the regions of a table, hoisted but for those in `unhoisted`."""
        fewest = dict[int, int]()
        for place in places:
            for region in table.get(place, ()):
                less = 1 if region in unhoisted.get(place, ()) else self.fewer[region].get(self.producers[place], 1)
                fewest[region] = min(less, fewest.get(region, less))
        return sum((Fraction(1, less) for less in fewest.values()), Fraction())


def recomputation(graph: PCG, flow: Gradients, kept: Collection[str] = GROUPED) -> Recomputation:
    """Return the recomputation of a graph, serial or parallel, and of the graphs nested in it.

    Args:
        graph: The graph.
        flow: Where gradients flow.
        kept: The kinds of nodes inside of which policies offload nothing.
    """
    tables = Recomputation(in_branches=offloaded_in_branches(graph, flow, kept))
    for region, (run, depth, remat) in enumerate(_runs(graph, flow, _Around(), kept)):
        tables.depths[region] = depth
        tables.marked.update([region] if remat is None else [])
        tables.fewer[region] = {} if remat is None else hoisted_again(remat, flow)
        tables.producers.update(run.producers)
        for table, key in run.notes:
            getattr(tables, table).setdefault(key, set()).add(region)
    return tables


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


def _runs(graph: PCG, flow: Gradients, around: _Around, kept: Collection[str]) -> Iterator[tuple[_Run, int, Node | None]]:
    """Yield the recomputation of every region, its depth, and its remat; None for an operator with marked operands."""
    for node in graph.nodes:
        if node.inside is not None:
            offloads = around.offloads and node.kind not in kept
            inner = replace(around, looped=around.looped or node.kind in LOOPS, offloads=offloads)
            if node.kind == "remat":
                policies = around.policies + policies_of(node, around.offloads)
                inner = _Around(around.looped, around.looped, policies, around.depth + 1, around.offloads)
                run = _Run(flow, inner.policies)
                run.graph(node.inside, [False] * len(node.tensors), True, around.looped)
                run.notes += _unread(node, node.inside, run, around.looped)
                yield run, inner.depth, node
            yield from _runs(node.inside, flow, inner, kept)
        elif node.body is not None and _has_marked_operands(node):
            run = _Run(flow, (*around.policies, save_messages))
            run.region(node, around)
            yield run, around.depth, None


def _unread(remat: Node, graph: PCG, run: _Run, looped: bool) -> list[tuple[str, Place]]:
    """Return notes of the operands of a remat that its backward pass does not read once it has named and offloaded values."""
    if all(table not in ("saved", "offloaded") for table, _ in run.notes):
        return []
    read = _Run(run.flow, (replacing(run.policies),)).graph(graph, [False] * len(remat.tensors), True, looped)
    return [("unread", (id(remat), p)) for p, flag in enumerate(read) if not flag]


class _Run:
    """The recomputation in the backward pass of one region.

    flow: the gradient flow of the whole graph.
    policies: those of the remats around it.
    in_remat: the walk is in a nested remat whose results are recomputed.
    wanted: variables of operators in a nested remat that its policy saves for its gradient, by id(node).
    notes: entries of the tables of `Recomputation`, as (table, key).
    producers: as in `Recomputation`.
    """

    def __init__(self, flow: Gradients, policies: Policies) -> None:
        self.flow, self.policies = flow, policies
        self.in_remat = False
        self.wanted: dict[int, frozenset[int]] = {}
        self.notes: list[tuple[str, Any]] = []
        self.producers: dict[Place, int] = {}

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
            saved, needed = self.is_saved(node), any(results) or id(node) in self.wanted
            flags = [needed and not saved] * len(node.operands)
            self.notes += [("saved", (id(node), 0))] if needed and saved else []
        if any(flags):
            self.notes.append(("nodes", id(node)))
            self.notes += [("apart", id(node))] if self.in_remat and node.again else []
        for p, flag in enumerate(flags):
            self.read((id(node), p), node.operands[p], flag, flag)
        return [v for v, flag in zip(node.operands, flags, strict=True) if flag]

    def nested(self, node: Node, graph: PCG, results: Sequence[bool], backward: bool, looped: bool) -> list[bool]:
        """Record the recomputation of a nested graph; return whether each operand of its node is read."""
        if node.kind in (BRANCHES, STAGES):
            return [backward or any(results)] * len(node.operands)
        if node.kind not in LOOPS:  # its own backward pass recomputes from operands and saved values: only these are needed here
            gradient = _Run(self.flow, self.policies + policies_of(node))
            own = gradient.graph(graph, [False] * len(results), backward, looped)
            self.notes += self.saved_for_gradient(graph, len(results), backward, looped)
            outer, self.in_remat, self.wanted = (self.in_remat, self.wanted), True, self.wanted | gradient.saved
            for_results = self.graph(graph, results, False, looped)
            self.in_remat, self.wanted = outer
            return [a or b for a, b in zip(own, for_results, strict=True)]
        carried, outputs, start = recurrent(node), list(results), len(self.notes)
        while True:
            del self.notes[start:]
            needed = self.graph(graph, outputs, backward, True)
            grown = [flag or (k < len(carried) and needed[carried[k]]) for k, flag in enumerate(outputs)]
            if grown == outputs:
                return needed
            outputs = grown

    @property
    def saved(self) -> dict[int, frozenset[int]]:
        """The variables of operators that policies save, by id(node)."""
        by_node: dict[int, set[int]] = {}
        for table, key in self.notes:
            if table in ("saved", "offloaded"):
                by_node.setdefault(key[0], set()).add(key[1])
        return {node: frozenset(variables) for node, variables in by_node.items()}

    def saved_for_gradient(self, graph: PCG, results: int, backward: bool, looped: bool) -> list[tuple[str, Any]]:
        """Return notes of the values in a nested remat that this region's policies save for the nested remat's gradient."""
        if not self.policies:
            return []
        run = _Run(self.flow, self.policies)
        run.graph(graph, [False] * results, backward, looped)
        return [note for note in run.notes if note[0] in ("saved", "offloaded")]

    def operator(self, node: Node, body: Body, results: Sequence[bool], backward: bool, looped: bool) -> list[Value]:
        """Record the recomputation of an operator; return the values that are read for it.

        An operator with marked operands is a region: here it runs for its results only, and its gradient keeps the values that the
        marked changes start from.
        """
        outputs = frozenset(a for a, flag in zip(body.outputs, results, strict=True) if flag and isinstance(a, int))
        outputs |= self.wanted.get(id(node), frozenset())
        passed, every = _needed(body, outputs, self.policies), self.for_gradient(node, body, outputs, backward, looped)
        runs = passed if _has_marked_operands(node) else every
        self.note(node, runs)
        operands = []
        for p, (v, variable) in enumerate(zip(node.operands, body.inputs, strict=True)):
            self.read((id(node), p), v, variable in every.values, variable in passed.values)
            if variable in runs.values:
                operands.append(v)
            elif variable in every.values:
                operands.append(_through_marked_changes(v)[-1])
        return operands

    def region(self, node: Node, around: _Around) -> None:
        """Record the recomputation of an operator with marked operands for its gradient, from where the marked changes start."""
        assert node.body is not None
        runs = self.for_gradient(node, node.body, frozenset(), any(map(self.flow, node.results)), around.looped)
        self.note(node, runs)
        for v, variable in zip(node.operands, node.body.inputs, strict=True):
            changes = [w.node for w in _through_marked_changes(v)[:-1]]
            self.notes += [("fenced", id(change)) for change in changes] if around.fenced else []
            repeated = changes if variable in runs.values else []
            saved = next((k for k, change in enumerate(repeated) if self.is_saved(change)), len(repeated))
            self.notes += [("nodes", id(change)) for change in repeated[:saved]]
            self.notes += [("saved", (id(change), 0)) for change in repeated[saved : saved + 1]]

    def is_saved(self, change: Node) -> bool:
        """Return whether a policy saves the result of a change of type."""
        return change.kind in COLLECTIVES and bool(saving_answers(self.policies, COLLECTIVES[change.kind]))

    def for_gradient(self, node: Node, body: Body, outputs: frozenset[int], backward: bool, looped: bool) -> _Needed:
        """Return the variables needed for these outputs of an operator and, with `backward`, for its gradient."""
        read = read_backward(body, tuple(map(self.flow, node.operands)), looped) if backward else frozenset()
        return _needed(body, outputs | read, self.policies)

    def note(self, node: Node, runs: _Needed) -> None:
        """Record the variables of an operator that are recomputed, and that it runs if any is."""
        self.notes += [("variables", (id(node), v)) for v in runs.reduced]
        self.notes += [("offloaded" if v in runs.offloaded else "saved", (id(node), v)) for v in runs.saved]
        self.notes += [("nodes", id(node))] if runs.computes else []

    def read(self, place: Place, value: Value, every: bool, passed: bool) -> None:
        """Record a read of a value: `passed` if it is to recompute a result, `every` if it is for that or for a gradient."""
        self.notes += [("reads", place)] if every else []
        self.notes += [("passed", place)] if passed else []
        if every:
            self.producers[place] = id(value.node)
            self.notes += [("nested", place)] if self.in_remat else []


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


def _has_marked_operands(node: Node) -> bool:
    """Return whether an operand of an operator is the result of an operator or a change of type marked "again"."""
    return any(runs_again(v.node) or len(_through_marked_changes(v)) > 1 for v in node.operands)


def _through_marked_changes(v: Value) -> list[Value]:
    """Return an operand, and the values before each of the marked changes of type that lead to it, down to the one that is kept."""
    values = [v]
    while v.node.kind in PARALLELIZATION and v.node.again:
        v = v.node.operands[0]
        values.append(v)
    return values
