"""Residuals of the operators of one graph on one device, and the values that they alias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from unity.pcg.analysis.hoisting import residual_factors
from unity.pcg.analysis.recomputation_marks import runs_again
from unity.pcg.analysis.rematerialization import Recomputation, offloaded_in_branches, recomputation
from unity.pcg.analysis.residuals import Residuals
from unity.pcg.ir.gradient_flow import Gradients
from unity.pcg.ir.graph import LOOPS, PARALLELIZATION, PCG, STAGES, Node, Value
from unity.pcg.types.factors import facts_of
from unity.search.cost.inner_values import Inner, inner_of
from unity.search.memory.backend import Backend
from unity.search.space.live_buffers import BACKEND, CHANGED, KEPT, WIDENED, AliasTables, Buffer, stays

ACCUMULATION = "accumulation"  # the kind of a loop over micro-batches, whose residuals are live in one step, unlike other loops'
ORIGINAL, TRANSPOSED = "original", "transposed"


@dataclass(frozen=True)
class Setting:
    """Facts that all graphs of a program share: where gradients flow, whether there is a backward pass, and the compiler."""

    program: PCG
    flow: Gradients
    training: bool
    backend: Backend

    @cached_property
    def residual_factors(self) -> Mapping[int, int]:
        """The factor by which a node in a scan has fewer residuals than one per step (`pcg.analysis.hoisting.residual_factors`)."""
        return residual_factors(self.program)

    @cached_property
    def recomputed(self) -> Recomputation:
        """The recomputation in remats, with the values that their policies save. Without a policy, only offloads in branches."""
        if not self.training:
            return Recomputation()
        if any(node.policy is not None for node, _ in self.program.walk()):
            return recomputation(self.program, self.flow)
        return Recomputation(in_branches=offloaded_in_branches(self.program, self.flow))


@dataclass(frozen=True)
class Nesting:
    """The place of a graph among the nested graphs of a program.

    Attributes:
        around: the kind of the node that the graph is inside of; empty for the outermost graph.
        straight: whether only remats are around the graph, so that the backend can compute values at the start of the program.
        stacks: whether its residuals are stacked, as those of a loop's steps are.
        depth: the number of remats around it.
    """

    around: str = ""
    straight: bool = True
    stacks: bool = False
    depth: int = 0

    @property
    def outermost(self) -> bool:
        """Whether nothing is around the graph."""
        return not self.around

    @property
    def in_loop(self) -> bool:
        """Whether the graph is a step of a loop that stacks its residuals."""
        return self.around in LOOPS

    def inside(self, node: Node, accumulates: bool) -> Nesting:
        """Return the nesting of the graph inside a node. `accumulates` says whether that is a loop that adds up gradients."""
        remat = node.kind == "remat"
        around = ACCUMULATION if accumulates else node.kind
        return Nesting(around, self.straight and remat, around in LOOPS or around == STAGES, self.depth + remat)


OUTERMOST = Nesting()


class ResidualCollector:
    """The residuals of a graph, collected operator by operator in order (`kept_by`, `need`)."""

    def __init__(self, graph: PCG, setting: Setting, nesting: Nesting) -> None:
        """Start with no residuals."""
        self.graph, self.setting, self.nesting = graph, setting, nesting
        self.flow, self.training, self.backend = setting.flow, setting.training, setting.backend
        self.nodes = [node for node in graph.nodes if node.kind != "input"]
        self.numbers = {id(node): i for i, node in enumerate(self.nodes)}
        self.aliases = AliasTables(graph, [node for node in graph.nodes if setting.recomputed.saves(node)])
        self.nbytes = self.aliases.nbytes
        self.inputs = {id(node): k for k, node in enumerate(graph.inputs)}
        self.own_bytes = {v: n if self.takes_memory(v) else 0.0 for v, n in self.nbytes.items()}
        self.chosen: dict[Value, None] = {}  # the values that are residuals, in order
        self.wide: set[Value] = set()  # those that are also residuals in a wider dtype
        self.forms: dict[Value, set[str]] = {}  # the orders of dimensions in which they are residuals
        self.needs: set[int] = set()  # inputs that the backward pass needs
        self.residual_bytes = 0.0  # the sum of all bytes of residuals

    @cached_property
    def at_products(self) -> frozenset[Value]:
        """The operands and results of products, each as the value that it aliases."""
        products = (node for node in self.nodes if facts_of(node.kind).product)
        return frozenset(self.aliases.unmoved[v] for node in products for v in (*node.operands, *node.results))

    @cached_property
    def remats(self) -> int:
        """The number of remats in the graph."""
        return sum(node.kind == "remat" for node in self.nodes)

    def stays(self, node: Node) -> bool:
        """Return whether a node's value aliases its operand."""
        return stays(node) and not self.setting.recomputed.saves(node)

    def takes_memory(self, v: Value) -> bool:
        """Return whether a value, or its cotangent, takes memory here; arguments and their gradients are counted elsewhere."""
        return not (self.nesting.outermost and id(v.node) in self.inputs) and (self.flow(v) or not self.training)

    def need(self, v: Value, reader: Node | None = None) -> list[Buffer]:
        """Make a value a residual, unless it already is one, and return the new buffers.

        The residual is the value's operand where nothing moves or the value is gathered again, and all operands of an operator that
        runs again. Some readers need it in a wider dtype, or in another order of dimensions, too.
        """
        wide = (self.nesting.in_loop and self.backend.is_narrow(v.tensor)) or (
            reader is not None and self.backend.widens(reader, v)
        )
        transposed = (
            reader is not None and self.backend.reads_transposed(reader, v) and not self.argument(v) and not self.waits(reader)
        )
        v = self.aliases.kept[v]
        if runs_again(v.node):
            return [h for w in v.node.operands for h in self.need(w)]
        form = TRANSPOSED if transposed else ORIGINAL
        more = [self.buffer(WIDENED, v.node, self.local(v))] if wide and v not in self.wide else []
        self.wide |= {v} if wide else set()
        if v in self.chosen:
            more += [self.buffer(BACKEND, v.node, self.local(v))] if form not in self.forms[v] else []
            self.forms[v] |= {form}
            return more
        self.chosen[v], self.forms[v] = None, {form}
        if id(v.node) in self.inputs:
            self.needs.add(self.inputs[id(v.node)])
            return more
        why = CHANGED if v.node.kind in PARALLELIZATION else KEPT
        return [self.count(self.buffer(why, v.node, self.local(v))), *more]

    def local(self, v: Value) -> float:
        """Return the bytes of one of the graph's values on one device."""
        return self.nbytes[v]

    def count(self, buffer: Buffer) -> Buffer:
        """Add a buffer to the sum of residuals, and return it."""
        self.residual_bytes += buffer.nbytes
        return buffer

    def buffer(self, why: str, node: Node, nbytes: float) -> Buffer:
        """Return the buffer of one run of a node: a fraction of it, if several runs share it."""
        return Buffer(why, node, nbytes / self.setting.residual_factors.get(id(node), 1))

    def inner(self, node: Node) -> Inner:
        """Return the inner values of an operator."""
        assert node.body is not None
        return inner_of(node.body, tuple(v.type for v in node.operands), node.types, self.graph.axes)

    def flows(self, node: Node) -> tuple[bool, ...]:
        """Return for each operand whether a gradient flows back to it."""
        return tuple(map(self.flow, node.operands))

    def kept_by(self, node: Node, needed: Residuals, inner: Inner) -> list[Buffer]:
        """Add the residuals of an operator, and return the new buffers.

        Operands with halos are residuals in that form. `needed` are the values that the backward pass reads.
        """
        if not (self.training and any(map(self.flow, node.results))):
            return []
        buffers: list[Buffer] = []
        extended = (*inner.extended, *(0.0 for _ in node.results))
        for v, flag, nbytes in zip((*node.operands, *node.results), needed.operands + needed.results, extended, strict=True):
            if not flag or (v.node is node and runs_again(node)) or self.backend.keeps_indices(node):
                continue
            buffers += self.extended(v, node, nbytes) if nbytes else self.need(v, node)
        if node.again:
            return buffers
        hosted = needed.hosted if self.backend.offloads and id(node) in self.setting.recomputed.in_branches else ()
        sizes = inner.residuals(self.flows(node), self.nesting.stacks, self.backend.buffered)[1]
        for k, ((variable, _), nbytes) in enumerate(zip(needed.inner, sizes, strict=True)):
            if k in hosted:
                continue
            buffers.append(self.count(self.buffer(KEPT, node, nbytes)))
            if self.nesting.in_loop and self.backend.is_narrow(inner.body.tensors[variable]):
                buffers.append(self.buffer(WIDENED, node, nbytes))
        return buffers

    def extended(self, v: Value, reader: Node, nbytes: float) -> list[Buffer]:
        """Make an operand with its halos a residual of `nbytes` bytes, and return the new buffers.

        If the reader waits for recomputed operands, only the halos are residuals, beside the operand itself.
        """
        if not self.waits(reader):
            return [self.count(self.buffer(CHANGED, reader, nbytes))]
        return [*self.need(v, reader), self.count(self.buffer(CHANGED, reader, nbytes - self.local(v)))]

    def waits(self, node: Node) -> bool:
        """Return whether an operator's backward pass waits for operands that are recomputed. It then reads all operands anew."""
        bases = [self.aliases.kept[v] for v in node.operands]
        return any(runs_again(base.node) for base in bases) or bases != [self.aliases.unmoved[v] for v in node.operands]

    def recomputed_inner_bytes(self, node: Node) -> float:
        """Return the bytes of the inner values that an operator's own backward pass recomputes; in a loop they are not stacked."""
        if not node.again:
            return 0.0
        return sum(self.inner(node).residuals(self.flows(node), False, self.backend.buffered)[1])

    def recomputed_operand_bytes(self, node: Node) -> float:
        """Return the bytes that are live in an operator's backward pass because operands of it are recomputed as a whole."""
        total = 0.0
        for v in node.operands:
            base = self.aliases.kept[v]
            if runs_again(base.node):
                total += self.local(base) if self.aliases.unmoved[v] != base else 0.0
                total += self.recomputed_inner_bytes(base.node) + self.recomputed_operand_bytes(base.node)
        return total

    def is_live(self, v: Value) -> bool:
        """Return whether a value is live without its reader: as an argument, or as a residual that is not gathered again."""
        return self.aliases.unmoved[v] in self.chosen or self.argument(v)

    def argument(self, v: Value) -> bool:
        """Return whether a value aliases an argument."""
        return self.nesting.outermost and id(self.aliases.unmoved[v].node) in self.inputs
