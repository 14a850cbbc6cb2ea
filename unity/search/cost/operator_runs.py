"""Runs of the operators of a graph in one step: in the forward pass, as recomputation, and in the backward pass."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from unity.pcg.analysis.hoisting import hoisted
from unity.pcg.analysis.rematerialization import Recomputation, recomputation
from unity.pcg.analysis.stacked_values import NO_KERNELS, StackingKernels, stacking_kernels
from unity.pcg.ir.gradient_flow import Gradients, gradients
from unity.pcg.ir.graph import BRANCHES, LOOPS, PARALLELIZATION, PCG, STAGES, Node, reserved_axes
from unity.pcg.ir.program import Body
from unity.pcg.parallel.branches import weight_of
from unity.pcg.parallel.stages import runs_of


@dataclass(frozen=True)
class ProgramFacts:
    """Facts that all nested graphs of a program share."""

    flow: Gradients
    hoisted: Mapping[int, int]
    recomputation: Recomputation
    stacking: Mapping[int, StackingKernels]
    training: bool


def program_facts(graph: PCG, differentiated: Collection[int], outputs: Collection[int] | None = None) -> ProgramFacts:
    """Return the facts of a program.

    Args:
        graph: The program.
        differentiated: The inputs, by number, whose gradients are wanted.
        outputs: The outputs, by number, that have cotangents; None for those of a loss.
    """
    flow = gradients(graph, differentiated, outputs)
    less, again = hoisted(graph, flow), recomputation(graph, flow)
    return ProgramFacts(flow, less, again, stacking_kernels(graph, flow, less, again), bool(differentiated))


def stacking_seconds(graph: PCG, differentiated: Collection[int], launch: float) -> float:
    """Return the seconds in which kernels write rows of stacked values, if each launch takes `launch` seconds."""
    every = operator_runs(graph, program_facts(graph, differentiated))
    return sum(runs.count * sum(runs.stacking.seconds(launch)) for runs in every)


@dataclass(frozen=True)
class OperatorRuns:
    """The runs of one operator in a step.

    Args:
        node: The operator.
        body: Its program.
        graph: The graph that it is in.
        count: Runs of the backward pass, and of the forward pass unless it is hoisted.
        first: Runs in the forward pass, fewer if the operator is hoisted out of a scan (`pcg.analysis.hoisting`).
        runs: Forward runs, including those that the backward pass repeats.
        part: The fraction with which its seconds count, because other branches or stages run at the same time.
        share: The fraction of the work that is left to one device by the axes whose devices run different branches or stages.
        stacking: The kernels that write its rows of stacked values.
    """

    node: Node
    body: Body
    graph: PCG
    count: int
    first: int
    runs: int
    part: float = 1.0
    share: float = 1.0
    stacking: StackingKernels = NO_KERNELS


def operator_runs(graph: PCG, facts: ProgramFacts, times: int = 1) -> Iterator[OperatorRuns]:
    """Yield the runs of every operator of a graph, nested ones included, if the graph itself runs some number of times."""
    for node in graph.nodes:
        if node.inside is not None:
            inner = times * (runs_of(node, facts.flow) if node.kind in LOOPS else 1)
            part = weight_of(node) if node.kind in (BRANCHES, STAGES) else 1.0
            share = 1 / prod(a.size for a in graph.axes if a.name in reserved_axes(node))
            for runs in operator_runs(node.inside, facts, inner):
                yield replace(runs, part=part * runs.part, share=share * runs.share)
        elif node.body is not None and node.kind not in PARALLELIZATION:
            first = times // facts.hoisted.get(id(node), 1)
            marked = bool(node.again) and facts.training
            runs = first + int(times * (facts.recomputation.repeats(node) - facts.recomputation.alone(node) + marked))
            yield OperatorRuns(node, node.body, graph, times, first, runs, stacking=facts.stacking.get(id(node), NO_KERNELS))
