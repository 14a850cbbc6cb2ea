"""The collectives of a parallel graph: the data that each device sends, forward and backward, and the operator that causes it.

Costs, `explain`, and the check of the compiled program read this one list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

from unity.pcg.analysis.hoisting import hoisted
from unity.pcg.analysis.rematerialization import Recomputation, recomputation
from unity.pcg.analysis.views import of_argument
from unity.pcg.ir.gradient_flow import Gradients, carrying_in, gradients
from unity.pcg.ir.graph import BRANCHES, LOOPS, PARALLELIZATION, PCG, PIPELINE, STAGES, TAIL, Node, Value, accumulated_loss
from unity.pcg.ir.payloads import PipelineTail, Scan
from unity.pcg.ir.program import Atom, Tensor
from unity.pcg.parallel.branches import groups_of, weight_of
from unity.pcg.parallel.constant_cotangents import has_constant_cotangent, has_zero_cotangent
from unity.pcg.parallel.dead_values import is_dead
from unity.pcg.parallel.equal_values import Around, ValueNumbering
from unity.pcg.parallel.resharding import ReshardingStep, absolute, steps, turned
from unity.pcg.parallel.stages import ends_of, loss_gradient_axes, runs_of, sends, stage_axes
from unity.pcg.propagation.halos import exchanges
from unity.pcg.propagation.nested.agreements import backward_agreements, nested_agreements
from unity.pcg.propagation.placement import Placing, around_scatter, placing
from unity.pcg.types.accumulation import backward_dtype, forward_dtype, reduction_dtype, storage_dtype
from unity.pcg.types.axis import Axis
from unity.pcg.types.factors import Agreement
from unity.pcg.types.parallel_type import REPLICATED, UNUSED, slice_count

FORWARD, BACKWARD = "forward", "backward"
SUMS = ("all-reduce", "reduce-scatter")


@dataclass(frozen=True)
class Collective:
    """One collective on one device.

    kind: its name in XLA.
    axes: the mesh axes that it runs over, by position.
    elements: the number of elements of the larger side: of the reduced tensor, or of the gathered one. Random keys count as words.
    itemsize: bytes of an element.
    count: the number of runs in one step.
    repeats: the runs among these that repeat a forward collective in the backward pass.
    alone: the repeats among these for a single user, which never coincide with an equal collective.
    direction: FORWARD or BACKWARD.
    node: the operator that causes it: a parallelization operator, or a composite that communicates inside.
    merged: it is the last collective of an argument's gradient, and the compiler combines such collectives into one.
    name: equal for collectives that do the same with equal values, of which the compiler runs one (None: it equals no other).
    repeated: the same for its repeats.
    turned: it moves pieces of another dimension than the first (`resharding.turned`).
    part: the fraction of its seconds that counts, less than 1 among branches that run at the same time.
    hoisted: the factor by which it runs less often than the graph around it, repeats aside (`unity.pcg.analysis.hoisting`).
    folded: it gathers a cotangent with one constant in every element, or adds up zeros, which XLA folds. Costs still
        count it, because the search does not follow cotangents. (A change of a dead value has no collective at all.)
    """

    kind: str
    axes: tuple[int, ...]
    elements: int
    itemsize: int
    count: int
    repeats: int
    alone: int
    direction: str
    node: Node
    merged: bool = False
    name: Hashable = None
    repeated: Hashable = None
    turned: bool = False
    part: float = 1.0
    hoisted: int = 1
    folded: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the larger side, for one run."""
        return self.elements * self.itemsize


def step_of(node: Node, axes: tuple) -> ReshardingStep:
    """Return the change of type that a parallelization operator makes."""
    before, after = absolute(node.operands[0].type, axes), absolute(node.types[0], axes)
    return ReshardingStep(node.kind, tuple(i for i, (s, t) in enumerate(zip(before, after, strict=True)) if s != t), before, after)


def traffic(graph: PCG, differentiated: Collection[int] = ()) -> tuple[Collective, ...]:
    """Return all collectives of a parallel graph.

    Args:
        graph: the parallel graph.
        differentiated: the inputs that the gradient is for, by position; without any, there is only a forward pass.
    """
    flow = gradients(graph, differentiated)
    return tuple(_of_graph(graph, _Whole(flow, hoisted(graph, flow), recomputation(graph, flow)), 1))


@dataclass(frozen=True)
class _Whole:
    """Facts shared by a graph and its nested graphs: gradient flow, values hoisted out of scans, recomputation."""

    flow: Gradients
    hoisted: Mapping[int, int]
    recomputation: Recomputation


def _of_graph(
    graph: PCG, whole: _Whole, times: int, parent: Node | None = None, outer: ValueNumbering | None = None
) -> Iterator[Collective]:
    """Yield the collectives of a graph that runs a number of times, nested in a node of a graph with this numbering."""
    flow = whole.flow
    if parent is None or outer is None:
        numbering = ValueNumbering(graph)
    else:
        numbering = ValueNumbering(graph, _values_around(parent, outer), outer.known)
    context = _Context(graph, flow, times, numbering, parent is None, whole)
    for node in graph.nodes:
        if node.kind in PARALLELIZATION and node.kind != "view":
            yield from _of_step(node, context)
        elif node.kind in LOOPS:
            assert node.inside is not None
            if node.kind in (PIPELINE, TAIL):
                yield from _of_pipeline(node, context)
            if over := repeated_loss(node, flow):
                yield _of_cotangent(node, over, context)
            yield from _of_graph(node.inside, whole, times * runs_of(node, flow), node, numbering)
        elif node.kind in (BRANCHES, STAGES):
            for k, group in enumerate(groups_of(node)):  # a separate program each: equal collectives of two groups both run
                for c in _of_graph(group.graph, whole, times, node, numbering):
                    name, repeated = (name and (id(node), k, name) for name in (c.name, c.repeated))
                    yield replace(c, part=weight_of(node), name=name, repeated=repeated)
        elif node.inside is not None:
            yield from _of_graph(node.inside, whole, times, node, numbering)
        elif node.body is not None:
            yield from _of_halos(node, context)
            yield from _of_reductions(node, context)


def _values_around(node: Node, numbering: ValueNumbering) -> Around:
    """Return a function that numbers the operands of a remat, and a scan's constants, by the graph around it."""
    loop = node.payload if isinstance(node.payload, Scan) else None

    def around(position: int) -> tuple[tuple[Hashable, ...], int] | None:
        if node.kind != "remat" and (loop is None or position >= loop.consts):
            return None
        number, steps = numbering.value_outside(node.operands[position])
        return number, steps * (1 if loop is None else loop.length)

    return around


@dataclass(frozen=True)
class _Context:
    """Facts shared by the nodes of one graph.

    times: the number of times that the graph runs in one step.
    outermost: it is the whole graph, not a nested one.
    """

    graph: PCG
    flow: Gradients
    times: int
    numbering: ValueNumbering
    outermost: bool
    whole: _Whole

    def hoisted_by(self, node: Node) -> int:
        """Return the factor by which a node runs less often than its graph in the forward pass."""
        return self.whole.hoisted.get(id(node), 1)

    def runs(self, node: Node, repeats: Fraction | None = None) -> tuple[int, int, int]:
        """Return the fields `count`, `repeats` and `alone` of a node's collective.

        Args:
            node: the operator that causes the collective.
            repeats: how often the backward pass recomputes the part of the node that communicates, if it differs from the node.
        """
        extra = self.whole.recomputation
        again = int(self.times * (extra.repeats(node) if repeats is None else repeats))
        return self.times // self.hoisted_by(node) + again, again, int(self.times * extra.alone(node))

    def forward_name(self, node: Node, *movement: Hashable) -> Hashable:
        """Return the name of the forward collective of a node's operand, None if it runs for a single user."""
        if self.whole.recomputation.is_fenced(node):
            return None
        number, steps = self.numbering.value_outside(node.operands[0])
        hoisted_to_it = steps == self.hoisted_by(node)
        return (FORWARD, *movement, number if hoisted_to_it else self.numbering.value(node.operands[0]))

    def repeat_name(self, node: Node, *movement: Hashable) -> Hashable:
        """Return the name of the repeats of such a collective."""
        return (BACKWARD, FORWARD, *movement, self.numbering.value(node.operands[0]))

    @property
    def once(self) -> tuple[int, int, int]:
        """The fields `count`, `repeats` and `alone` of a collective that only the backward pass runs."""
        return self.times, 0, 0


def _of_step(node: Node, context: _Context) -> Iterator[Collective]:
    """Yield the collectives of a change of type, forward and backward."""
    graph, numbering = context.graph, context.numbering
    step, tensor = step_of(node, graph.axes), node.tensors[0]
    (there, elements), (back, returned), over = _movements(step, tensor, graph.axes)
    if there and not is_dead(Value(node), numbering.uses):
        key = there, _movement(step, step.axes)
        name, repeated = context.forward_name(node, *key), context.repeat_name(node, *key)
        itemsize, turns = forward_dtype(tensor.dtype, step.before, graph.axes).itemsize // tensor.words, turned(step, step.axes)
        runs, less = context.runs(node), context.hoisted_by(node)
        yield Collective(
            there, step.axes, elements, itemsize, *runs, FORWARD, node, name=name, repeated=repeated, turned=turns, hoisted=less
        )
    if back and over and context.flow(Value(node)):
        name = (BACKWARD, back, _movement(step, over), numbering.cotangent(Value(node)))
        merged = step.kind == "replicate" and context.outermost and of_argument(node)
        size, turns = (returned, backward_dtype(tensor.dtype, step.after, graph.axes).itemsize), turned(step, over)
        gathered = back == "all-gather" and has_constant_cotangent(Value(node), graph, numbering.uses)
        folded = (context.outermost and gathered) or (back in SUMS and has_zero_cotangent(Value(node), numbering.uses))
        yield Collective(back, over, *size, *context.once, BACKWARD, node, merged, name, turned=turns, folded=folded)


def _movements(
    step: ReshardingStep, tensor: Tensor, axes: tuple[Axis, ...]
) -> tuple[tuple[str, int], tuple[str, int], tuple[int, ...]]:
    """Return the collectives of a change forward and backward, each with its elements, and the axes of the backward one."""
    whole = tensor.nbytes // tensor.itemsize * tensor.words
    before, after = whole // slice_count(step.before, axes), whole // slice_count(step.after, axes)
    there, back = TRAFFIC[step.kind]
    full, over, copied = after if step.kind in ("combine", "combine_replicate") else before, step.axes, 1
    if step.kind == "partition":  # where the value was R, its cotangent is a partial sum, which is not gathered
        over = tuple(i for i in step.axes if step.before[i].kind == "U")
        copied = prod(axes[i].size for i in step.axes if step.before[i].kind == "R")
    return (there, full), (back, full // copied), over


def _movement(step: ReshardingStep, over: tuple[int, ...]) -> Hashable:
    """Return a key of the data movement of a change along these axes: unused and replicated need the same."""
    return (over, tuple(s for i in over for s in (step.before[i], step.after[i]) if s.kind == "P"))


TRAFFIC = {  # the collective of each change of type: forward, backward
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


def repeated_loss(loop: Node, flow: Callable[[Value], bool]) -> tuple[int, ...]:
    """Return the axes, by position, along which the loss of a loop over micro-batches is replicated for use.

    Its cotangent is a partial sum there, and all-reduced, since the loop's gradients are multiplied by it.
    """
    loss = accumulated_loss(loop)
    return () if loss is None or not flow(loss) else tuple(k for k, s in enumerate(loss.type) if s == REPLICATED)


def _of_cotangent(loop: Node, over: tuple[int, ...], context: _Context) -> Collective:
    """Return the all-reduce of the cotangent of the loss of a loop over micro-batches."""
    loss = accumulated_loss(loop)
    assert loss is not None
    itemsize = storage_dtype(loss.tensor.dtype, loss.type, context.graph.axes).itemsize
    return Collective("all-reduce", over, 1, itemsize, *context.once, BACKWARD, loop)


def _of_pipeline(node: Node, context: _Context) -> Iterator[Collective]:
    """Yield the messages between a pipeline's stages in every tick, and the all-reduce of the gradient of the loss."""
    assert node.inside is not None
    axes = context.graph.axes
    for p in ends_of(node).sampled:
        start = node.inside.inputs[p]
        tensor = start.tensors[0]
        elements = tensor.nbytes // tensor.itemsize * tensor.words // slice_count(start.types[0], axes)
        size, (there, back) = (stage_axes(node, axes), elements, tensor.itemsize // tensor.words), sends(node, p, context.flow)
        times, repeats, _ = context.runs(node)
        if there:
            yield Collective("collective-permute", *size, there * times, there * repeats, 0, FORWARD, node)
        if back:
            yield Collective("collective-permute", *size, back * context.times, 0, 0, BACKWARD, node)
    over = loss_gradient_axes(node, context.flow)
    if over:
        loss = node.of(PipelineTail).loss
        itemsize = storage_dtype(node.tensors[loss].dtype, node.types[loss], axes).itemsize
        yield Collective("all-reduce", over, 1, itemsize, *context.once, BACKWARD, node)


def _of_halos(node: Node, context: _Context) -> Iterator[Collective]:
    """Yield the exchanges of halos between neighbours, forward, and of the halos' gradients, backward."""
    assert node.body is not None
    graph, flow, body = context.graph, context.flow, node.body
    solutions = placing(body, tuple(v.type for v in node.operands), node.types, len(graph.axes))
    active = carrying_in(node, flow)
    for x in exchanges(body, solutions, graph.axes):
        variable = x.edge.variable
        exchange = (x.edge.reach.dim, x.axes, x.message, x.before) if variable in body.inputs else None
        name = exchange and (FORWARD, *exchange, context.numbering.value(node.operands[body.inputs.index(variable)]))
        dtype, type_ = body.tensors[variable].dtype, tuple(UNUSED if s is None else s.seen(variable) for s in solutions)
        wires = (forward_dtype, backward_dtype) if x.edge.reach.halo.outside == "sum" else (storage_dtype, storage_dtype)
        there, back = (wire(dtype, type_, graph.axes).itemsize for wire in wires)
        repeats = max(context.whole.recomputation.computed(node, v) for v in body.equations[x.edge.equation].results)
        runs, less = context.runs(node, repeats), context.hoisted_by(node)
        repeated = name and (BACKWARD, *name)
        yield Collective(
            "collective-permute", x.axes, x.elements, there, *runs, FORWARD, node, name=name, repeated=repeated, hoisted=less
        )
        if variable in active:
            yield Collective("collective-permute", x.axes, x.elements, back, *context.once, BACKWARD, node)


def _of_reductions(node: Node, context: _Context) -> Iterator[Collective]:
    """Yield the all-reduces inside of an operator, forward and backward, and those of numbers that devices agree on."""
    assert node.body is not None
    graph, flow, body, n = context.graph, context.flow, node.body, len(context.graph.axes)
    solutions = placing(body, tuple(v.type for v in node.operands), node.types, n)
    over: dict[int, list[int]] = {}  # the axes over which each variable is reduced
    replicated: dict[int, dict[int, list[int]]] = {}  # by variable and user, the axes along which it is replicated for that use
    for k, solution in enumerate(solutions):
        if solution is None:
            continue
        for variable in solution.reduced:
            over.setdefault(variable, []).append(k)
        for variable, users in solution.users(body).items():
            for user in users:
                replicated.setdefault(variable, {}).setdefault(user, []).append(k)
    active = carrying_in(node, flow)
    scattered = dict.fromkeys(v for s in solutions if s is not None for v in s.scattered)
    for variable in scattered:
        yield from _of_scatter(node, variable, solutions, context)
    for variable in dict.fromkeys([*over, *replicated]):
        tensor = body.tensors[variable]
        produced = elements = tensor.nbytes // tensor.itemsize
        for axis, s in zip(graph.axes, solutions, strict=True):
            produced //= axis.size if s is not None and s.states[variable].kind == "P" else 1
            elements //= axis.size if s is not None and s.seen(variable).kind == "P" else 1
        kind = next((s.reduced[variable] for s in solutions if s is not None and variable in s.reduced), "")
        runs = context.runs(node, context.whole.recomputation.computed(node, variable))
        if variable in over and (variable not in scattered or kind != "sum"):  # else the change that scatters it adds it up
            axes = tuple(over[variable])
            itemsize = _reduced_in(tensor.dtype, kind, graph.axes, axes).itemsize
            yield Collective("all-reduce", axes, produced, itemsize, *runs, FORWARD, node, hoisted=context.hoisted_by(node))
        if kind in ("", "sum") and variable in active:
            for axes in dict.fromkeys(map(tuple, replicated.get(variable, {}).values())):
                itemsize = _reduced_in(tensor.dtype, "sum", graph.axes, axes).itemsize
                yield Collective("all-reduce", axes, elements, itemsize, *context.once, BACKWARD, node)
    yield from _of_agreements(node, solutions, context)


def _of_scatter(node: Node, variable: int, solutions: Placing, context: _Context) -> Iterator[Collective]:
    """Yield the collectives of the changes of type by which a value inside an operator is scattered, forward and backward."""
    assert node.body is not None
    axes, tensor, around = context.graph.axes, node.body.tensors[variable], around_scatter(solutions, variable)
    runs = context.runs(node, context.whole.recomputation.computed(node, variable))
    active = variable in carrying_in(node, context.flow)
    for step in steps(*around, axes) if around is not None else ():
        (there, elements), (back, returned), over = _movements(step, tensor, axes)
        if there:
            size = elements, forward_dtype(tensor.dtype, step.before, axes).itemsize
            less = context.hoisted_by(node)
            yield Collective(there, step.axes, *size, *runs, FORWARD, node, turned=turned(step, step.axes), hoisted=less)
        if back and over and active:
            size = returned, backward_dtype(tensor.dtype, step.after, axes).itemsize
            yield Collective(back, over, *size, *context.once, BACKWARD, node, turned=turned(step, over))


def _of_agreements(node: Node, solutions: Placing, context: _Context) -> Iterator[Collective]:
    """Yield the all-reduces of values that devices agree on, in nested programs of an operator and in derivative rules.

    A loop whose number of steps is unknown counts once.
    """
    assert node.body is not None
    carrying = carrying_in(node, context.flow)
    active = {k for k, e in enumerate(node.body.equations) if not carrying.isdisjoint(e.results)}
    carried = {k: _carried(node.body.equations[k].operands, carrying) for k in active}
    axes_of: dict[tuple[Agreement, str], list[int]] = {}
    pieces: dict[tuple[tuple[int, ...], str], int] = {}  # the number of slices of an array that some axes divide
    for k, solution in enumerate(solutions):
        if solution is None:
            continue
        for direction, every in ((FORWARD, nested_agreements), (BACKWARD, backward_agreements)):
            for agreement in every(solution, active):
                if not agreement.kind:
                    key = agreement.where, direction
                    pieces[key] = pieces.get(key, 1) * context.graph.axes[k].size
                elif agreement.needed(carried.get(agreement.equation, ())):
                    axes_of.setdefault((agreement, direction), []).append(k)
    for (agreement, direction), axes in axes_of.items():
        elements = agreement.elements // pieces.get((agreement.where, direction), 1)
        itemsize = _reduced_in(agreement.dtype, agreement.kind, context.graph.axes, axes).itemsize
        count, repeats, alone = context.runs(node) if direction == FORWARD else context.once
        less = context.hoisted_by(node) if direction == FORWARD else 1
        runs = agreement.times * count, agreement.times * repeats, agreement.times * alone
        yield Collective("all-reduce", tuple(axes), elements, itemsize, *runs, direction, node, hoisted=less)


def _reduced_in(dtype: Any, kind: str, axes: Sequence[Axis], over: Iterable[int]) -> Any:
    """Return the element type in which devices reduce a value over some axes: only sums are widened."""
    return reduction_dtype(dtype, (axes[k] for k in over)) if kind == "sum" else dtype


def _carried(operands: Sequence[Atom], carrying: Collection[int]) -> frozenset[int]:
    """Return the positions of the operands that have a cotangent."""
    return frozenset(p for p, a in enumerate(operands) if isinstance(a, int) and a in carrying)
