"""A scan over micro-batches as one operator of the graph: a pipeline (`unity.pcg.parallel.stages`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from msgspec import structs

from unity.pcg.capture.capture import Captured
from unity.pcg.ir.gradient_flow import gradients
from unity.pcg.ir.graph import PCG, PIPELINE, TAIL, Node, Value
from unity.pcg.ir.payloads import Pipeline, PipelineTail, Scan, ScheduleKind
from unity.pcg.parallel.stages import GPIPE, ONE_F_ONE_B, Mixed, Schedule, ends_of, leaving, staged
from unity.pcg.types.axis import Axis
from unity.transforms.pipelining.micro_batches import WALK, LayerScan
from unity.transforms.pipelining.tails import Tail
from unity.transforms.splice import named, with_nodes, within


def with_stages(
    graph: PCG, scan: LayerScan, along: Sequence[Axis], before: PCG, tail: Tail | None = None, kind: ScheduleKind = ONE_F_ONE_B
) -> PCG:
    """Return the graph with its scan over micro-batches as a pipeline, followed by its tail.

    Args:
        graph: the graph of the program over micro-batches.
        scan: the scan.
        along: the mesh axes of the stages.
        before: the graph before it ran over micro-batches, for the operators' lines.
        tail: the tail, if it runs over micro-batches.
        kind: the schedule, if there is a tail.

    Raises:
        Mixed: a step, or the tail, cannot be split.
    """
    here = [node for node in graph.nodes if within(node.scope, WALK)]
    walk = next(node for node in here if node.kind == "scan")  # the pipeline's: that of the tail comes later
    pipeline = _pipeline(walk, scan, along, GPIPE if tail is None else kind)
    for whole in before.nodes:
        if whole.kind == "scan" and whole.source == walk.source and pipeline.inside is not None and whole.inside is not None:
            pipeline = replace(pipeline, inside=named(pipeline.inside, whole.inside))
    staged(pipeline)
    changed = {id(walk): pipeline}
    if tail is not None:
        (added,) = [node for node in here if node.kind == "remat"]
        end = _tail(added, pipeline, tail, scan)
        staged(end)
        changed[id(added)] = end
    return with_exact_ends(with_nodes(graph, changed))


def with_exact_ends(graph: PCG) -> PCG:
    """Return the graph, with the results of its pipeline that something reads, and the operands whose gradient is zero.

    Other results are not sent home from the last stage, and other gradients not from stage to stage.
    """
    flow, changed = gradients(graph, range(len(graph.inputs)), range(len(graph.outputs))), dict[int, Node]()
    for node in graph.nodes:
        if node.kind == PIPELINE:
            assert node.inside is not None
            ends, read = ends_of(node), _read_results(graph, node)
            returned = tuple(p - ends.carried.start for p in sorted(leaving(node)) if p - ends.carried.start in read)
            starts = [(p, node.inside.inputs[p]) for p in ends.sampled]
            inactive = tuple(p for p, n in starts if n.tensors[0].floating and not flow(Value(n)))
            of_all = None if len(returned) == len(ends.carried) else returned
            changed[id(node)] = replace(node, payload=structs.replace(node.of(Pipeline), leaving=of_all, inactive=inactive or None))
    return with_nodes(graph, changed)


def _read_results(graph: PCG, pipeline: Node) -> set[int]:
    """Return the results of a pipeline, by number, that something reads. A tail has them all as operands, but may ignore some."""
    read = {v.index for v in graph.outputs if v.node is pipeline}
    for node in graph.nodes:
        for p, v in enumerate(node.operands):
            if v.node is pipeline and not (node.kind == TAIL and _ignores(node, p)):
                read.add(v.index)
    return read


def _ignores(loop: Node, position: int) -> bool:
    assert loop.inside is not None
    start = loop.inside.inputs[position]
    return not loop.inside.users.get(id(start)) and all(v.node is not start for v in loop.inside.outputs)


def check_gradients(after: Captured) -> None:
    """Raise Mixed if no gradient goes back through the pipeline of a program: 1F1B would alternate with passes that do nothing."""
    flow = gradients(after.graph, after.differentiated)
    if not any(flow(v) for node in after.graph.nodes if node.kind == PIPELINE for v in node.results):
        raise Mixed(
            "no gradient goes back through these steps, as all that they compute is stopped, or made of what is not "
            f"differentiated: '{GPIPE}' is the schedule for a forward pass alone"
        )


def by_gpipe(graph: PCG) -> PCG:
    """Return the graph with its pipeline by GPipe's schedule, which computes the same, with the tail after it."""
    changed = {}
    for node in graph.nodes:
        if node.kind == PIPELINE:
            changed[id(node)] = replace(node, payload=structs.replace(node.of(Pipeline), schedule=None))
    return with_nodes(graph, changed) if changed else graph


def _tail(added: Node, pipeline: Node, tail: Tail, scan: LayerScan) -> Node:
    """Return the tail of a pipeline: a loop over micro-batches together with the sum of its results."""
    walk = added.operands[0].node
    assert walk.inside is not None
    payload = following(pipeline, tail, walk.of(Scan).consts, scan.samples)
    inside = named(walk.inside, tail.graph)
    return replace(walk, kind=TAIL, tensors=added.tensors, inside=inside, payload=payload)


def following(pipeline: Node, tail: Tail, constants: int, samples: Sequence[int]) -> PipelineTail:
    """Return the payload of a pipeline's tail.

    `constants` is the number of its constants, `samples` the sample dimension of each of the pipeline's results.
    """
    data = pipeline.of(Pipeline)
    assert data.schedule is not None, "GPipe has no tail"
    return PipelineTail(
        consts=constants,
        read=len(tail.read),
        arriving=len(samples),
        carry=0,
        along=data.along,
        stages=data.stages,
        micro_batches=data.micro_batches,
        steps=data.steps,
        schedule=data.schedule,
        length=data.micro_batches,
        loss=tail.loss,
        samples=(*(d for _, d in tail.read), *samples),
    )


def _pipeline(walk: Node, scan: LayerScan, along: Sequence[Axis], kind: ScheduleKind) -> Node:
    assert walk.inside is not None
    (loop,) = [n for n in walk.inside.nodes if n.kind == "scan"]
    outer = {id(n): (p, v) for p, (n, v) in enumerate(zip(walk.inside.inputs, walk.operands, strict=True))}
    c, outside = loop.of(Scan).consts, walk.of(Scan)
    # operands that differ from micro-batch to micro-batch follow the constants of the loop over micro-batches
    read = [p for p in range(c) if outer.get(id(loop.operands[p].node), (-1,))[0] >= outside.consts]
    order = [*(p for p in range(c) if p not in read), *read, *range(c, len(loop.operands))]
    # an operand that is no input is a constant, which can be outside as well
    operands = tuple(outer[id(v.node)][1] if id(v.node) in outer else v for v in (loop.operands[p] for p in order))
    assert loop.inside is not None
    inside = PCG(tuple(loop.inside.inputs[p] for p in order), loop.inside.outputs, loop.inside.axes)
    samples = [_sampled(walk, loop, p, scan) for p in order[c - len(read) : c]] + list(scan.samples)
    stages = prod(axis.size for axis in along)
    schedule = Schedule(stages, outside.length * stages, scan.steps, kind)
    payload = Pipeline(
        consts=c - len(read),
        read=len(read),
        carry=loop.of(Scan).carry,
        unroll=loop.of(Scan).unroll,
        along=tuple(axis.name for axis in along),
        stages=stages,
        micro_batches=schedule.micro_batches,
        steps=scan.steps,
        length=schedule.runs,
        samples=tuple(samples),
        schedule=None if kind == GPIPE else kind,
    )
    return replace(walk, kind=PIPELINE, operands=operands, inside=inside, payload=payload)


def _sampled(walk: Node, loop: Node, position: int, scan: LayerScan) -> int:
    """Return the sample dimension of a constant that differs from micro-batch to micro-batch."""
    assert walk.inside is not None
    number = [id(n) for n in walk.inside.inputs].index(id(loop.operands[position].node)) - walk.of(Scan).consts
    return scan.read[number - len(scan.samples)][1]
