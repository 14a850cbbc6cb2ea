"""Predicted time of a parallel graph, term by term: every operator's and every collective's. (Memory: `search.memory`.)

The search adds up the same terms without building the graph; `tests/search/cost/test_predict.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from unity.machine.collectives import collective, most_merged
from unity.machine.hardware import HostLink
from unity.machine.machine import Machine
from unity.pcg.ir.gradient_flow import Gradients, with_gradient
from unity.pcg.ir.graph import PCG, Node, Value
from unity.pcg.ir.program import Body
from unity.pcg.parallel.traffic import Collective, traffic
from unity.pcg.propagation.choice import divided_by, part_of_work
from unity.pcg.propagation.placement import moved_bytes, placing
from unity.pcg.types.parallel_type import Type, local_shape
from unity.search.cost.inner_values import inner_of
from unity.search.cost.operator_runs import OperatorRuns, ProgramFacts, operator_runs, program_facts
from unity.search.cost.operator_seconds import seconds, single_piece
from unity.search.cost.state_sizes import NO_STATE, StateSizes
from unity.search.space.live_buffers import local


@dataclass(frozen=True)
class OperatorTerm:
    """One operator's runs in a step, and their seconds on one device.

    Args:
        node: The operator.
        count: Runs of the backward pass, and of the forward pass unless it is hoisted.
        forward: Seconds of all `runs`.
        backward: Seconds of all backward runs.
        how: The source of the seconds (see `profile_lookup`).
        first: Runs in the forward pass, fewer if the operator is hoisted out of a scan (`pcg.analysis.hoisting`).
        runs: Forward runs, including those that the backward pass repeats.
        share: The fraction of the work that one device does.
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
class TransferTerm:
    """The transfers of one offloaded value of an operator: to the host in the forward pass, and back in the backward pass.

    Those of an input are of the optimizer's state, from the host before the update, and back after it.

    Args:
        node: The operator, or the weight that the state belongs to.
        nbytes: Bytes of one transfer on one device.
        count: Transfers in each direction.
        seconds: Seconds of all transfers in both directions.
    """

    node: Node
    nbytes: float
    count: int
    seconds: float

    @property
    def of_state(self) -> bool:
        """Whether the optimizer's state is moved."""
        return self.node.kind == "input"


@dataclass(frozen=True)
class Prediction:
    """All terms of one step's time."""

    operators: tuple[OperatorTerm, ...]
    collectives: tuple[CollectiveTerm, ...]
    transfers: tuple[TransferTerm, ...] = ()

    @cached_property
    def time(self) -> float:
        """Seconds of one step, computing, communicating and offloading one after the other."""
        return self.computing + self.communicating + self.offloading

    @cached_property
    def computing(self) -> float:
        """Seconds of all operators."""
        return sum(t.forward + t.backward for t in self.operators)

    @cached_property
    def communicating(self) -> float:
        """Seconds of all collectives."""
        return sum(t.seconds for t in self.collectives)

    @cached_property
    def offloading(self) -> float:
        """Seconds of all transfers to the host and back."""
        return sum(t.seconds for t in self.transfers)

    @property
    def updating(self) -> float:
        """Seconds of moving the optimizer's state to the devices and back."""
        return sum(t.seconds for t in self.transfers if t.of_state)


def predict(graph: PCG, machine: Machine, differentiated: Collection[int], state: StateSizes = NO_STATE) -> Prediction:
    """Price a parallel graph.

    Args:
        graph: The parallel graph.
        machine: The devices.
        differentiated: The inputs, by number, whose gradients are wanted; if empty, the forward pass alone is priced.
        state: The optimizer's state, some of which may be moved to the device and back.
    """
    facts = program_facts(graph, differentiated)
    every = tuple(operator_runs(graph, facts))
    operators = tuple(_operator_term(runs, facts, machine) for runs in every)
    collectives = tuple(CollectiveTerm(c, _seconds(c, machine)) for c in traffic(graph, differentiated))
    transfers = list[TransferTerm]()
    if machine.host is not None and differentiated:
        transfers += (term for runs in every for term in _transfers(runs, facts, machine.host))
        weights = [node for k, node in enumerate(graph.inputs) if k in differentiated and node.tensors[0].floating]
        state_bytes = ((node, state.on_host(node) * local(Value(node), graph)) for node in weights)
        transfers += (TransferTerm(node, n, 1, machine.host.there_and_back(n)) for node, n in state_bytes if n)
    return Prediction(operators, collectives, tuple(transfers))


def _seconds(c: Collective, machine: Machine) -> float:
    price = collective(machine, c.kind, (machine.axes[i] for i in c.axes), c.turned)
    return c.part * c.count * (price.merged(c.nbytes, most_merged(machine)) if c.merged else price(c.nbytes))


def _operator_term(runs: OperatorRuns, facts: ProgramFacts, machine: Machine) -> OperatorTerm:
    node, graph, part = runs.node, runs.graph, runs.part
    forward, backward, how = operator_seconds(node, runs.body, graph, facts.flow, machine)
    share = runs.share * work_share(node, runs.body, graph)
    rows = runs.stacking.seconds(machine.device.launch)
    seconds_of = part * (forward * runs.runs + rows[0] * runs.count), part * ((backward + rows[1]) * runs.count)
    return OperatorTerm(node, runs.count, *seconds_of, how, runs.first, runs.runs, share)


def _transfers(runs: OperatorRuns, facts: ProgramFacts, host: HostLink) -> Iterator[TransferTerm]:
    node, count = runs.node, runs.count
    if offloaded := facts.recomputation.host_values(node):
        inner_values = inner_of(runs.body, *_boundary(node), runs.graph.axes)
        for variable, whole, _ in offloaded:
            nbytes = inner_values.local(variable, whole)
            yield TransferTerm(node, nbytes, count, runs.part * (count * host.there_and_back(nbytes)))


def operator_seconds(node: Node, body: Body, graph: PCG, flow: Gradients, machine: Machine) -> tuple[float, float, str]:
    """Return the seconds forward and backward of one run of an operator, and their source (see `profile_lookup`)."""
    differentiated = with_gradient(node, flow)
    shapes = [v.tensor.shape for v in (*node.operands, *node.results)]
    share, moved = work_share(node, body, graph), moved_bytes(body, placing(body, *_boundary(node), len(graph.axes)), graph.axes)
    piece = single_piece(body, local_shapes(node, graph), share, differentiated, moved)
    forward, backward, how = seconds(body, shapes, piece, differentiated, machine)
    return float(forward[0]), float(backward[0]), how[0]


def local_shapes(node: Node, graph: PCG) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of an operator's operands and then its results on one device."""
    values: list[Value] = [*node.operands, *node.results]
    return tuple(local_shape(v.tensor.shape, v.type, graph.axes) for v in values)


def _boundary(node: Node) -> tuple[tuple[Type, ...], tuple[Type, ...]]:
    """Return the types of an operator's operands and results."""
    return tuple(v.type for v in node.operands), node.types


def work_share(node: Node, body: Body, graph: PCG) -> float:
    """Return the fraction of an operator's work that one device does."""
    share = 1.0
    solutions = placing(body, *_boundary(node), len(graph.axes))
    for axis, solution in zip(graph.axes, solutions, strict=True):
        if solution is not None and solution.matches:
            share *= part_of_work(divided_by(body, zip(body.equations, solution.matches, strict=True)), axis.size)
    return share
