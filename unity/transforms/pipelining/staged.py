"""A scan that is walked in micro-batches, as one operator of the graph: a pipeline (`unity.pcg.parallel.stages`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from unity.pcg.capture.capture import graph_of
from unity.pcg.ir.graph import PCG, PIPELINE, TAIL, Node
from unity.pcg.parallel.stages import GPIPE, ONE_F_ONE_B, Schedule, staged
from unity.pcg.types.axis import Axis
from unity.transforms.pipelining.micro import WALK, Scan
from unity.transforms.pipelining.named import named, with_nodes
from unity.transforms.pipelining.splice import within
from unity.transforms.pipelining.tails import Tail


def with_stages(
    graph: PCG, scan: Scan, along: Sequence[Axis], before: PCG, tail: Tail | None = None, kind: str = ONE_F_ONE_B
) -> PCG:
    """The graph, its scan in micro-batches a pipeline with stages along these axes, and what follows in micro-batches its tail;
    `before`: where it was walked as a whole; `kind`: the schedule, where there is a tail.

    Raises Mixed if a step, or the tail, cannot be split so.
    """
    here = [node for node in graph.nodes if within(node.scope, WALK)]
    found = next(node for node in here if node.kind == "scan")  # what follows it reads it
    made = _pipeline(found, scan, along, GPIPE if tail is None else kind)
    for whole in before.nodes:
        if whole.kind == "scan" and whole.source == found.source and made.inside is not None and whole.inside is not None:
            made = replace(made, inside=named(made.inside, whole.inside))
    staged(made)
    changed = {id(found): made}
    if tail is not None:
        (added,) = [node for node in here if node.kind == "remat"]
        end = _tail(added, made, tail, scan)
        staged(end)
        changed[id(added)] = end
    return with_nodes(graph, changed)


def by_gpipe(graph: PCG) -> PCG:
    """The graph, its pipeline by GPipe's schedule: it does the same, and its tail follows it."""
    changed = {}
    for node in graph.nodes:
        if node.kind == PIPELINE:
            changed[id(node)] = replace(node, attributes={k: v for k, v in node.attributes.items() if k != "schedule"})
    return with_nodes(graph, changed) if changed else graph


def _tail(added: Node, pipeline: Node, tail: Tail, scan: Scan) -> Node:
    """What adds up a walk's sums, and that walk, as the tail of a pipeline."""
    walk = added.operands[0].node
    assert walk.inside is not None
    attributes = following(pipeline, tail, int(walk.attributes["consts"]), scan.samples)
    inside = named(walk.inside, graph_of(tail.body, [f"operand {p}" for p in range(len(tail.body.inputs))]))
    return replace(walk, kind=TAIL, tensors=added.tensors, inside=inside, attributes=attributes)


def following(pipeline: Node, tail: Tail, constants: int, samples: Sequence[int]) -> dict[str, Any]:
    """The attributes of a pipeline's tail, of so many constants. `samples`: of what it reads of the pipeline, which dimension they
    are."""
    shared = {name: pipeline.attributes[name] for name in ("along", "stages", "micro_batches", "steps", "schedule")}
    return {
        "consts": constants, "read": len(tail.read), "arriving": len(samples), "carry": 0, **shared,
        "length": shared["micro_batches"], "loss": tail.loss, "samples": " ".join(map(str, (*(d for _, d in tail.read), *samples))),
    }  # fmt: skip


def _pipeline(walk: Node, scan: Scan, along: Sequence[Axis], kind: str) -> Node:
    assert walk.inside is not None
    (loop,) = [n for n in walk.inside.nodes if n.kind == "scan"]
    given = {id(n): (p, v) for p, (n, v) in enumerate(zip(walk.inside.inputs, walk.operands, strict=True))}
    c = int(loop.attributes["consts"])
    # what is read anew for every micro-batch is taken in steps, after the walk's own constants
    read = [p for p in range(c) if given.get(id(loop.operands[p].node), (-1,))[0] >= int(walk.attributes["consts"])]
    order = [*(p for p in range(c) if p not in read), *read, *range(c, len(loop.operands))]
    # what is no input is a constant: it stands as well outside
    operands = tuple(given[id(v.node)][1] if id(v.node) in given else v for v in (loop.operands[p] for p in order))
    assert loop.inside is not None
    inside = PCG(tuple(loop.inside.inputs[p] for p in order), loop.inside.outputs, loop.inside.axes)
    samples = [_sampled(walk, loop, p, scan) for p in order[c - len(read) : c]] + list(scan.samples)
    stages = prod(axis.size for axis in along)
    rounds = int(walk.attributes["length"])
    schedule = Schedule(stages, rounds * stages, scan.steps, kind)
    how = {} if kind == GPIPE else {"schedule": kind}
    attributes = {
        "consts": c - len(read), "read": len(read), "carry": loop.attributes["carry"], "unroll": loop.attributes["unroll"],
        "along": " ".join(axis.name for axis in along), "stages": stages, "micro_batches": schedule.micro_batches,
        "steps": scan.steps, "length": schedule.runs, "samples": " ".join(map(str, samples)), **how,
    }  # fmt: skip
    return replace(walk, kind=PIPELINE, operands=operands, inside=inside, attributes=attributes)


def _sampled(walk: Node, loop: Node, position: int, scan: Scan) -> int:
    """Which dimension of a constant that is read anew its samples are."""
    assert walk.inside is not None
    number = [id(n) for n in walk.inside.inputs].index(id(loop.operands[position].node)) - int(walk.attributes["consts"])
    return scan.read[number - len(scan.samples)][1]
