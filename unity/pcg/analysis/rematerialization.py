"""Rematerialization: which operators and changes of type the backward pass runs once more, and how often.

The backward pass of a remat computes again what it reads of the values inside, and what those are made of, from the remat's
operands and from what its policy saves; the rest is dead code there. A remat inside of a remat runs once more in the backward pass
of the outer one, as far as its results are read there, and once more in its own. Of a scan inside of a remat the carry is computed
again, too.

An attribute "again" marks a change of type whose result is not kept; and an operator whose inner values are not (`INNER`), or its
result is not either (`WHOLE`). Then it runs again with its only reader, as in a remat around both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any

from jax.extend.core import primitives

from unity.pcg.analysis.residuals import read_backward
from unity.pcg.ir.gradient_flow import Gradients
from unity.pcg.ir.graph import BRANCHES, LOOPS, PARALLELIZATION, PCG, STAGES, Node, Value, recurrent
from unity.pcg.ir.program import Body

INNER, WHOLE = 1, 2  # what of an operator runs again
Policies = tuple[Callable[..., Any], ...]  # of a remat and those around it: what one of them saves is saved
# The collective of a change of type, as a policy is asked about it.
COLLECTIVES = {
    "combine": primitives.all_gather_p, "combine_replicate": primitives.all_gather_p, "reduce": primitives.psum_p,
    "reduce_partition": primitives.psum_p, "combine_partition": primitives.all_to_all_p,
}  # fmt: skip


def in_words(again: int) -> str:
    """What the attribute "again" of an operator says."""
    words = ("all of it is kept", "inner values are computed again in the backward pass", "it runs again in the backward pass")
    return words[again]


def runs_again(node: Node) -> bool:
    """Whether an operator's result is not kept, but made again for its reader."""
    return node.kind not in PARALLELIZATION and node.attributes.get("again") == WHOLE


Place = tuple[int, int]  # an operand: id(node) and position; a variable: id(node) and number; an output: id(graph) and position


@dataclass(frozen=True)
class Recomputation:
    """The runs that the backward pass adds to one run of the graph around a node.

    Each entry is a set of numbers, one for each remat, or operator with marked operands, whose backward pass runs it again.

    nodes: by id(node), of nodes that run.
    variables: of variables that are computed and reduced.
    reads: of operands, and outputs of graphs inside, that are read.
    passed: of those that are read to compute a result anew, and not for a gradient alone.
    marked: the numbers that stand for an operator with marked operands.
    apart: of marked changes of type, those of the other numbers in which they run for a single operator, too.
    fenced: by id(node), of marked changes of type that do so forward: where JAX runs a remat in a loop, or a remat in a remat once
        more, it keeps apart what the checkpoints inside of it read.
    """

    nodes: dict[int, set[int]] = field(default_factory=dict)
    variables: dict[Place, set[int]] = field(default_factory=dict)
    reads: dict[Place, set[int]] = field(default_factory=dict)
    passed: dict[Place, set[int]] = field(default_factory=dict)
    marked: set[int] = field(default_factory=set)
    apart: dict[int, set[int]] = field(default_factory=dict)
    fenced: dict[int, set[int]] = field(default_factory=dict)

    def repeats(self, node: Node) -> int:
        """How often a node runs again."""
        return len(self.nodes.get(id(node), ()))

    def alone(self, node: Node) -> int:
        """How often a node runs again for a single operator, which shares the result with no other one."""
        return len(self.nodes.get(id(node), set()) & self.marked | self.apart.get(id(node), set()))

    def computed(self, node: Node, variable: int) -> int:
        """How often a variable of an operator's program is computed again."""
        return len(self.variables.get((id(node), variable), ()))

    def variables_of(self, node: Node) -> tuple[tuple[int, int], ...]:
        """How often each variable of an operator's program is computed again, of those that are."""
        return tuple(self._by_node.get(id(node), ()))

    @cached_property
    def _by_node(self) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = {}
        for (node, variable), numbers in self.variables.items():
            found.setdefault(node, []).append((variable, len(numbers)))
        return {node: sorted(some) for node, some in found.items()}

    def read(self, places: Iterable[Place]) -> tuple[int, int]:
        """How often a value is made again for any of these readers: in all, and to compute a result anew."""
        places = tuple(places)
        every, passed = (len(set().union(*(found.get(p, ()) for p in places))) for found in (self.reads, self.passed))
        return every, passed


def recomputation(graph: PCG, flow: Gradients) -> Recomputation:
    """Finds what the backward pass recomputes of a graph, serial or parallel, and of the graphs nested in it."""
    found = Recomputation()
    for number, (run, marked) in enumerate(_runs(graph, flow, _Around())):
        found.marked.update([number] if marked else [])
        for table, at in run.notes:
            getattr(found, table).setdefault(at, set()).add(number)
    return found


@dataclass(frozen=True)
class _Around:
    """The surroundings of a nested graph: whether it is in a loop, or a remat in a loop, and the policies of remats around it."""

    looped: bool = False
    fenced: bool = False
    policies: Policies = ()


def _runs(graph: PCG, flow: Gradients, around: _Around) -> Iterator[tuple[_Run, bool]]:
    """Every backward pass that computes again, and whether it is that of an operator with marked operands."""
    for node in graph.nodes:
        if node.inside is not None:
            inner = replace(around, looped=around.looped or node.kind in LOOPS)
            if node.kind == "remat":
                inner = replace(around, fenced=around.looped, policies=around.policies + policies_of(node))
                run = _Run(flow, inner.policies)
                run.graph(node.inside, [False] * len(node.tensors), True, around.looped)
                yield run, False
            yield from _runs(node.inside, flow, inner)
        elif node.body is not None and _marked(node):
            run = _Run(flow, (*around.policies, _save_messages))
            run.alone(node, around)
            yield run, True


def policies_of(remat: Node) -> Policies:
    """The policy of a remat, if it has one."""
    return () if remat.policy is None else (remat.policy,)


def _save_messages(primitive: Any, *_: Any, **__: Any) -> bool:
    """The policy of the checkpoint around an operator with marked operands (`exec.lowering`)."""
    return primitive.name == "ppermute"


class _Run:
    """One backward pass, as far as it computes again. `notes`: entries of the tables of `Recomputation`."""

    def __init__(self, flow: Gradients, policies: Policies) -> None:
        self.flow, self.policies = flow, policies
        self.entered = False  # a remat inside, whose results are computed anew
        self.notes: list[tuple[str, Any]] = []

    def graph(self, graph: PCG, ends: Sequence[bool], backward: bool, looped: bool) -> list[bool]:
        """Runs the part of a graph that the outputs in `ends` need and, with `backward`, its gradients; returns which inputs that
        reads. `looped`: the graph is inside of a loop."""
        wanted = {v for v, flag in zip(graph.outputs, ends, strict=True) if flag}
        for q, flag in enumerate(ends):
            self.read((id(graph), q), flag, flag)
        for node in reversed(graph.nodes):
            if node.kind != "input":
                wanted.update(self.node(node, [v in wanted for v in node.results], backward, looped))
        return [Value(n) in wanted for n in graph.inputs]

    def node(self, node: Node, marks: Sequence[bool], backward: bool, looped: bool) -> list[Value]:
        """Runs the part of a node that its results with `marks` need, and its gradient; returns the operands that are read."""
        backward = backward and any(map(self.flow, node.results))
        if node.body is not None:
            return self.operator(node, node.body, marks, backward, looped)
        if node.inside is not None:
            flags = self.inside(node, node.inside, marks, backward, looped)
        else:
            flags = [any(marks) and not self.saved(node)] * len(node.operands)
        if any(flags):
            self.notes.append(("nodes", id(node)))
            self.notes += [("apart", id(node))] if self.entered and node.attributes.get("again") else []
        for p, flag in enumerate(flags):
            self.read((id(node), p), flag, flag)
        return [v for v, flag in zip(node.operands, flags, strict=True) if flag]

    def inside(self, node: Node, graph: PCG, marks: Sequence[bool], backward: bool, looped: bool) -> list[bool]:
        if node.kind in (BRANCHES, STAGES):
            return [backward or any(marks)] * len(node.operands)
        if node.kind not in LOOPS:  # a remat computes again for its own gradient in its own backward pass, from its operands
            own = _Run(self.flow, self.policies + policies_of(node)).graph(graph, [False] * len(marks), backward, looped)
            around, self.entered = self.entered, True
            anew = self.graph(graph, marks, False, looped)
            self.entered = around
            return [a or b for a, b in zip(own, anew, strict=True)]
        carried, ends, start = recurrent(node), list(marks), len(self.notes)
        while True:
            del self.notes[start:]
            needed = self.graph(graph, ends, backward, True)
            grown = [e or (k < len(carried) and needed[carried[k]]) for k, e in enumerate(ends)]
            if grown == ends:
                return needed
            ends = grown

    def operator(self, node: Node, body: Body, marks: Sequence[bool], backward: bool, looped: bool) -> list[Value]:
        made = frozenset(a for a, flag in zip(body.outputs, marks, strict=True) if flag and isinstance(a, int))
        passed, every = _needed(body, made, self.policies), self.for_gradient(node, body, made, backward, looped)
        runs = passed if _marked(node) else every  # what is marked runs in a backward pass of its own
        self.note(node, runs)
        found = []
        for p, (v, variable) in enumerate(zip(node.operands, body.inputs, strict=True)):
            self.read((id(node), p), variable in every.values, variable in passed.values)
            if variable in runs.values:
                found.append(v)
            elif variable in every.values:
                found.append(_changes_again(v)[-1])
        return found

    def alone(self, node: Node, around: _Around) -> None:
        """Runs an operator for its own gradient alone, from the values that marked changes start at."""
        assert node.body is not None
        runs = self.for_gradient(node, node.body, frozenset(), any(map(self.flow, node.results)), around.looped)
        self.note(node, runs)
        for v, variable in zip(node.operands, node.body.inputs, strict=True):
            changes = [w.node for w in _changes_again(v)[:-1]]
            self.notes += [("fenced", id(change)) for change in changes] if around.fenced else []
            made = takewhile(lambda change: not self.saved(change), changes if variable in runs.values else ())
            self.notes += [("nodes", id(change)) for change in made]

    def saved(self, change: Node) -> bool:
        """Whether a policy saves what a change of type gives."""
        return change.kind in COLLECTIVES and _saved(self.policies, COLLECTIVES[change.kind])

    def for_gradient(self, node: Node, body: Body, made: frozenset[int], backward: bool, looped: bool) -> _Needed:
        read = read_backward(body, tuple(map(self.flow, node.operands)), looped) if backward else frozenset()
        return _needed(body, made | read, self.policies)

    def note(self, node: Node, runs: _Needed) -> None:
        self.notes += [("variables", (id(node), v)) for v in runs.reduced]
        self.notes += [("nodes", id(node))] if runs.computes else []

    def read(self, place: Place, every: bool, passed: bool) -> None:
        self.notes += [("reads", place)] if every else []
        self.notes += [("passed", place)] if passed else []


@dataclass(frozen=True)
class _Needed:
    """The variables of a body that others depend on: those read, those reduced again if a sum over devices is taken, and whether
    any equation runs."""

    values: frozenset[int]
    reduced: frozenset[int]
    computes: bool


@lru_cache(maxsize=65536)
def _needed(body: Body, wanted: frozenset[int], policies: Policies) -> _Needed:
    values, computed = set(wanted), set[int]()
    for e in reversed(body.equations):
        if values.isdisjoint(e.results):
            continue
        structs = (body.tensor(a).struct for a in e.operands)
        if not _saved(policies, e.primitive, *structs, **e.params):
            values.update(a for a in e.operands if isinstance(a, int))
            computed.update(e.results)
    reduced = computed if _saved(policies, primitives.psum_p) else values
    return _Needed(frozenset(values), frozenset(reduced), bool(computed))


def _saved(policies: Policies, primitive: Any, *operands: Any, **params: Any) -> bool:
    """Whether a policy saves what a primitive gives, on the device or on the host."""
    answers = (policy(primitive, *operands, **params) for policy in policies)
    return any(bool(answer) and type(answer).__name__ != "RecomputeType" for answer in answers)


def _marked(node: Node) -> bool:
    """Whether an operator has an operand that is made again for it."""
    return any(runs_again(v.node) or len(_changes_again(v)) > 1 for v in node.operands)


def _changes_again(v: Value) -> list[Value]:
    """An operand, through the changes that are made again for it, back to the value that is kept."""
    found = [v]
    while v.node.kind in PARALLELIZATION and v.node.attributes.get("again"):
        v = v.node.operands[0]
        found.append(v)
    return found
