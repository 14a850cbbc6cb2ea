"""What a parallel graph costs, term by term: every operator's time and every collective's. (Memory: `search.memory`.)

The search adds up the same terms without building the graph; `tests/search/cost/test_predict.py` holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from unity.machine.collectives import collective
from unity.machine.machine import Machine
from unity.pcg.analysis.hoisting import hoisted
from unity.pcg.analysis.rematerialization import Recomputation, recomputation
from unity.pcg.ir.gradient_flow import Gradients, gradients
from unity.pcg.ir.graph import BRANCHES, LOOPS, PARALLELIZATION, PCG, STAGES, Node, Value
from unity.pcg.ir.program import Body
from unity.pcg.parallel.branches import weight_of
from unity.pcg.parallel.stages import runs_of
from unity.pcg.parallel.traffic import Collective, traffic
from unity.pcg.propagation.choices import choice_of, part_of_work
from unity.pcg.propagation.placement import placing
from unity.pcg.types.parallel_type import copies, local_shape
from unity.search.cost.cost import Pieces, seconds
from unity.search.cost.roofline import touches


@dataclass(frozen=True)
class OperatorTerm:
    """One operator: how often it runs, the seconds of all its runs on one device, and how they are known (`profiles.lookup`).

    `first`: its runs in the forward pass, fewer where they are made before a scan (`pcg.hoisting`). `runs`: forward, those that the
    backward pass repeats included. `forward` is of all of them. `share`: the part of the work that one device does.
    """

    node: Node
    count: int
    forward: float
    backward: float
    how: str
    first: int
    runs: int
    share: float


@dataclass(frozen=True)
class CollectiveTerm:
    """One collective and the seconds of all its runs."""

    collective: Collective
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """All terms of one step's time."""

    operators: tuple[OperatorTerm, ...]
    collectives: tuple[CollectiveTerm, ...]

    @cached_property
    def time(self) -> float:
        """Seconds of one step, computing and communicating one after the other."""
        compute = sum(t.forward + t.backward for t in self.operators)
        return compute + sum(t.seconds for t in self.collectives)


def predict(graph: PCG, machine: Machine, differentiated: Collection[int]) -> Prediction:
    """Prices a parallel graph. `differentiated`: the inputs that gradients are taken for; none means the forward pass alone."""
    flow = gradients(graph, differentiated)
    whole = _Whole(flow, machine, hoisted(graph), recomputation(graph, flow), bool(differentiated))
    operators = tuple(_operators(graph, whole, 1))
    collectives = tuple(CollectiveTerm(c, _seconds(c, machine)) for c in traffic(graph, differentiated))
    return Prediction(operators, collectives)


def _seconds(c: Collective, machine: Machine) -> float:
    line = collective(machine, c.kind, (machine.axes[i] for i in c.axes), c.turned)
    return c.part * c.count * (line.beta * c.nbytes if c.merged else line(c.nbytes))


@dataclass(frozen=True)
class _Whole:
    """What is the same for all graphs of a program."""

    flow: Gradients
    machine: Machine
    hoisted: Mapping[int, int]
    again: Recomputation
    training: bool


def _operators(graph: PCG, whole: _Whole, times: int) -> Iterator[OperatorTerm]:
    for node in graph.nodes:
        if node.inside is not None:
            inner = times * (runs_of(node, whole.flow) if node.kind in LOOPS else 1)
            part = weight_of(node) if node.kind in (BRANCHES, STAGES) else 1.0
            share = 1 / prod(a.size for a in graph.axes if a.name in str(node.attributes.get("along", "")).split())
            for term in _operators(node.inside, whole, inner):
                yield replace(term, forward=part * term.forward, backward=part * term.backward, share=share * term.share)
        elif node.body is not None and node.kind not in PARALLELIZATION:
            forward, backward, how = operator_seconds(node, node.body, graph, whole.flow, whole.machine)
            first = times // whole.hoisted.get(id(node), 1)
            marked = bool(node.attributes.get("again")) and whole.training
            runs = first + times * (whole.again.repeats(node) - whole.again.alone(node) + marked)
            share = work_share(node, node.body, graph)
            yield OperatorTerm(node, times, forward * runs, backward * times, how, first, runs, share)


def operator_seconds(node: Node, body: Body, graph: PCG, flow: Gradients, machine: Machine) -> tuple[float, float, str]:
    """Seconds forward and backward of one run of an operator, and how they are known."""
    share, touched = (np.array([f]) for f in (work_share(node, body, graph), local_bytes(node, body, graph)))
    sizes = np.array([[n for shape in local_shapes(node, graph) for n in shape]], int)
    shapes = [v.tensor.shape for v in (*node.operands, *node.results)]
    forward, backward, how = seconds(body, shapes, Pieces(share, touched, sizes), with_gradient(node, flow), machine)
    return float(forward[0]), float(backward[0]), how[0]


def with_gradient(node: Node, flow: Gradients) -> tuple[bool, ...]:
    """For each operand, whether a gradient flows back to it."""
    flows = any(flow(v) for v in node.results)
    return tuple(bool(flows and flow(v)) for v in node.operands)


def local_shapes(node: Node, graph: PCG) -> tuple[tuple[int, ...], ...]:
    """The shapes of an operator's operands and then its results on one device."""
    values: list[Value] = [*node.operands, *node.results]
    return tuple(local_shape(v.tensor.shape, v.type, graph.axes) for v in values)


def work_share(node: Node, body: Body, graph: PCG) -> float:
    """The part of an operator's work that one device does."""
    share = 1.0
    found = placing(body, tuple(v.type for v in node.operands), node.types, len(graph.axes))
    for axis, solution in zip(graph.axes, found, strict=True):
        if solution is not None and solution.matches:
            share *= part_of_work(choice_of(body, solution).divided, axis.size)
    return share


def local_bytes(node: Node, body: Body, graph: PCG) -> float:
    """Bytes of an operator's operands and results that one device touches."""
    values: list[Value] = [*node.operands, *node.results]
    return sum(v.tensor.nbytes * part / copies(v.type, graph.axes) for v, part in zip(values, touches(body), strict=True))
