"""Where a parallel graph's memory goes on one device: what holds how many bytes when most is held.

Always held are arguments, optimizer slots and results; and gradients, but until one is computed other values may lie in its place.
Until its reader's backward pass: what `pcg.residuals` says is kept, of a scan for every step. For a moment: an operator's working
set. In a remat nothing is kept; but when its backward pass comes, all that it would have kept is there. The backward pass takes
operators in reverse, so that most is held at some operator, together with what those before it keep.

The search adds up the same terms but for what is there for a moment, which is not a sum; `tests/test_memory.py` holds the two
against each other. What a backend makes for itself beyond that is said in `search.backend`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from unity.pcg.again import runs_again
from unity.pcg.body import Body
from unity.pcg.branches import groups_of
from unity.pcg.gradients import Gradients, gradients
from unity.pcg.graph import BRANCHES, CONSTRAIN, LOOPS, PARALLELIZATION, PCG, PIPELINE, TAIL, UNCHANGED, Node, Value, carried_by
from unity.pcg.placing import placing
from unity.pcg.residuals import residuals
from unity.pcg.stages import ends_of, schedule_of
from unity.pcg.state import copies
from unity.search.backend import ACCUMULATING, GPU, Backend
from unity.search.cost import Training
from unity.search.offers import HEAVY

ARGUMENTS, GRADIENTS, SLOTS, RESULTS = "arguments", "gradients", "optimizer slots", "results"
NOTHING_MOVES = ("replicate", "view", CONSTRAIN)
KEPT, CHANGED, AGAIN, WORKING = "kept for the backward pass", "changed copies", "computed again", "working set"
COTANGENTS = "cotangents"
REUSED, BACKEND = "in the place of later gradients", "the backend's own"
NOTICED = 1e-3  # of all gradients: smaller ones are not looked at for what might lie in their place


@dataclass(frozen=True)
class Held:
    """Bytes on one device, why they are held, and the operator that made them."""

    why: str
    node: Node
    nbytes: float


@dataclass(frozen=True)
class MemoryPrediction:
    """Everything that is held at the moment when most is. `additive`: what the search counts, which leaves working sets out."""

    held: tuple[Held, ...]
    additive: float

    @cached_property
    def total(self) -> float:
        """Bytes that the device must have in training: also the optimizer's."""
        return sum(h.nbytes for h in self.held)

    @cached_property
    def step(self) -> float:
        """Bytes of one gradient step: what the compiled program has. It knows no optimizer."""
        return sum(h.nbytes for h in self.held if h.why != SLOTS)

    @cached_property
    def by_reason(self) -> Mapping[str, float]:
        """The bytes by why they are held."""
        found: dict[str, float] = {}
        for h in self.held:
            found[h.why] = found.get(h.why, 0.0) + h.nbytes
        return found


def predict_memory(graph: PCG, differentiated: Collection[int], training: Training, backend: Backend = GPU) -> MemoryPrediction:
    """The memory of a parallel graph. `differentiated`: the inputs that gradients are taken for, if `training` has them.
    `backend`: what compiles it, and holds more than the graph names."""
    differentiated = differentiated if training.backward else ()
    flow = gradients(graph, differentiated)
    always = [Held(ARGUMENTS, node, local(Value(node), graph)) for node in graph.inputs]
    for k, node in enumerate(graph.inputs):
        if k in differentiated and node.tensors[0].floating:
            nbytes = local(Value(node), graph)
            always += [Held(GRADIENTS, node, nbytes), Held(SLOTS, node, training.optimizer_slots * nbytes)]
    found = _Region(graph, flow, training.backward, backend, always=always)
    kept = sum(h.nbytes for h in always) + found.steps + found.momentary
    results = [Held(RESULTS, v.node, local(v, graph)) for v in dict.fromkeys(graph.outputs)]
    return MemoryPrediction((*always, *results, *found.peak), kept)


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


def keeping(graph: PCG, differentiated: Collection[int], training: Training, backend: Backend = GPU) -> tuple[Keeping, ...]:
    """What every operator of the outermost graph needs. Arguments are as for `predict_memory`."""
    differentiated = differentiated if training.backward else ()
    found = _Region(graph, gradients(graph, differentiated), training.backward, backend)
    return tuple(found.keeping)


def ends_inside(node: Node) -> float:
    """Of a node with a graph inside, the most bytes that one operator there reads and makes; nothing of others."""
    if node.inside is None:
        return 0.0
    each = (sum(local(v, node.inside) for v in dict.fromkeys((*n.operands, *n.results))) for n in node.inside.nodes)
    return max(max(each, default=0.0), max(map(ends_inside, node.inside.nodes), default=0.0))


def local(v: Value, graph: PCG) -> float:
    """Bytes of a value on one device."""
    return v.tensor.nbytes / copies(v.type, graph.axes)


class _Region:
    """A graph, or one inside a scan or a remat: what its operators keep, and what is there when most is."""

    def __init__(
        self,
        graph: PCG,
        flow: Gradients,
        training: bool,
        backend: Backend,
        around: str = "",
        always: Collection[Held] = (),
    ) -> None:
        """`around`: the kind of node that the graph is inside of. `always`: what is held whatever the operators do."""
        self.graph, self.flow, self.training, self.backend = graph, flow, training, backend
        self.top, self.stacked = not around, around in LOOPS
        self.nodes = [node for node in graph.nodes if node.kind != "input"]
        self.number = {id(node): i for i, node in enumerate(self.nodes)}
        self.inputs = {id(node): k for k, node in enumerate(graph.inputs)}
        self.early: list[tuple[Held, int]] = []  # what the backend makes at the start, and for which operator's backward pass
        self.chosen: set[Value] = set()
        self.wide: set[Value] = set()  # those that are kept wider
        self.needs: set[int] = set()  # inputs that the backward pass needs
        self.gradients = self.later_gradients(always)
        self.steps = 0.0  # bytes that are kept, added up
        self.momentary = 0.0  # bytes that are kept inside of remats, of which one is open at a time
        self.remats = sum(node.kind == "remat" for node in self.nodes)
        self.own: dict[int, float] = {}  # by id(node): of its moment, what is neither operand, result, nor cotangent of one
        self.keeping: list[Keeping] = []
        kept, moments = [], []
        for node in self.nodes:
            before = set(self.chosen)
            k, m = ([], self.change(node)) if node.kind in UNCHANGED else self.operator(node)
            kept.append(k)
            moments.append(m)
            own = sum(h.nbytes for h in m) if node.kind in (TAIL, BRANCHES) else self.own.get(id(node), 0.0)
            self.keeping.append(Keeping(node, tuple(k), frozenset(self.chosen - before), own))
        self.kept = [h for k in kept for h in k]
        self.peak = self.highest(kept, moments)

    def highest(self, kept: list[list[Held]], moments: list[list[Held]]) -> list[Held]:
        """When most is held: what is kept then, and the working set of the operator whose turn it is.

        That is what operators before it keep, as those after it are done; but a scan's stacks are there from the start.
        """
        early = [node.kind in LOOPS for node in self.nodes]
        sums = [sum(h.nbytes for h in k) for k in kept]
        below = sum(n for n, first in zip(sums, early, strict=True) if first)
        passing, sizes = self.passing(), []
        for i in range(len(self.nodes)):
            below += 0.0 if early[i] else sums[i]
            sizes.append(below + sum(h.nbytes for h in moments[i]) + passing[i])
        start = [*(h for h, _ in self.early), *self.reused(len(self.nodes), self.early)] if self.top else []
        found, most = start, sum(h.nbytes for h in start)
        for at in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
            if sizes[at] <= most:
                break
            then = [(h, i) for i, k in enumerate(kept) for h in k if i <= at or early[i]]
            then += [(h, at) for h in (*moments[at], Held(WORKING, self.nodes[at], passing[at]))]
            here = [*(h for h, _ in then), *self.reused(at, then)]
            if (size := sum(h.nbytes for h in here)) > most:
                found, most = here, size
        return found

    def reused(self, at: int, then: list[tuple[Held, int]]) -> list[Held]:
        """What takes no memory of its own, as it lies where a gradient will be that is not yet computed, counted negatively.

        The backward pass takes operators in reverse, and a gradient is there when that of the weight's first reader is. So
        much earlier must be done with what lies there, one value at a time: the largest that fits. `then`: all that is held at
        operator `at`, each with the operator that it is held for.
        """
        if not self.gradients:
            return []
        free, found = sorted(((h.nbytes, i) for h, i in then), reverse=True), []
        for nbytes, first, weight in self.gradients:
            fits = next((k for k, (n, i) in enumerate(free) if first < i and n <= nbytes), None) if first < at else None
            if fits is not None:
                found.append(Held(REUSED, weight, -free.pop(fits)[0]))
        return found

    def later_gradients(self, always: Collection[Held]) -> list[tuple[float, int, Node]]:
        """Bytes of every weight's gradient, the first operator that reads the weight, and the weight; largest first."""
        wanted = {id(h.node): h for h in always if h.why == GRADIENTS}
        least = NOTICED * sum(h.nbytes for h in wanted.values())
        first: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            for v in node.operands:
                first.setdefault(id(v.node), i)
                if node.kind in ACCUMULATING and self.backend.eager:  # the zeros that a gradient is added to are there early
                    first[id(whole(v).node)] = len(self.nodes)
        found = [(h.nbytes, first.get(k, -1), h.node) for k, h in wanted.items() if h.nbytes > least]
        return sorted(found, key=lambda g: g[0], reverse=True)

    def passing(self) -> list[float]:
        """For every operator, the bytes of values (in training, of cotangents) that wait while it runs, none of its own."""
        last: dict[Value, int] = {}
        for i, node in enumerate(self.nodes):
            last.update((v, i) for v in node.operands)
        if not self.top:
            last.update((v, len(self.nodes)) for v in self.graph.outputs)
        total = [0.0] * (len(self.nodes) + 1)
        for v, end in last.items():
            start = self.number.get(id(v.node), -1)
            if end > start + 1 and self.counts(v):
                nbytes = local(v, self.graph)
                total[start + 1] += nbytes
                total[end] -= nbytes
        waiting, found = 0.0, []
        for i, node in enumerate(self.nodes):
            waiting += total[i]
            own = (v for v in dict.fromkeys(node.operands) if last[v] > i and self.counts(v))
            found.append(max(0.0, waiting - sum(local(v, self.graph) for v in own)))
        return found

    def counts(self, v: Value) -> bool:
        """Whether a value, or its cotangent, takes memory of its own: arguments and their gradients are counted already."""
        return not (self.top and id(v.node) in self.inputs) and (self.flow(v) or not self.training)

    def need(self, v: Value, reader: Node | None = None) -> list[Held]:
        """Keeps a value as it is where it was last moved, if it is not kept yet; for some readers, wider."""
        wide = reader is not None and self.backend.widens(reader, v)
        v = buffer(v)
        if runs_again(v.node):
            return [h for w in v.node.operands for h in self.need(w)]
        widened = [Held(BACKEND, v.node, local(v, self.graph))] if wide and v not in self.wide else []
        self.wide |= {v} if wide else set()
        if v in self.chosen:
            return widened
        self.chosen.add(v)
        if id(v.node) in self.inputs:
            self.needs.add(self.inputs[id(v.node)])
            return widened
        why = CHANGED if v.node.kind in PARALLELIZATION else KEPT
        return [self.count(Held(why, v.node, local(v, self.graph))), *widened]

    def count(self, held: Held) -> Held:
        self.steps += held.nbytes
        return held

    def change(self, node: Node) -> list[Held]:
        """A change of type has both sides at once, unless nothing moves."""
        if node.kind in NOTHING_MOVES:
            return []
        sides = [v for v in (*node.operands, Value(node)) if self.counts(v)]
        return [Held(WORKING, node, sum(local(v, self.graph) for v in sides))]

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
        if node.kind == BRANCHES:
            return self.branches(node)
        assert node.body is not None
        kept, inside = self.kept_by(node, node.body), _Inside(node, node.body, self.graph)
        ends = dict.fromkeys((*node.operands, *node.results))
        values = sum(local(v, self.graph) for v in ends if not self.there(v))
        again = sum(local(v, self.graph) for v in self.read_backward(node, node.body) if not self.there(v))
        cotangents = sum(local(v, self.graph) for v in ends if self.counts(v)) if self.training else 0.0
        turned = sum(local(v, self.graph) for v in node.results if v.tensor.ndim > 2) if node.kind in HEAVY and cotangents else 0.0
        inner = [inside.local(v, node.body.tensors[v].nbytes) for e in node.body.equations[:-1] for v in e.results]
        largest = max(inner, default=0.0) if self.training else 0.0
        largest += self.made_again(node, inside) + self.made_for(node) if cotangents else 0.0
        self.own[id(node)] = turned + largest
        if not cotangents:
            return kept, [Held(WORKING, node, values + turned + largest)]
        more = self.backend.extra(node, lambda v: local(v, self.graph), lambda v: self.top and id(unmoved(v).node) in self.inputs)
        kept += [Held(BACKEND, node, more.kept)] if more.kept else []
        last = len(self.nodes)  # all gradients come later than what the forward pass needs alone
        early = ((more.start, self.number[id(node)]), (more.first, last))
        self.early += [(Held(BACKEND, node, nbytes), at) for nbytes, at in early if nbytes]
        self.own[id(node)] += more.working
        # in a loop's step, what it keeps is taken out of stacks first; and a product's ends are read by what is not fused with it
        back = (values if self.stacked or node.kind in HEAVY else again) + cotangents + turned
        return kept, [Held(WORKING, node, max(values, back) + largest + more.working)]

    def read_backward(self, node: Node, body: Body) -> list[Value]:
        """The operands that an operator's backward pass reads."""
        found = residuals(body, tuple(map(self.flow, node.operands)), self.stacked)
        return [v for v, flag in dict.fromkeys(zip(node.operands, found.operands, strict=True)) if flag]

    def kept_by(self, node: Node, body: Body) -> list[Held]:
        if not (self.training and any(map(self.flow, node.results))):
            return []
        found, inside = residuals(body, tuple(map(self.flow, node.operands)), self.stacked), _Inside(node, body, self.graph)
        kept: list[Held] = []
        for v, flag in zip((*node.operands, *node.results), found.operands + found.results, strict=True):
            made_again = v.node is node and runs_again(node)
            kept += self.need(v, node) if flag and not made_again and not self.backend.knows(node) else []
        if node.attributes.get("again"):
            return kept
        return kept + [self.count(Held(KEPT, node, inside.local(v, nbytes))) for v, nbytes in found.inner]

    def made_again(self, node: Node, inside: _Inside) -> float:
        """Bytes of the inner values of an operator that are not kept, when its own backward pass comes."""
        if not node.attributes.get("again"):
            return 0.0
        assert node.body is not None
        found = residuals(node.body, tuple(map(self.flow, node.operands)), self.stacked)
        return sum(inside.local(v, nbytes) for v, nbytes in found.inner)

    def made_for(self, node: Node) -> float:
        """Bytes that are there when an operator's own backward pass comes because operands of it are made again as a whole."""
        total = 0.0
        for v in node.operands:
            made = buffer(v)
            if runs_again(made.node):
                assert made.node.body is not None
                total += local(made, self.graph) if unmoved(v) != made else 0.0
                total += self.made_again(made.node, _Inside(made.node, made.node.body, self.graph)) + self.made_for(made.node)
        return total

    def there(self, v: Value) -> bool:
        """Whether a value is held anyway: an argument, or kept, and not gathered again."""
        made = unmoved(v)
        return made in self.chosen or (self.top and id(made.node) in self.inputs)

    def loop(self, node: Node) -> tuple[list[Held], list[Held]]:
        """All steps' values are stacked; while one runs, its own are there once more, and its slices of what is stacked."""
        inside = self.inside(node)
        length, carried = int(node.attributes["length"]), carried_by(node)
        length = schedule_of(node).kept if node.kind == PIPELINE else length
        kept: list[Held] = []
        for p in sorted(inside.needs):
            start = Value(inside.graph.inputs[p])
            if p in carried:
                kept.append(self.count(Held(KEPT, node, length * local(start, self.graph))))
            else:
                kept += self.need(node.operands[p])
        kept += [replace(h, nbytes=length * h.nbytes) for h in inside.kept]
        self.steps += length * inside.steps
        self.momentary += inside.momentary
        slices = sum(local(Value(n), self.graph) for n in inside.graph.inputs[carried.stop :])
        moment = [*(_as(WORKING, h) for h in inside.peak), Held(WORKING, node, slices)]
        moment += self.between_ticks(node) if node.kind == PIPELINE else []
        self.own[id(node)] = sum(h.nbytes for h in moment)
        return kept, moment

    def between_ticks(self, node: Node) -> list[Held]:
        """Of a pipeline: samples that wait, or are done; and weights' gradients, of a tick and of those before it."""
        ends = ends_of(node)
        rows = sum(local(node.operands[p], self.graph) for p in ends.sampled)
        gradients = sum(local(node.operands[p], self.graph) for p in ends.stepped if self.flow(node.operands[p]))
        return [Held(WORKING, node, 2 * rows + (2 * gradients if self.training else 0.0))]

    def tail(self, node: Node) -> tuple[list[Held], list[Held]]:
        """What it keeps of a micro-batch is there until the end of the tick; what its operands' gradients add up to, always."""
        inside = self.inside(node)
        self.momentary += inside.steps + inside.momentary
        read = [node.operands[p] for p in range(ends_of(node).carried.start)]
        sums = sum(local(v, self.graph) for v in read if self.flow(v)) if self.training else 0.0
        return [], [*(_as(WORKING, h) for h in inside.peak), Held(WORKING, node, sums)]

    def remat(self, node: Node) -> tuple[list[Held], list[Held]]:
        """Its operands are kept. All that it would keep is there while its own backward pass runs."""
        inside = self.inside(node)
        kept = [h for v in node.operands for h in self.need(v)] if self.training else []
        self.momentary += (inside.steps + inside.momentary) / self.remats
        self.own[id(node)] = sum(h.nbytes for h in inside.peak)
        return kept, [_as(AGAIN, h) if h.why != WORKING else h for h in inside.peak]

    def branches(self, node: Node) -> tuple[list[Held], list[Held]]:
        """What the largest group keeps, as all have room for that; while one runs, its own, and all results or their cotangents."""
        groups = [_Region(g.graph, self.flow, self.training, self.backend, node.kind) for g in groups_of(node)]
        needs = sorted({p for group in groups for p in group.needs})
        kept = [h for p in needs for h in self.need(node.operands[p])]
        largest = max(groups, key=lambda group: group.steps + group.momentary)
        self.steps, self.momentary = self.steps + largest.steps, self.momentary + largest.momentary
        busiest = max(groups, key=lambda group: sum(h.nbytes for h in group.peak))
        results = sum(local(v, self.graph) for v in node.results) * (2 if self.training else 1)  # cotangents are taken apart first
        return kept + largest.kept, [*(_as(WORKING, h) for h in busiest.peak), Held(WORKING, node, results)]

    def inside(self, node: Node) -> _Region:
        assert node.inside is not None
        return _Region(node.inside, self.flow, self.training, self.backend, node.kind)


class _Inside:
    """Where the inner values of one operator lie."""

    def __init__(self, node: Node, body: Body, graph: PCG) -> None:
        found = placing(body, tuple(v.type for v in node.operands), node.types, len(graph.axes))
        self.split = [(axis.size, s.states) for axis, s in zip(graph.axes, found, strict=True) if s is not None]

    def local(self, variable: int, nbytes: float) -> float:
        """Bytes on one device of a value that lies like this variable."""
        for size, states in self.split:
            state = states.get(variable)
            nbytes /= size if state is not None and state.kind == "P" else 1
        return nbytes


def buffer(v: Value) -> Value:
    """The value that is kept for this one: where nothing moves, or what is gathered again, it is what that is made of."""
    while v.node.kind in NOTHING_MOVES or (v.node.kind in PARALLELIZATION and v.node.attributes.get("again")):
        v = v.node.operands[0]
    return v


def whole(v: Value) -> Value:
    """The value that this one is, however its type was changed."""
    while v.node.kind in UNCHANGED:
        v = v.node.operands[0]
    return v


def unmoved(v: Value) -> Value:
    """The value whose memory this one is."""
    while v.node.kind in NOTHING_MOVES:
        v = v.node.operands[0]
    return v


def _as(why: str, held: Held) -> Held:
    return replace(held, why=why)
