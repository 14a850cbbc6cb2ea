"""The memory of nodes with a graph inside, on one device: loops, pipelines' tails, remats and branches.

Each function receives the memory of the graph inside (`Region`), and makes residuals of the operands that this graph needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unity.pcg.ir.graph import PIPELINE, Node, Value, accumulated_loss, carried_by, times_inside
from unity.pcg.ir.payloads import Scan
from unity.pcg.parallel.stages import FOLLOWED, TWO_BW, ends_of, has_gradient, schedule_of
from unity.pcg.types.accumulation import accumulator, storage_dtype
from unity.search.memory.operator_memory import OperatorMemory, ahead_of_turn, zeros_from_start
from unity.search.memory.region import Region
from unity.search.memory.residuals import ResidualCollector
from unity.search.space.live_buffers import AGAIN, BACKEND, CHANGED, KEPT, WORKING, Buffer


def memory_of_loop(node: Node, collector: ResidualCollector, inside: Region) -> OperatorMemory:
    """Return the memory of a loop.

    The values of all steps are stacked; while a step runs, its own values and its slices of the stacks are live once more. The
    sliced operands and the stacked results are live as a whole, or their cotangents are.
    """
    carried = carried_by(node)
    length = schedule_of(node).residual_steps if node.kind == PIPELINE else times_inside(node)
    residuals: list[Buffer] = []
    for p in sorted(inside.needs):
        start = Value(inside.graph.inputs[p])
        if p in carried:
            residuals.append(collector.count(Buffer(KEPT, node, length * inside.local(start))))
        else:
            residuals += collector.need(node.operands[p])
    residuals += [_times(length, h) for h in inside.kept]
    collector.residual_bytes += length * inside.residual_bytes
    single = node.kind == PIPELINE and schedule_of(node).slots == 1  # the slice of a stage's only step is its whole stack
    slices = 0.0 if single else sum(inside.local(Value(n)) for n in inside.graph.inputs[carried.stop :])
    own = slices + inside.fetched + _other_steps_of_a_round(node, collector, inside)
    working = [*_as(WORKING, inside.peak), Buffer(WORKING, node, own)]
    working += _live_between_ticks(node, collector) if node.kind == PIPELINE else []
    memory = OperatorMemory(
        node,
        tuple(residuals),
        tuple(working),
        own=_bytes(working),
        saved=tuple((depth, _times(length, h)) for depth, h in inside.saved),
        offloaded=tuple(_times(length, h) for h in inside.offloaded),
        momentary=inside.momentary,
    )
    return memory if node.kind == PIPELINE else _with_whole_arrays(memory, collector, inside)


def _with_whole_arrays(memory: OperatorMemory, collector: ResidualCollector, inside: Region) -> OperatorMemory:
    """Add to a scan's or a while loop's memory what is live as a whole: sliced and stacked arrays, gradients, and invariants."""
    node, carried = memory.node, carried_by(memory.node)
    stacked = {v for v in (*node.operands[carried.stop :], *node.results[len(carried) :]) if not collector.argument(v)}
    zeros = _zeros_of_gradients(node, collector)
    residuals = [*memory.kept, *([Buffer(BACKEND, node, zeros)] if zeros else [])]
    # The values that no step changes are computed before the first step, of an outer loop too.
    here = inside.invariant if collector.nesting.straight else 0.0
    residuals += [Buffer(KEPT, node, here)] if here else []
    arrays = Buffer(WORKING, node, sum(collector.own_bytes[v] for v in stacked) - zeros)
    return replace(memory, kept=tuple(residuals), working=(*memory.working, arrays), invariant=inside.invariant - here)


def _other_steps_of_a_round(loop: Node, collector: ResidualCollector, inside: Region) -> float:
    """Return the bytes that the steps in an unrolled scan's round hold at once, but for one of them.

    They are the gradients of constants and slices before these are added up or stacked, and rows of residuals, of which XLA
    holds about half beside the arrays (`python -m benchmarks.unrolled_loops`).
    """
    if not (collector.training and isinstance(loop.payload, Scan) and any(map(collector.flow, loop.results))):
        return 0.0
    carried, inputs = carried_by(loop), [Value(n) for n in inside.graph.inputs]
    gradients = sum(inside.local(v) for k, v in enumerate(inputs) if k not in carried and collector.flow(v))
    return (loop.payload.unroll - 1) * (gradients + _bytes(inside.kept) / 2)


def _zeros_of_gradients(loop: Node, collector: ResidualCollector) -> float:
    """Return the bytes of a scan's accumulated and stacked gradients, if the backend allocates them at the start.

    Arguments' gradients have their memory already.
    """
    if not (collector.training and collector.backend.eager):
        return 0.0
    read = {v for p, v in enumerate(loop.operands) if p not in carried_by(loop) and not collector.argument(v)}
    return sum(collector.own_bytes[v] for v in read)


def _live_between_ticks(node: Node, collector: ResidualCollector) -> list[Buffer]:
    """Return a pipeline's buffers between ticks: samples, their results, and weights' gradients before and after a tick.

    The gradients of all ticks are added up in the weights' accumulation types.
    """
    ends, flow, training = ends_of(node), collector.flow, collector.training
    followed = schedule_of(node).kind in FOLLOWED and training  # then the gradients of samples return, if there are any
    each = {p: 1 + has_gradient(node, p, flow) if followed else 2 for p in ends.sampled}
    rows = sum(n * collector.local(node.operands[p]) for p, n in each.items())
    batches = 2 if schedule_of(node).kind == TWO_BW else 1
    weights = [node.operands[p] for p in ends.stepped if has_gradient(node, p, flow)] if training else []
    gradients = sum((1 + batches * _sum_growth(v, collector)) * collector.local(v) for v in weights)
    return [Buffer(WORKING, node, rows + gradients)]


def _sum_growth(v: Value, collector: ResidualCollector) -> float:
    """Return the size of a sum of gradients of a value, as a multiple of the size of the value as it is stored."""
    stored = storage_dtype(v.tensor.dtype, v.type, collector.graph.axes)
    return accumulator(stored).itemsize / stored.itemsize


def memory_of_tail(node: Node, collector: ResidualCollector, inside: Region) -> OperatorMemory:
    """Return the memory of a pipeline's tail.

    Its residuals of a micro-batch are live until the end of the tick, and the sums of its operands' gradients always.
    """
    read = [node.operands[p] for p in range(ends_of(node).carried.start) if has_gradient(node, p, collector.flow)]
    sums = sum(collector.local(v) * _sum_growth(v, collector) for v in read) if collector.training else 0.0
    working = (*_as(WORKING, inside.peak), Buffer(WORKING, node, sums))
    momentary = inside.residual_bytes + inside.momentary
    return OperatorMemory(node, (), working, _bytes(working), offloaded=inside.offloaded, momentary=momentary)


def accumulates(node: Node, collector: ResidualCollector) -> bool:
    """Return whether a node is a loop over micro-batches that adds up their gradients."""
    loss = accumulated_loss(node)
    return collector.training and loss is not None and collector.flow(loss)


def memory_of_accumulation(node: Node, collector: ResidualCollector, inside: Region) -> OperatorMemory:
    """Return the memory of a loop that accumulates the gradients of micro-batches.

    Residuals of a micro-batch are live during its step of the loop. Throughout the loop, sliced operands and stacked results
    are live as a whole, as are the sums of the gradients of constants, in the type in which they are added up. Those of
    arguments are counted as gradients already, in the arguments' types.
    """
    carried = carried_by(node)
    residuals = [h for p in sorted(inside.needs) if p < carried.start for h in collector.need(node.operands[p])]
    constants = [v for v in node.operands[: carried.start] if collector.flow(v)]
    sums = sum(collector.local(v) * (_sum_growth(v, collector) - collector.argument(v)) for v in constants)
    slices = sum(inside.local(Value(n)) for n in inside.graph.inputs[carried.stop :])
    stacked = {v for v in (*node.operands[carried.stop :], *node.results[len(carried) :]) if not collector.argument(v)}
    arrays = Buffer(WORKING, node, sums + slices + sum(map(collector.local, stacked)))
    working = (*_as(WORKING, inside.peak), arrays)
    momentary = inside.residual_bytes + inside.momentary
    return OperatorMemory(node, tuple(residuals), working, _bytes(working), offloaded=inside.offloaded, momentary=momentary)


def memory_of_remat(node: Node, collector: ResidualCollector, inside: Region) -> OperatorMemory:
    """Return the memory of a remat.

    Residuals are the values that its policy saves, and the operands that the backward pass reads.

    While its backward pass runs, all values are live that would be residuals without it. Values fetched from the host have a
    second copy, the transfer's.
    """
    depth = collector.nesting.depth
    read = (v for p, v in enumerate(node.operands) if not collector.setting.recomputed.is_unread(node, p))
    residuals = [h for v in read for h in collector.need(v)] if collector.training else []
    here = [h for saved_at, h in inside.saved if saved_at > depth]
    residuals += (h if h.why == CHANGED else collector.count(h) for h in here)  # the search counts no saved collectives
    zeros, zeros_inside = zeros_from_start(node, inside.zeros_inside, collector)
    again = [h if h.why == WORKING else replace(h, why=AGAIN) for h in inside.peak]
    again += [Buffer(WORKING, node, inside.fetched)] if inside.fetched else []
    return OperatorMemory(
        node,
        (*residuals, *zeros),
        tuple(again),
        own=_bytes(again),
        ahead=ahead_of_turn(node, zeros, collector),
        saved=tuple((saved_at, h) for saved_at, h in inside.saved if saved_at <= depth),
        offloaded=inside.offloaded,
        invariant=inside.invariant,
        momentary=(inside.residual_bytes + inside.momentary) / collector.remats,
        zeros_inside=zeros_inside,
    )


def memory_of_branches(node: Node, collector: ResidualCollector, groups: Sequence[Region]) -> OperatorMemory:
    """Return the memory of branches.

    The residuals are those of the largest group, as every device has room for them. While a group runs, its own values and all
    results or their cotangents are live. The backward pass returns the gradients of all operands at once, after those.
    """
    needs = sorted({p for group in groups for p in group.needs})
    residuals = [h for p in needs for h in collector.need(node.operands[p])]
    largest = max(groups, key=lambda group: group.residual_bytes + group.momentary)
    collector.residual_bytes += largest.residual_bytes
    busiest = max(groups, key=lambda group: _bytes(group.peak))
    results = sum(collector.local(v) for v in node.results) * (2 if collector.training else 1)  # cotangents are split first
    gradients = sum(collector.own_bytes[v] for v in dict.fromkeys(node.operands)) if collector.training else 0.0
    more = max(0.0, gradients - _bytes(busiest.peak))
    working = (*_as(WORKING, busiest.peak), Buffer(WORKING, node, results + more))
    return OperatorMemory(
        node,
        (*residuals, *largest.kept),
        working,
        own=_bytes(working),
        offloaded=largest.offloaded,
        momentary=largest.momentary,
    )


def _as(why: str, buffers: Sequence[Buffer]) -> list[Buffer]:
    return [replace(h, why=why) for h in buffers]


def _times(count: float, buffer: Buffer) -> Buffer:
    return replace(buffer, nbytes=count * buffer.nbytes)


def _bytes(buffers: Sequence[Buffer]) -> float:
    return sum(h.nbytes for h in buffers)
