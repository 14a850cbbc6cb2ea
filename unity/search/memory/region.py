"""What the operators of one graph keep and work on, on one device: the whole program's, or that inside of a scan or a remat."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import islice
from math import prod

from unity.pcg.ir.graph import BRANCHES, LOOPS, PCG, PIPELINE, STAGES, TAIL, UNCHANGED, Node, Value, carried_by
from unity.pcg.parallel.branches import groups_of
from unity.pcg.parallel.stages import FOLLOWED, TWO_BW, ends_of, schedule_of
from unity.pcg.types.factors import facts_of
from unity.search.memory.backend import ACCUMULATING
from unity.search.memory.eager_forward import Ahead, Forward, moved
from unity.search.memory.peak import Later, Turns
from unity.search.memory.residuals import Keeper, Setting
from unity.search.memory.waiting import waiting
from unity.search.space.live_buffers import AGAIN, BACKEND, GRADIENTS, KEPT, REUSED, WIDENED, WORKING, Held, stays, whole

PRODUCT = "dot_general"
FORWARD, BACKWARD = "forward", "backward"
Turn = tuple[str, int]  # the pass, and the number of the operator whose turn it is; -1 before any
NOTICED = 1e-3  # of all gradients: smaller ones are not looked at for what might lie in their place


@dataclass(frozen=True)
class Keeping:
    """What an operator of the outermost graph needs beside its operands and results, on one device.

    `kept`: until it has run backward; `values`: those among that; `own`: bytes that it works on while it does, or while it runs, if
    nothing is differentiated.
    """

    node: Node
    kept: tuple[Held, ...]
    values: frozenset[Value]
    own: float


class Region(Keeper):
    """What the operators of a graph keep, and what is there when most is."""

    def __init__(
        self,
        graph: PCG,
        setting: Setting,
        around: str = "",
        always: Collection[Held] = (),
        straight: bool = False,
        stacked: bool = False,
    ) -> None:
        """`always`: what is held whatever the operators do. `straight`: nothing but remats is around the graph, so that what it
        makes ahead is made at the start of the program. Others are a `Keeper`'s."""
        super().__init__(graph, setting, around, stacked)
        self.straight = self.top or straight
        self.nodes = [node for node in graph.nodes if node.kind != "input"]
        self.number = {id(node): i for i, node in enumerate(self.nodes)}
        products = [node for node in self.nodes if facts_of(node.kind).product]
        self.products = {self.lying.unmoved[v] for node in products for v in (*node.operands, *node.results)}
        self.early: list[Ahead] = []  # what the backend makes at the start
        self.zeros_inside = 0.0  # of a remat: bytes of zeros that are made at the start of what is around it
        self.forward: dict[int, float] = {}  # what an operator works on while it runs forward, by its number
        self.weights, self.later = self.later_gradients(always)
        self.momentary = 0.0  # bytes that are kept inside of remats, of which one is open at a time
        self.remats = sum(node.kind == "remat" for node in self.nodes)
        self.own: dict[int, float] = {}  # by id(node): of its moment, what is neither operand, result, nor cotangent of one
        self.keeping: list[Keeping] = []
        kept, moments = [], []
        for node in self.nodes:
            before = len(self.chosen)
            k, m = self.change(node) if node.kind in UNCHANGED or stays(node) else self.operator(node)
            kept.append(k)
            moments.append(m)
            own = sum(h.nbytes for h in m) if node.kind in (TAIL, BRANCHES, STAGES) else self.own.get(id(node), 0.0)
            self.keeping.append(Keeping(node, tuple(k), frozenset(islice(self.chosen, before, None)), own))
        self.kept = [h for k in kept for h in k]
        self.moments = moments
        self.passing = waiting(self.nodes, self.own_bytes, () if self.top else graph.outputs)
        self.peak, self.peak_turn = self.highest()

    @property
    def ahead(self) -> bool:
        """Whether the backend makes values ahead of their turn, so that the peak may be in the forward pass."""
        return self.top and self.backend.eager

    def highest(self) -> tuple[list[Held], Turn]:
        """Return the buffers that are live at the peak, and the turn at which that is.

        Live are what operators before that turn keep, as those after it have run backward, and the operator's own working set;
        but a scan's stacks are live from the start of the forward pass, which is swept too where the backend makes values ahead.
        """
        backward = self.backward_turns()
        highest, live = backward.highest(), list[Held]()
        at = -1 if highest is None else highest[0]
        if highest is not None:
            live = [h for i, k in enumerate(self.keeping) for h in k.kept if i <= at or backward.early[i]]
            live += [*self.moments[at], Held(WORKING, self.nodes[at], self.passing[at])]
            live += self.placed(backward.placed(at, backward.own[at]))
        turn = (BACKWARD, at) if at >= 0 else (FORWARD, -1)
        if not self.ahead:
            return live, turn
        forward = self.forward_turns()
        at_forward, lying = forward.highest()
        working = [Held(WORKING, self.nodes[at_forward], self.forward[at_forward])] if at_forward in self.forward else []
        before = [*forward.held(at_forward), *working, *self.placed(lying)]
        return max((live, turn), (before, (FORWARD, at_forward)), key=lambda peak: sum(h.nbytes for h in peak[0]))

    def backward_turns(self) -> Turns:
        """Return the bytes that are live at each operator's turn in the backward pass, or, without gradients, in the only pass."""
        early = [node.kind in LOOPS and not (self.ahead and self.training) for node in self.nodes]
        own = [[*(h.nbytes for h in m), n] for m, n in zip(self.moments, self.passing, strict=True)]
        return Turns([[h.nbytes for h in k.kept] for k in self.keeping], early, own, self.later)

    def forward_turns(self) -> Forward:
        """Return what is live at each operator's turn in the forward pass: residuals so far, values made ahead, working sets."""
        ahead = [*self.early, *moved(self.nodes, self.lying, self.chosen)] if self.ahead else []
        at_once = [[h for h in k.kept if k.node.kind in LOOPS and h.why != WIDENED] for k in self.keeping]
        in_turn = [[h for h in k.kept if k.node.kind not in LOOPS or h.why == WIDENED] for k in self.keeping]
        return Forward(in_turn, at_once, ahead, self.forward, self.later)

    def placed(self, found: list[tuple[int, float]]) -> list[Held]:
        """What takes no memory of its own, as it lies where a gradient will be that is not yet computed, counted negatively."""
        return [Held(REUSED, self.weights[k], -nbytes) for k, nbytes in found]

    def later_gradients(self, always: Collection[Held]) -> tuple[list[Node], list[Later]]:
        """Every weight whose gradient others may lie in the place of, and that gradient; largest first."""
        wanted = {id(h.node): h for h in always if h.why == GRADIENTS}
        least = NOTICED * sum(h.nbytes for h in wanted.values())
        first: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            for v in node.operands:
                first.setdefault(id(v.node), i)
                if node.kind in ACCUMULATING and self.backend.eager:  # the zeros that a gradient is added to are there early
                    first[id(whole(v).node)] = len(self.nodes)
        found = sorted((h for h in wanted.values() if h.nbytes > least), key=lambda h: h.nbytes, reverse=True)
        return [h.node for h in found], [Later(h.nbytes, first.get(id(h.node), -1)) for h in found]

    def change(self, node: Node) -> tuple[list[Held], list[Held]]:
        """A change of type has both sides at once, unless nothing moves; or one side twice, if it is copied for a collective or a
        product. A slice's gradient may be added to zeros made ahead."""
        if stays(node):
            return [], []
        before, after = node.operands[0], Value(node)
        both = self.own_bytes[before] + self.own_bytes[after]
        if self.backend.relays(node, self.graph.axes) and not self.products.isdisjoint({before, after}):
            both = max(both, 2 * self.own_bytes[before], 2 * self.own_bytes[after])
        self.forward[self.number[id(node)]] = both
        if not (self.straight and self.training and self.backend.pads(node)):
            return [], [Held(WORKING, node, both)]
        zeros = self.own_bytes[before]
        return self.zeros_ahead(node, zeros), [Held(WORKING, node, both - zeros)]

    def zeros_ahead(self, node: Node, nbytes: float) -> list[Held]:
        """Zeros that are there from the start of the program until a node's turn backward."""
        if not nbytes:
            return []
        if not self.top:
            self.zeros_inside += nbytes
            return []
        zeros, here = Held(BACKEND, node, nbytes), self.number[id(node)]
        self.early += [Ahead(zeros, here, here)]
        return [zeros]

    def operator(self, node: Node) -> tuple[list[Held], list[Held]]:
        """What an operator keeps, and what it has for a moment: its ends, or their cotangents, and its largest inner value's.

        A convolution, or a product with more than two dimensions, wants the cotangent of its result in another order, too.
        """
        if node.kind == TAIL:
            return self.tail(node)
        if node.kind in LOOPS:
            return self.loop(node)
        if node.kind == "remat":
            return self.remat(node)
        if node.kind in (BRANCHES, STAGES):
            return self.branches(node)
        inner = self.inner(node)
        found, _ = inner.kept(self.flows(node), self.stacked)
        kept = self.kept_by(node, found, inner)
        ends = dict.fromkeys((*node.operands, *node.results))
        away = {v: 0.0 if self.there(v) else self.nbytes[v] for v in ends}
        read = {v for v, flag in zip(node.operands, found.operands, strict=True) if flag}
        values, again = sum(away.values()), sum(away[v] for v in read)
        cotangents = sum(self.own_bytes[v] for v in ends) if self.training else 0.0
        turned = (
            sum(self.local(v) for v in node.results if v.tensor.ndim > 2) if facts_of(node.kind).product and cotangents else 0.0
        )
        turned += self.turned_for(node) if cotangents else 0.0
        largest = inner.largest if self.training else 0.0
        halos = zip(node.operands, found.operands, inner.extended, strict=True)
        largest += sum(n for v, flag, n in halos if n and (not flag or self.flow(v)))  # or its cotangent's, where it is kept
        largest += self.made_again(node) + self.made_for(node) if cotangents else 0.0
        self.own[id(node)] = turned + largest
        if not cotangents:
            return kept, [Held(WORKING, node, values + turned + largest)]
        more = self.backend.extra(node, self.local, self.argument, inner.looked_up)
        kept += [self.held(BACKEND, node, more.kept)] if more.kept else []
        here, last = self.number[id(node)], len(self.nodes)  # all gradients come later than what the forward pass needs alone
        early = ((more.start, here), (more.first, last))
        self.early += [Ahead(Held(BACKEND, node, nbytes), here, reader) for nbytes, reader in early if nbytes]
        self.forward[here] = values + largest
        self.own[id(node)] += more.working
        # in a loop's step, what it keeps is taken out of stacks first
        back = (values if self.stacked else again) + cotangents + turned
        return kept, [Held(WORKING, node, max(values, back) + largest + more.working)]

    def turned_for(self, node: Node) -> float:
        """Bytes of the cotangents that an operator makes in another order, too, for products before it, where the backend schedules
        so. What else reads such a cotangent has it made as it is, and it is turned when the product's turn comes."""
        if not self.backend.eager or facts_of(node.kind).product:
            return 0.0
        made = (self.lying.unmoved[v] for v in dict.fromkeys(node.operands))
        turned = (v for v in made if v.node.kind == PRODUCT and v.tensor.ndim > 2 and not self.made_once(node, v))
        return sum(self.own_bytes[v] for v in turned)

    def made_once(self, node: Node, product: Value) -> bool:
        """Whether more than a product itself reads the cotangent that an operator makes for its result: a conversion to what the
        product's operands are, or a sum, which is the gradient of another operand that was broadcast."""
        converted = any(v.tensor.dtype != product.tensor.dtype for v in product.node.operands)
        size = prod(product.tensor.shape)
        return converted or any(self.flow(v) and prod(v.tensor.shape) < size for v in node.operands)

    def loop(self, node: Node) -> tuple[list[Held], list[Held]]:
        """All steps' values are stacked; while one runs, its own are there once more, and its slices of what is stacked.

        What it takes steps of, and what it stacks, is there whole, or their cotangents are.
        """
        inside = self.inside(node)
        length, carried = int(node.attributes["length"]), carried_by(node)
        length = schedule_of(node).kept if node.kind == PIPELINE else length
        kept: list[Held] = []
        for p in sorted(inside.needs):
            start = Value(inside.graph.inputs[p])
            if p in carried:
                kept.append(self.count(Held(KEPT, node, length * inside.local(start))))
            else:
                kept += self.need(node.operands[p])
        kept += [replace(h, nbytes=length * h.nbytes) for h in inside.kept]
        self.steps += length * inside.steps
        self.momentary += inside.momentary
        single = node.kind == PIPELINE and schedule_of(node).slots == 1  # of a stage's only step the slice is all that it has
        slices = 0.0 if single else sum(inside.local(Value(n)) for n in inside.graph.inputs[carried.stop :])
        moment = [*(_as(WORKING, h) for h in inside.peak), Held(WORKING, node, slices)]
        moment += self.between_ticks(node) if node.kind == PIPELINE else []
        self.own[id(node)] = sum(h.nbytes for h in moment)
        if node.kind == PIPELINE:
            return kept, moment
        stacked = {v for v in (*node.operands[carried.stop :], *node.results[len(carried) :]) if not self.argument(v)}
        zeros = self.zeros(node)
        kept += [Held(BACKEND, node, zeros)] if zeros else []
        return kept, [*moment, Held(WORKING, node, sum(self.own_bytes[v] for v in stacked) - zeros)]

    def zeros(self, loop: Node) -> float:
        """Bytes that a scan adds and stacks its operands' gradients in, where the backend makes them at the start; an argument's
        lie where its gradient will be."""
        if not (self.training and self.backend.eager):
            return 0.0
        read = {v for p, v in enumerate(loop.operands) if p not in carried_by(loop) and not self.argument(v)}
        return sum(self.own_bytes[v] for v in read)

    def between_ticks(self, node: Node) -> list[Held]:
        """Of a pipeline: samples that wait, or are done; and weights' gradients, before a tick, and after it, of each batch."""
        ends = ends_of(node)
        followed = schedule_of(node).kind in FOLLOWED and self.training  # then their gradients come home, if they have any
        each = {p: 1 + self.flow(node.operands[p]) if followed else 2 for p in ends.sampled}
        rows = sum(n * self.local(node.operands[p]) for p, n in each.items())
        gradients = sum(self.local(node.operands[p]) for p in ends.stepped if self.flow(node.operands[p]))
        batches = 2 if schedule_of(node).kind == TWO_BW else 1
        return [Held(WORKING, node, rows + ((1 + batches) * gradients if self.training else 0.0))]

    def tail(self, node: Node) -> tuple[list[Held], list[Held]]:
        """What it keeps of a micro-batch is there until the end of the tick; what its operands' gradients add up to, always."""
        inside = self.inside(node)
        self.momentary += inside.steps + inside.momentary
        read = [node.operands[p] for p in range(ends_of(node).carried.start)]
        sums = sum(self.local(v) for v in read if self.flow(v)) if self.training else 0.0
        return [], [*(_as(WORKING, h) for h in inside.peak), Held(WORKING, node, sums)]

    def remat(self, node: Node) -> tuple[list[Held], list[Held]]:
        """Its operands are kept. All that it would keep is there while its own backward pass runs."""
        inside = self.inside(node)
        kept = [h for v in node.operands for h in self.need(v)] if self.training else []
        kept += self.zeros_ahead(node, inside.zeros_inside)
        self.momentary += (inside.steps + inside.momentary) / self.remats
        self.own[id(node)] = sum(h.nbytes for h in inside.peak)
        return kept, [_as(AGAIN, h) if h.why != WORKING else h for h in inside.peak]

    def branches(self, node: Node) -> tuple[list[Held], list[Held]]:
        """What the largest group keeps, as all have room for that; while one runs, its own, and all results or their cotangents.

        Its backward pass gives the gradients of all operands at once; by then its own are done.
        """
        groups = [Region(g.graph, self.setting, node.kind) for g in groups_of(node)]
        needs = sorted({p for group in groups for p in group.needs})
        kept = [h for p in needs for h in self.need(node.operands[p])]
        largest = max(groups, key=lambda group: group.steps + group.momentary)
        self.steps, self.momentary = self.steps + largest.steps, self.momentary + largest.momentary
        busiest = max(groups, key=lambda group: sum(h.nbytes for h in group.peak))
        results = sum(self.local(v) for v in node.results) * (2 if self.training else 1)  # cotangents are taken apart first
        given = sum(self.own_bytes[v] for v in dict.fromkeys(node.operands)) if self.training else 0.0
        more = max(0.0, given - sum(h.nbytes for h in busiest.peak))
        return kept + largest.kept, [*(_as(WORKING, h) for h in busiest.peak), Held(WORKING, node, results + more)]

    def inside(self, node: Node) -> Region:
        assert node.inside is not None
        straight = self.straight and node.kind == "remat"
        return Region(node.inside, self.setting, node.kind, straight=straight)


def _as(why: str, held: Held) -> Held:
    return replace(held, why=why)
