"""Cutting a graph at its pipeline, since 2BW runs the part before the pipeline and the part after its tail on different batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from unity.pcg.ir.graph import PCG, PIPELINE, TAIL, Node, Value
from unity.pcg.ir.payloads import Input
from unity.pcg.parallel.stages import TWO_BW, ends_of, schedule_of


@dataclass(frozen=True, eq=False)
class Cut:
    """A graph cut at a pipeline and its tail.

    Attributes:
        before: the part before the pipeline. It maps the graph's inputs to the operands of the pipeline, followed by those operands
            of the tail that the pipeline does not compute.
        tail: the tail. Its pipeline is between the two parts.
        after: the part after the tail. It maps the inputs of the graph in `read`, followed by the results of the tail, to the
            graph's outputs.
        read: the positions of the graph's inputs that `after` reads.
    """

    before: PCG
    tail: Node
    after: PCG
    read: tuple[int, ...]

    @property
    def pipeline(self) -> Node:
        """The pipeline that the tail follows."""
        return self.tail.operands[ends_of(self.tail).carried.start].node


def undrained(graph: PCG) -> bool:
    """Return whether a graph has a 2BW pipeline, so that a training step leaves micro-batches in flight."""
    return any(node.kind == PIPELINE and schedule_of(node).kind == TWO_BW for node in graph.nodes)


def cut(graph: PCG) -> Cut:
    """Cut a graph at its only pipeline and the tail of that pipeline."""
    (tail,) = [node for node in graph.nodes if node.kind == TAIL]
    arriving = ends_of(tail).carried
    operands = (*tail.operands[arriving.start].node.operands, *tail.operands[: arriving.start])
    sums = tuple(
        Node("input", (), (v.tensor,), types=(v.type,) if tail.types else (), payload=Input(name=f"sum {v.index}"))
        for v in tail.results
    )
    replaced = dict(zip(tail.results, map(Value, sums), strict=True))
    for node in graph.nodes:
        if any(v in replaced for v in node.operands):
            copy = replace(node, operands=tuple(replaced.get(v, v) for v in node.operands))
            replaced.update(zip(node.results, copy.results, strict=True))
    outputs = tuple(replaced.get(v, v) for v in graph.outputs)
    reachable = PCG((), outputs).nodes
    read = tuple(k for k, node in enumerate(graph.inputs) if any(node is n for n in reachable))
    return Cut(
        PCG(graph.inputs, operands, graph.axes),
        tail,
        PCG((*(graph.inputs[k] for k in read), *sums), outputs, graph.axes),
        read,
    )
