"""A graph in two: what leads to a pipeline, and what follows its tail. 2BW runs each on a batch of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unity.pcg.ir.graph import PCG, PIPELINE, TAIL, Node, Value
from unity.pcg.parallel.stages import TWO_BW, ends_of, schedule_of


@dataclass(frozen=True, eq=False)
class Cut:
    """A graph cut at a pipeline and its tail.

    `before` gives the pipeline's operands, and what more the tail reads. `after` takes those inputs of the graph that are `read`
    there, by number, and then the tail's results; it gives what the graph does.
    """

    before: PCG
    tail: Node
    after: PCG
    read: tuple[int, ...]

    @property
    def pipeline(self) -> Node:
        return self.tail.operands[ends_of(self.tail).carried.start].node


def undrained(graph: PCG) -> bool:
    """Whether a graph has a pipeline by 2BW, so that a step of training leaves something on its way."""
    return any(node.kind == PIPELINE and schedule_of(node).kind == TWO_BW for node in graph.nodes)


def cut(graph: PCG) -> Cut:
    """A graph that has a pipeline with a tail, cut there."""
    (tail,) = [node for node in graph.nodes if node.kind == TAIL]
    arriving = ends_of(tail).carried
    operands = (*tail.operands[arriving.start].node.operands, *tail.operands[: arriving.start])
    sums = tuple(
        Node("input", (), (v.tensor,), types=(v.type,) if tail.types else (), attributes={"name": f"sum {v.index}"})
        for v in tail.results
    )
    changed = dict(zip(tail.results, map(Value, sums), strict=True))
    for node in graph.nodes:
        if any(v in changed for v in node.operands):
            made = replace(node, operands=tuple(changed.get(v, v) for v in node.operands))
            changed.update(zip(node.results, made.results, strict=True))
    outputs = tuple(changed.get(v, v) for v in graph.outputs)
    reading = PCG((), outputs).nodes
    read = tuple(k for k, node in enumerate(graph.inputs) if any(node is n for n in reading))
    return Cut(
        PCG(graph.inputs, operands, graph.axes),
        tail,
        PCG((*(graph.inputs[k] for k in read), *sums), outputs, graph.axes),
        read,
    )
