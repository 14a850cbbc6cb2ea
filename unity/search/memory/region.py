"""The sweep over the operators of one graph, of the whole program or inside a node: residuals, working sets, and the peak."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import islice
from math import prod

from unity.pcg.analysis.residuals import invariant
from unity.pcg.ir.graph import (
    BRANCHES,
    LOOPS,
    PCG,
    PIPELINE,
    STAGES,
    TAIL,
    UNCHANGED,
    Node,
    Value,
    accumulated_loss,
    carried_by,
    times_inside,
)
from unity.pcg.ir.payloads import Scan
from unity.pcg.parallel.branches import groups_of
from unity.pcg.parallel.stages import FOLLOWED, TWO_BW, ends_of, has_gradient, schedule_of
from unity.pcg.types.accumulation import accumulator, storage_dtype
from unity.pcg.types.factors import facts_of, is_convolution
from unity.search.cost.inner_values import Inner
from unity.search.memory.backend import ACCUMULATING
from unity.search.memory.eager_forward import Ahead, Forward, changes_at_start
from unity.search.memory.live_through import live_through
from unity.search.memory.peak import ReusableGradient, Turns
from unity.search.memory.residuals import ResidualCollector, Setting
from unity.search.space.live_buffers import (
    AGAIN,
    BACKEND,
    CHANGED,
    GRADIENTS,
    KEPT,
    OFFLOADED,
    REUSED,
    WIDENED,
    WORKING,
    Buffer,
    whole,
)

PRODUCT = "dot_general"
FORWARD, BACKWARD = "forward", "backward"
Turn = tuple[str, int]  # the pass, and the number of the operator whose turn it is; -1 before any
ACCUMULATION = "accumulation"  # the kind of a loop over micro-batches, whose residuals are live in one step, unlike other loops'
NOTICED = 1e-3  # relative to all gradients: the memory of smaller ones is not considered for reuse


@dataclass(frozen=True)
class OperatorMemory:
    """Memory that an operator of the outermost graph needs beside its operands and results, on one device.

    Args:
        node: The operator.
        kept: Its residuals.
        values: The values among the residuals.
        own: Bytes that are live at its turn alone: in the backward pass, or in the only pass without gradients.
    """

    node: Node
    kept: tuple[Buffer, ...]
    values: frozenset[Value]
    own: float


class Region(ResidualCollector):
    """The sweep over the operators of a graph: their residuals, and the buffers at the peak."""

    def __init__(
        self,
        graph: PCG,
        setting: Setting,
        around: str = "",
        always: Collection[Buffer] = (),
        straight: bool = False,
        stacked: bool = False,
        depth: int = 0,
    ) -> None:
        """Sweep the operators of a graph.

        Args:
            graph: The graph of a program, or one inside a node.
            setting: The facts of the program.
            around: The kind of the node that the graph is inside of; empty for the outermost graph.
            always: Buffers that are live throughout the step.
            straight: Whether only remats are around the graph, so that the backend can compute values at the start of the program.
            stacked: Whether its residuals leave it as arrays, as those of a loop's step do.
            depth: The number of remats around it.
        """
        self.depth = depth
        super().__init__(graph, setting, around, stacked)
        self.straight = self.top or straight
        self.nodes = [node for node in graph.nodes if node.kind != "input"]
        self.number = {id(node): i for i, node in enumerate(self.nodes)}
        products = [node for node in self.nodes if facts_of(node.kind).product]
        self.products = {self.aliases.unmoved[v] for node in products for v in (*node.operands, *node.results)}
        self.early: list[Ahead] = []  # values that the backend computes at the start
        self.zeros_inside = 0.0  # in a graph inside a remat, bytes of zeros that are live from the start of the program
        self.forward: dict[int, float] = {}  # bytes of an operator's working set in the forward pass, by its number
        self.weights, self.later = self.reusable_gradients(always)
        self.momentary = 0.0  # bytes of residuals inside remats, of which one is open at a time
        self.remats = sum(node.kind == "remat" for node in self.nodes)
        self.own: dict[int, float] = {}  # by id(node): bytes of its working set without operands, results and their cotangents
        self.operators: list[OperatorMemory] = []
        self.saved: list[tuple[int, Buffer]] = []  # values that policies of remats around the graph save, by the depth of the remat
        self.offloaded: list[Buffer] = []  # values that such policies save in the memory of the host, all runs together
        self.fetched = 0.0  # bytes of those of the graph's own operators: while they are used, a copy is on its way
        self.invariant = 0.0  # bytes of values that the operators' derivatives read and that depend on no operand
        self.inside: dict[int, Region] = {}  # by id(node): the sweeps of the graphs inside nodes
        residuals, moments = [], []
        for node in self.nodes:
            before = len(self.chosen)
            k, m = self.add_change(node) if node.kind in UNCHANGED or self.stays(node) else self.add_operator(node)
            residuals.append(k)
            moments.append(m)
            own = sum(h.nbytes for h in m) if node.kind in (TAIL, BRANCHES, STAGES) else self.own.get(id(node), 0.0)
            self.operators.append(OperatorMemory(node, tuple(k), frozenset(islice(self.chosen, before, None)), own))
        self.kept = [h for k in residuals for h in k]
        self.moments = moments
        self.live_through = live_through(self.nodes, self.own_bytes, () if self.top else graph.outputs)
        self.peak, self.peak_turn = self.highest()

    @property
    def ahead(self) -> bool:
        """Whether the backend computes values ahead of their turn, so that the peak may be in the forward pass."""
        return self.top and self.backend.eager

    def highest(self) -> tuple[list[Buffer], Turn]:
        """Return the buffers that are live at the peak, and the turn at which that is.

        Live are the residuals of the operators before that turn, as those after it have run backward, and the operator's working
        set. A scan's stacks are live from the start of the forward pass, which is swept too if the backend computes values ahead.
        """
        backward = self.backward_turns()
        highest, live = backward.highest(), list[Buffer]()
        at = -1 if highest is None else highest[0]
        if highest is not None:
            live = [h for i, k in enumerate(self.operators) for h in k.kept if i <= at or backward.early[i]]
            live += [*self.moments[at], Buffer(WORKING, self.nodes[at], self.live_through[at])]
            live += self.reused(backward.reused(at, backward.own[at]))
        turn = (BACKWARD, at) if at >= 0 else (FORWARD, -1)
        if not self.ahead:
            return live, turn
        forward = self.forward_turns()
        at_forward, aliases = forward.highest()
        working = [Buffer(WORKING, self.nodes[at_forward], self.forward[at_forward])] if at_forward in self.forward else []
        before = [*forward.held(at_forward), *working, *self.reused(aliases)]
        return max((live, turn), (before, (FORWARD, at_forward)), key=lambda peak: sum(h.nbytes for h in peak[0]))

    def backward_turns(self) -> Turns:
        """Return the bytes that are live at each operator's turn in the backward pass, or, without gradients, in the only pass."""
        early = [node.kind in LOOPS and not (self.ahead and self.training) for node in self.nodes]
        own = [[*(h.nbytes for h in m), n] for m, n in zip(self.moments, self.live_through, strict=True)]
        return Turns([[h.nbytes for h in k.kept] for k in self.operators], early, own, self.later)

    def forward_turns(self) -> Forward:
        """Return the buffers at each operator's turn in the forward pass: residuals, values ahead of their turn, working sets."""
        ahead = [*self.early, *changes_at_start(self.nodes, self.aliases, self.chosen)] if self.ahead else []
        at_once = [[h for h in k.kept if k.node.kind in LOOPS and h.why != WIDENED] for k in self.operators]
        in_turn = [[h for h in k.kept if k.node.kind not in LOOPS or h.why == WIDENED] for k in self.operators]
        return Forward(in_turn, at_once, ahead, self.forward, self.later)

    def reused(self, places: list[tuple[int, float]]) -> list[Buffer]:
        """Return the bytes that reuse the memory of gradients that are not yet computed, as negative buffers."""
        return [Buffer(REUSED, self.weights[k], -nbytes) for k, nbytes in places]

    def reusable_gradients(self, always: Collection[Buffer]) -> tuple[list[Node], list[ReusableGradient]]:
        """Return the weights whose gradients' memory may be reused, and those gradients, largest first."""
        buffers = {id(h.node): h for h in always if h.why == GRADIENTS}
        least = NOTICED * sum(h.nbytes for h in buffers.values())
        first: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            for v in node.operands:
                first.setdefault(id(v.node), i)
                if node.kind in ACCUMULATING and self.backend.eager:  # the zeros that a gradient is accumulated from are live early
                    first[id(whole(v).node)] = len(self.nodes)
        large = sorted((h for h in buffers.values() if h.nbytes > least), key=lambda h: h.nbytes, reverse=True)
        return [h.node for h in large], [ReusableGradient(h.nbytes, first.get(id(h.node), -1)) for h in large]

    def add_change(self, node: Node) -> tuple[list[Buffer], list[Buffer]]:
        """Add a change of type, and return its residuals and its working set.

        The working set is both sides at once, unless nothing moves, or one side twice if it is copied for a collective or a
        product. A slice's gradient may be added to zeros that are live from the start.
        """
        if self.stays(node):
            return [], []
        before, after = node.operands[0], Value(node)
        self.saved += ((depth, Buffer(CHANGED, node, self.local(after))) for _, depth in self.setting.recomputed.saved_of(node))
        both = self.own_bytes[before] + self.own_bytes[after]
        if self.backend.copies_for_collective(node, self.graph.axes) and not self.products.isdisjoint({before, after}):
            both = max(both, 2 * self.own_bytes[before], 2 * self.own_bytes[after])
        self.forward[self.number[id(node)]] = both
        if not (self.straight and self.training and self.backend.pads(node)):
            return [], [Buffer(WORKING, node, both)]
        zeros = self.own_bytes[before]
        return self.zeros_ahead(node, zeros), [Buffer(WORKING, node, both - zeros)]

    def zeros_ahead(self, node: Node, nbytes: float) -> list[Buffer]:
        """Add zeros that are live from the start of the program until a node's backward turn, and return them as buffers."""
        if not nbytes:
            return []
        if not self.top:
            self.zeros_inside += nbytes
            return []
        zeros, here = Buffer(BACKEND, node, nbytes), self.number[id(node)]
        self.early += [Ahead(zeros, here, here)]
        return [zeros]

    def add_operator(self, node: Node) -> tuple[list[Buffer], list[Buffer]]:
        """Add an operator, and return its residuals and its working set.

        The working set has its operands and results, or their cotangents, and the largest inner value. A convolution, or on some
        backends a product with more than two dimensions, also needs the cotangent of its result in another order of dimensions.
        """
        if node.kind == TAIL:
            return self.add_tail(node)
        if self.accumulates(node):
            return self.add_accumulation(node)
        if node.kind in LOOPS:
            return self.add_loop(node)
        if node.kind == "remat":
            return self.add_remat(node)
        if node.kind in (BRANCHES, STAGES):
            return self.add_branches(node)
        inner = self.inner(node)

        def held_inside(why: str, variable: int) -> Buffer:
            return Buffer(why, node, inner.local(variable, inner.body.tensors[variable].nbytes))

        needed, _ = inner.residuals(self.flows(node), self.stacked, self.backend.buffered)
        residuals = self.kept_by(node, needed, inner)
        recomputed = self.setting.recomputed
        self.saved += ((depth, held_inside(KEPT, v)) for v, depth in recomputed.saved_of(node))
        if self.backend.offloads:
            offloaded = [Buffer(OFFLOADED, node, inner.local(v, nbytes)) for v, nbytes, _ in recomputed.host_values(node)]
            self.offloaded += offloaded
            self.fetched += sum(h.nbytes for h in offloaded)
        else:
            self.saved += ((depth, held_inside(KEPT, v)) for v, depth in recomputed.offloaded_of(node))
        ends = dict.fromkeys((*node.operands, *node.results))
        away = {v: 0.0 if self.is_live(v) else self.nbytes[v] for v in ends}
        read = {v for v, flag in zip(node.operands, needed.operands, strict=True) if flag}
        values, again = sum(away.values()), sum(away[v] for v in read)
        cotangents = sum(self.own_bytes[v] for v in ends) if self.training else 0.0
        copied = cotangents and (is_convolution(node.kind) or (facts_of(node.kind).product and self.backend.turns))
        turned = sum(self.local(v) for v in node.results if v.tensor.ndim > 2) if copied else 0.0
        turned += self.bytes_of_transposed_cotangents(node) if cotangents else 0.0
        largest = self.largest_inner_bytes(node, inner) if self.training else 0.0
        halos = zip(node.operands, needed.operands, inner.extended, strict=True)
        largest += sum(n for v, flag, n in halos if n and (not flag or self.flow(v)))  # or its cotangent's, if it is a residual
        largest += self.recomputed_inner_bytes(node) + self.recomputed_operand_bytes(node) if cotangents else 0.0
        if cotangents and self.backend.offloads:
            largest += sum(inner.local(v, nbytes) for v, nbytes in recomputed.in_branches.get(id(node), ()))  # fetched
        self.own[id(node)] = turned + largest
        if not cotangents:
            return residuals, [Buffer(WORKING, node, values + turned + largest)]
        self.invariant += sum(inner.local(v, inner.body.tensors[v].nbytes) for v in invariant(inner.body, self.flows(node)))
        more = self.backend.extra(node, self.graph.axes, self.local, self.argument, inner.looked_up)
        residuals += [self.buffer(BACKEND, node, more.kept)] if more.kept else []
        # Values of the forward pass alone are dead before any gradient is computed.
        here, last = self.number[id(node)], len(self.nodes)
        early = ((more.start, here), (more.first, last))
        self.early += [Ahead(Buffer(BACKEND, node, nbytes), here, reader) for nbytes, reader in early if nbytes]
        self.forward[here] = values + largest
        self.own[id(node)] += more.working
        # in a loop's step, residuals are first sliced out of their stacks
        back = (values if self.stacked else again) + cotangents + turned
        return residuals, [Buffer(WORKING, node, max(values, back) + largest + more.working)]

    def largest_inner_bytes(self, node: Node, inner: Inner) -> float:
        """Return the bytes of an operator's largest inner value, or of its cotangent.

        A fusion writes the cotangent of an operand in the place of one of its size, such as the gradient of a cross-entropy in
        the place of the scattered cotangent of the logarithms. A compiler whose reductions read no buffers writes no elementwise
        inner value to memory either.
        """
        fuses = not (facts_of(node.kind).product or facts_of(node.kind).alone or (inner.looked_up and self.backend.scatters_apart))
        if fuses and inner.largest in {self.own_bytes[v] for v in node.operands}:
            return 0.0
        return inner.largest if self.backend.buffered else inner.largest_unfused

    def bytes_of_transposed_cotangents(self, node: Node) -> float:
        """Return the bytes of cotangents that an operator also produces in another order of dimensions, for products before it.

        An eager backend schedules so, unless something else reads such a cotangent, or rows are added to it: then it is transposed
        at the product's turn.
        """
        if not self.backend.eager or facts_of(node.kind).product or self.inner(node).adds_rows:
            return 0.0
        values = (self.aliases.unmoved[v] for v in dict.fromkeys(node.operands))
        turned = (v for v in values if v.node.kind == PRODUCT and v.tensor.ndim > 2 and not self.is_read_in_order(node, v))
        return sum(self.own_bytes[v] for v in turned)

    def is_read_in_order(self, node: Node, product: Value) -> bool:
        """Return whether more than a product itself reads the cotangent that an operator produces for its result.

        That is a conversion to the dtype of the product's operands, or a sum: the gradient of another operand that was broadcast.
        """
        converted = any(v.tensor.dtype != product.tensor.dtype for v in product.node.operands)
        size = prod(product.tensor.shape)
        return converted or any(self.flow(v) and prod(v.tensor.shape) < size for v in node.operands)

    def add_loop(self, node: Node) -> tuple[list[Buffer], list[Buffer]]:
        """Add a loop, and return its residuals and its working set.

        The values of all steps are stacked; while a step runs, its own values and its slices of the stacks are live once more. The
        sliced operands and the stacked results are live as a whole, or their cotangents are.
        """
        inside = self.region_inside(node)
        carried = carried_by(node)
        length = schedule_of(node).residual_steps if node.kind == PIPELINE else times_inside(node)
        residuals: list[Buffer] = []
        for p in sorted(inside.needs):
            start = Value(inside.graph.inputs[p])
            if p in carried:
                residuals.append(self.count(Buffer(KEPT, node, length * inside.local(start))))
            else:
                residuals += self.need(node.operands[p])
        residuals += [replace(h, nbytes=length * h.nbytes) for h in inside.kept]
        self.saved += ((depth, replace(h, nbytes=length * h.nbytes)) for depth, h in inside.saved)
        self.offloaded += (replace(h, nbytes=length * h.nbytes) for h in inside.offloaded)
        self.steps += length * inside.steps
        self.momentary += inside.momentary
        single = node.kind == PIPELINE and schedule_of(node).slots == 1  # the slice of a stage's only step is its whole stack
        slices = 0.0 if single else sum(inside.local(Value(n)) for n in inside.graph.inputs[carried.stop :])
        own = slices + inside.fetched + self.other_steps_of_a_round(node, inside)
        moment = [*(_as(WORKING, h) for h in inside.peak), Buffer(WORKING, node, own)]
        moment += self.live_between_ticks(node) if node.kind == PIPELINE else []
        self.own[id(node)] = sum(h.nbytes for h in moment)
        if node.kind == PIPELINE:
            return residuals, moment
        stacked = {v for v in (*node.operands[carried.stop :], *node.results[len(carried) :]) if not self.argument(v)}
        zeros = self.zeros_of_gradients(node)
        residuals += [Buffer(BACKEND, node, zeros)] if zeros else []
        if not self.straight:  # the loop around computes them before its first step, too
            self.invariant += inside.invariant
        elif inside.invariant:
            residuals.append(Buffer(KEPT, node, inside.invariant))
        return residuals, [*moment, Buffer(WORKING, node, sum(self.own_bytes[v] for v in stacked) - zeros)]

    def other_steps_of_a_round(self, loop: Node, inside: Region) -> float:
        """Return the bytes that the steps in an unrolled scan's round hold at once, but for one of them.

        They are the gradients of constants and slices before these are added up or stacked, and rows of residuals, of which XLA
        holds about half beside the arrays (`python -m benchmarks.unrolled_loops`).
        """
        if not (self.training and isinstance(loop.payload, Scan) and any(map(self.flow, loop.results))):
            return 0.0
        carried, inputs = carried_by(loop), [Value(n) for n in inside.graph.inputs]
        gradients = sum(inside.local(v) for k, v in enumerate(inputs) if k not in carried and self.flow(v))
        return (loop.payload.unroll - 1) * (gradients + sum(h.nbytes for h in inside.kept) / 2)

    def zeros_of_gradients(self, loop: Node) -> float:
        """Return the bytes of a scan's accumulated and stacked gradients, if the backend allocates them at the start.

        Arguments' gradients have their memory already.
        """
        if not (self.training and self.backend.eager):
            return 0.0
        read = {v for p, v in enumerate(loop.operands) if p not in carried_by(loop) and not self.argument(v)}
        return sum(self.own_bytes[v] for v in read)

    def live_between_ticks(self, node: Node) -> list[Buffer]:
        """Return a pipeline's buffers between ticks: samples, their results, and weights' gradients before and after a tick.

        The gradients of all ticks are added up in the weights' accumulation types.
        """
        ends = ends_of(node)
        followed = schedule_of(node).kind in FOLLOWED and self.training  # then the gradients of samples return, if there are any
        each = {p: 1 + has_gradient(node, p, self.flow) if followed else 2 for p in ends.sampled}
        rows = sum(n * self.local(node.operands[p]) for p, n in each.items())
        batches = 2 if schedule_of(node).kind == TWO_BW else 1
        weights = [node.operands[p] for p in ends.stepped if has_gradient(node, p, self.flow)] if self.training else []
        gradients = sum((1 + batches * self.sum_growth(v)) * self.local(v) for v in weights)
        return [Buffer(WORKING, node, rows + gradients)]

    def add_tail(self, node: Node) -> tuple[list[Buffer], list[Buffer]]:
        """Add a pipeline's tail, and return its residuals and its working set.

        Its residuals of a micro-batch are live until the end of the tick, and the sums of its operands' gradients always.
        """
        inside = self.region_inside(node)
        self.momentary += inside.steps + inside.momentary
        self.offloaded += inside.offloaded
        read = [node.operands[p] for p in range(ends_of(node).carried.start) if has_gradient(node, p, self.flow)]
        sums = sum(self.local(v) * self.sum_growth(v) for v in read) if self.training else 0.0
        return [], [*(_as(WORKING, h) for h in inside.peak), Buffer(WORKING, node, sums)]

    def accumulates(self, node: Node) -> bool:
        """Return whether a node is a loop over micro-batches that adds up their gradients."""
        loss = accumulated_loss(node)
        return self.training and loss is not None and self.flow(loss)

    def add_accumulation(self, node: Node) -> tuple[list[Buffer], list[Buffer]]:
        """Add a loop over micro-batches that adds up their gradients, and return its residuals and its working set.

        Residuals of a micro-batch are live during its step of the loop. Throughout the loop, sliced operands and stacked results
        are live as a whole, as are the sums of the gradients of constants, in the type in which they are added up. Those of
        arguments are counted as gradients already, in the arguments' types.
        """
        inside, carried = self.region_inside(node), carried_by(node)
        self.momentary += inside.steps + inside.momentary
        self.offloaded += inside.offloaded
        residuals = [h for p in sorted(inside.needs) if p < carried.start for h in self.need(node.operands[p])]
        constants = [v for v in node.operands[: carried.start] if self.flow(v)]
        sums = sum(self.local(v) * (self.sum_growth(v) - self.argument(v)) for v in constants)
        slices = sum(inside.local(Value(n)) for n in inside.graph.inputs[carried.stop :])
        stacked = {v for v in (*node.operands[carried.stop :], *node.results[len(carried) :]) if not self.argument(v)}
        moment = [*(_as(WORKING, h) for h in inside.peak), Buffer(WORKING, node, sums + slices + sum(map(self.local, stacked)))]
        self.own[id(node)] = sum(h.nbytes for h in moment)
        return residuals, moment

    def sum_growth(self, v: Value) -> float:
        """Return the size of a sum of gradients of a value, as a multiple of the size of the value as it is stored."""
        stored = storage_dtype(v.tensor.dtype, v.type, self.graph.axes)
        return accumulator(stored).itemsize / stored.itemsize

    def add_remat(self, node: Node) -> tuple[list[Buffer], list[Buffer]]:
        """Add a remat, and return its residuals and its working set.

        Residuals are the values that its policy saves, and the operands that the backward pass reads.

        While its backward pass runs, all values are live that would be residuals without it. Those that it fetches from the host
        have a second copy, of the transfer.
        """
        inside = self.region_inside(node)
        read = (v for p, v in enumerate(node.operands) if not self.setting.recomputed.is_unread(node, p))
        residuals = [h for v in read for h in self.need(v)] if self.training else []
        here = [h for depth, h in inside.saved if depth > self.depth]
        residuals += (h if h.why == CHANGED else self.count(h) for h in here)  # the search counts no saved collectives
        self.saved += ((depth, h) for depth, h in inside.saved if depth <= self.depth)
        self.offloaded += inside.offloaded
        residuals += self.zeros_ahead(node, inside.zeros_inside)
        self.momentary += (inside.steps + inside.momentary) / self.remats
        self.invariant += inside.invariant
        again = [_as(AGAIN, h) if h.why != WORKING else h for h in inside.peak]
        again += [Buffer(WORKING, node, inside.fetched)] if inside.fetched else []
        self.own[id(node)] = sum(h.nbytes for h in again)
        return residuals, again

    def add_branches(self, node: Node) -> tuple[list[Buffer], list[Buffer]]:
        """Add branches, and return their residuals and their working set.

        The residuals are those of the largest group, as every device has room for them. While a group runs, its own values and all
        results or their cotangents are live. The backward pass returns the gradients of all operands at once, after those.
        """
        groups = [Region(g.graph, self.setting, node.kind, depth=self.depth) for g in groups_of(node)]
        needs = sorted({p for group in groups for p in group.needs})
        residuals = [h for p in needs for h in self.need(node.operands[p])]
        largest = max(groups, key=lambda group: group.steps + group.momentary)
        self.steps, self.momentary = self.steps + largest.steps, self.momentary + largest.momentary
        self.offloaded += largest.offloaded
        busiest = max(groups, key=lambda group: sum(h.nbytes for h in group.peak))
        results = sum(self.local(v) for v in node.results) * (2 if self.training else 1)  # cotangents are split first
        gradients = sum(self.own_bytes[v] for v in dict.fromkeys(node.operands)) if self.training else 0.0
        more = max(0.0, gradients - sum(h.nbytes for h in busiest.peak))
        return residuals + largest.kept, [*(_as(WORKING, h) for h in busiest.peak), Buffer(WORKING, node, results + more)]

    def region_inside(self, node: Node) -> Region:
        """Return the sweep of the graph inside a node."""
        if id(node) not in self.inside:
            assert node.inside is not None
            straight = self.straight and node.kind == "remat"
            depth = self.depth + (node.kind == "remat")
            around = ACCUMULATION if self.accumulates(node) else node.kind
            self.inside[id(node)] = Region(node.inside, self.setting, around, straight=straight, depth=depth)
        return self.inside[id(node)]


def _as(why: str, buffer: Buffer) -> Buffer:
    return replace(buffer, why=why)
