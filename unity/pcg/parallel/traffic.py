"""The collectives of a parallel graph: what each device sends, forward and backward, and the user's line behind it.

One list, read by costs, by `explain`, and by the check against the compiled program.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

from unity.pcg.analysis.hoisting import hoisted
from unity.pcg.analysis.rematerialization import Recomputation, recomputation
from unity.pcg.analysis.views import of_argument
from unity.pcg.ir.gradient_flow import Gradients, carrying_in, gradients
from unity.pcg.ir.graph import BRANCHES, LOOPS, PARALLELIZATION, PCG, PIPELINE, STAGES, TAIL, Node, Value
from unity.pcg.parallel.branches import groups_of, weight_of
from unity.pcg.parallel.equal_values import Names
from unity.pcg.parallel.resharding import Step, absolute, turned
from unity.pcg.parallel.stages import ends_of, positions_of, runs_of, scaled_over, sends
from unity.pcg.propagation.agreements import backward_agreements, nested_agreements
from unity.pcg.propagation.halos import exchanges
from unity.pcg.propagation.placement import Placing, placing
from unity.pcg.types.accumulation import added, backward, forward, held
from unity.pcg.types.factors import Agreement
from unity.pcg.types.parallel_type import UNUSED, copies

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Collective:
    """One collective on one device. `elements` is the full side: what is reduced, or the gathered whole."""

    kind: str  # by its XLA name
    axes: tuple[int, ...]  # mesh axes, by position
    elements: int
    itemsize: int
    count: int  # how often it runs in one step
    repeats: int  # runs among them that repeat a forward one in the backward pass
    alone: int  # runs for a single reader, which no equal collective stands for
    direction: str
    node: Node  # the operator behind it: a parallelization operator, or a composite that reduces inside
    merged: bool = False  # the last of an argument's gradient: a compiler makes one collective of several such
    name: Hashable = None  # equal for collectives that do the same with the same value, of which a compiler runs one
    turned: bool = False  # as `resharding` says
    part: float = 1.0  # of its seconds that counts: among branches that run at the same time
    hoisted: int = 1  # how many times less often than the graph around it it runs, but for repeats (`pcg.hoisting`)

    @property
    def nbytes(self) -> int:
        """Bytes of the full side, once."""
        return self.elements * self.itemsize


def step_of(node: Node, axes: tuple) -> Step:
    """The change of type that a parallelization operator is."""
    before, after = absolute(node.operands[0].type, axes), absolute(node.types[0], axes)
    return Step(node.kind, tuple(i for i, (s, t) in enumerate(zip(before, after, strict=True)) if s != t), before, after)


def traffic(graph: PCG, differentiated: Collection[int] = ()) -> tuple[Collective, ...]:
    """All collectives of a parallel graph. `differentiated`: inputs that gradients are taken for (none: forward only)."""
    flow = gradients(graph, differentiated)
    return tuple(_of_graph(graph, _Whole(flow, hoisted(graph), recomputation(graph, flow)), 1, outermost=True))


@dataclass(frozen=True)
class _Whole:
    """Facts shared by a graph and its nested graphs: gradient flow, values hoisted out of scans, recomputation."""

    flow: Gradients
    hoisted: Mapping[int, int]
    again: Recomputation


def _of_graph(graph: PCG, whole: _Whole, times: int, outermost: bool = False) -> Iterator[Collective]:
    flow = whole.flow
    context = _Context(graph, flow, times, Names(graph), outermost, whole)
    for node in graph.nodes:
        if node.kind in PARALLELIZATION and node.kind != "view":
            yield from _of_step(node, context)
        elif node.kind in LOOPS:
            assert node.inside is not None
            if node.kind in (PIPELINE, TAIL):
                yield from _sends(node, context)
            yield from _of_graph(node.inside, whole, times * runs_of(node, flow))
        elif node.kind in (BRANCHES, STAGES):
            for k, group in enumerate(groups_of(node)):  # each a program of its own: what groups have in common each runs
                for c in _of_graph(group.graph, whole, times):
                    yield replace(c, part=weight_of(node), name=c.name and (id(node), k, c.name))
        elif node.inside is not None:
            yield from _of_graph(node.inside, whole, times)
        elif node.body is not None:
            yield from _halos(node, context)
            yield from _inside(node, context)


@dataclass(frozen=True)
class _Context:
    """Facts shared by the nodes of one graph. `times`: how often each runs."""

    graph: PCG
    flow: Gradients
    times: int
    names: Names
    outermost: bool
    whole: _Whole

    def less(self, node: Node) -> int:
        """How many times less often than the graph a node runs forward."""
        return self.whole.hoisted.get(id(node), 1)

    def runs(self, node: Node, repeats: int | None = None) -> tuple[int, int, int]:
        """How often a node runs in one step; how many of these runs are for the backward pass, and of these for a single reader.

        `repeats`: how often a part of it runs again, if not as often as the node.
        """
        again = self.whole.again
        first, repeats = self.times // self.less(node), self.times * (again.repeats(node) if repeats is None else repeats)
        return first + repeats, repeats, self.times * again.alone(node) + (first if id(node) in again.fenced else 0)

    @property
    def once(self) -> tuple[int, int, int]:
        """Returns the runs of a collective that is part of the backward pass alone."""
        return self.times, 0, 0


def _of_step(node: Node, context: _Context) -> Iterator[Collective]:
    graph, names = context.graph, context.names
    step, tensor = step_of(node, graph.axes), node.tensors[0]
    whole = tensor.nbytes // tensor.itemsize
    before, after = whole // copies(step.before, graph.axes), whole // copies(step.after, graph.axes)
    there, back = TRAFFIC[step.kind]
    full = after if step.kind in ("combine", "combine_replicate") else before
    if there:
        name = (FORWARD, there, _moved(step, step.axes), names.value(node.operands[0]))
        size, turns = (full, forward(tensor.dtype, step.before, graph.axes).itemsize), turned(step, step.axes)
        runs, less = context.runs(node), context.less(node)
        yield Collective(there, step.axes, *size, *runs, FORWARD, node, name=name, turned=turns, hoisted=less)
    if back and context.flow(Value(node)):
        over = step.axes
        if step.kind == "partition":
            over = tuple(i for i in step.axes if step.before[i].kind == "U")
            for i in step.axes:
                full //= graph.axes[i].size if step.before[i].kind == "R" else 1
        if over:
            name = (BACKWARD, back, _moved(step, over), names.cotangent(Value(node)))
            merged = step.kind == "replicate" and context.outermost and of_argument(node)
            size, turns = (full, backward(tensor.dtype, step.after, graph.axes).itemsize), turned(step, over)
            yield Collective(back, over, *size, *context.once, BACKWARD, node, merged, name, turns)


def _moved(step: Step, over: tuple[int, ...]) -> Hashable:
    """Between which pieces a change moves data: whether a gathered value is then unused or replicated moves nothing."""
    return (over, tuple(s for i in over for s in (step.before[i], step.after[i]) if s.kind == "P"))


TRAFFIC = {  # design section 2: forward, backward
    "partition": ("", "all-gather"),
    "combine": ("all-gather", ""),
    "replicate": ("", "all-reduce"),
    "reduce": ("all-reduce", ""),
    "reduce_partition": ("reduce-scatter", "all-gather"),
    "combine_replicate": ("all-gather", "reduce-scatter"),
    "combine_partition": ("all-to-all", "all-to-all"),
    "contribute": ("", ""),
    "unreplicate": ("", ""),
}


def _sends(node: Node, context: _Context) -> Iterator[Collective]:
    """What the stages of a pipeline send each other in every tick; and that devices agree on the gradient of the loss."""
    assert node.inside is not None
    axes = context.graph.axes
    for p in ends_of(node).sampled:
        start = node.inside.inputs[p]
        tensor = start.tensors[0]
        elements = tensor.nbytes // tensor.itemsize // copies(start.types[0], axes)
        size, (there, back) = (positions_of(node, axes), elements, tensor.itemsize), sends(node, p, context.flow)
        times, repeats, _ = context.runs(node)
        if there:
            yield Collective("collective-permute", *size, there * times, there * repeats, 0, FORWARD, node)
        if back:
            yield Collective("collective-permute", *size, back * context.times, 0, 0, BACKWARD, node)
    over = scaled_over(node, context.flow)
    if over:
        loss = int(node.attributes["loss"])
        itemsize = held(node.tensors[loss].dtype, node.types[loss], axes).itemsize
        yield Collective("all-reduce", over, 1, itemsize, *context.once, BACKWARD, node)


def _halos(node: Node, context: _Context) -> Iterator[Collective]:
    """What neighbours send each other of the edges of their slices; backward, the gradients of these go the other way."""
    assert node.body is not None
    graph, flow, body = context.graph, context.flow, node.body
    found = placing(body, tuple(v.type for v in node.operands), node.types, len(graph.axes))
    carried = carrying_in(node, flow)
    for x in exchanges(body, found, graph.axes):
        variable = x.edge.variable
        same = (x.edge.reach.dim, x.axes, x.message, x.before) if variable in body.inputs else None
        name = same and (FORWARD, *same, context.names.value(node.operands[body.inputs.index(variable)]))
        dtype, type_ = body.tensors[variable].dtype, tuple(UNUSED if s is None else s.seen(variable) for s in found)
        wires = (forward, backward) if x.edge.reach.halo.outside == "sum" else (held, held)
        there, back = (wire(dtype, type_, graph.axes).itemsize for wire in wires)
        again = max(context.whole.again.computed(node, v) for v in body.equations[x.edge.equation].results)
        runs, less = context.runs(node, again), context.less(node)
        yield Collective("collective-permute", x.axes, x.elements, there, *runs, FORWARD, node, name=name, hoisted=less)
        if variable in carried:
            yield Collective("collective-permute", x.axes, x.elements, back, *context.once, BACKWARD, node)


def _inside(node: Node, context: _Context) -> Iterator[Collective]:
    """Reduces that a composite needs inside: an all-reduce each way for a sum."""
    assert node.body is not None
    graph, flow, body, n = context.graph, context.flow, node.body, len(context.graph.axes)
    found = placing(body, tuple(v.type for v in node.operands), node.types, n)
    over: dict[int, list[int]] = {}
    again: dict[int, dict[int, list[int]]] = {}  # of each variable and user, the axes along which that finds it replicated for use
    for k, solution in enumerate(found):
        if solution is None:
            continue
        for variable in solution.reduced:
            over.setdefault(variable, []).append(k)
        for variable, users in solution.users(body).items():
            for user in users:
                again.setdefault(variable, {}).setdefault(user, []).append(k)
    flows, carried = any(map(flow, node.results)) and any(map(flow, node.operands)), carrying_in(node, flow)
    for variable in dict.fromkeys([*over, *again]):
        tensor = body.tensors[variable]
        elements = tensor.nbytes // tensor.itemsize
        for axis, s in zip(graph.axes, found, strict=True):
            if s is not None and s.states[variable].kind == "P":
                elements //= axis.size
        kind = next((s.reduced[variable] for s in found if s is not None and variable in s.reduced), "")
        runs = context.runs(node, context.whole.again.computed(node, variable))
        if variable in over:
            axes = tuple(over[variable])
            itemsize = added(tensor.dtype, (graph.axes[k] for k in axes)).itemsize if kind == "sum" else tensor.itemsize
            yield Collective("all-reduce", axes, elements, itemsize, *runs, FORWARD, node, hoisted=context.less(node))
        if flows if kind == "sum" else not kind and variable in carried:
            for axes in dict.fromkeys(map(tuple, again.get(variable, {}).values())):
                itemsize = added(tensor.dtype, (graph.axes[k] for k in axes)).itemsize
                yield Collective("all-reduce", axes, elements, itemsize, *context.once, BACKWARD, node)
    yield from _agreed(node, found, context)


def _agreed(node: Node, found: Placing, context: _Context) -> Iterator[Collective]:
    """What devices agree on inside of loops, branches and calls, and in derivative rules: once where nobody knows how many steps
    a loop takes."""
    assert node.body is not None
    carried = carrying_in(node, context.flow)
    moving = {k for k, e in enumerate(node.body.equations) if not carried.isdisjoint(e.results)}
    agreed: dict[tuple[Agreement, str], list[int]] = {}
    for k, solution in enumerate(found):
        if solution is not None:
            for one in nested_agreements(solution, moving):
                agreed.setdefault((one, FORWARD), []).append(k)
            for one in backward_agreements(solution, moving):
                agreed.setdefault((one, BACKWARD), []).append(k)
    runs = context.runs(node)
    for (one, direction), axes in agreed.items():
        every, repeats, alone = runs if direction == FORWARD else context.once
        count = one.times * every, one.times * repeats, one.times * alone
        less = context.less(node) if direction == FORWARD else 1
        yield Collective("all-reduce", tuple(axes), 1, one.itemsize, *count, direction, node, hoisted=less)
