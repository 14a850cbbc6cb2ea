"""Peak memory of a parallel graph on one device, with the buffers that are live at the peak and the reason each is live.

Arguments, optimizer slots and results are live throughout the step; so are gradients, but until one is computed other values may
reuse its memory. Residuals (`pcg.analysis.residuals`) are live until their user's backward pass, those of a scan for every step.
An operator's working set is live during its turn. A remat has no residuals, but during its backward pass all values are live that
would otherwise be residuals. The backward pass takes operators in reverse, so the peak is at the turn of some operator, together
with the residuals of those before it.

State of the optimizer in the memory of the host takes none of the device's until the update. The update takes one weight after the
other, so that the state of one is on the device at a time: as it was fetched, and as it is sent back.

The search adds up the same terms except working sets, which do not add up; `tests/search/memory/test_memory.py` compares the two.
`search.memory.backend` describes the memory that a backend needs in addition.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from unity.pcg.ir.gradient_flow import gradients
from unity.pcg.ir.graph import PCG, Node, Value
from unity.search.cost.cost import Training
from unity.search.memory.backend import GPU, Backend
from unity.search.memory.in_flight import flight
from unity.search.memory.operator_memory import OperatorMemory
from unity.search.memory.region import Region
from unity.search.memory.residuals import Setting
from unity.search.memory.sweep import sweep
from unity.search.space.live_buffers import ARGUMENTS, GRADIENTS, RESULTS, SLOTS, UPDATED, Buffer, local


@dataclass(frozen=True)
class MemoryPrediction:
    """The memory of one device at the peak.

    Args:
        held: The buffers that are live at the peak.
        additive: Bytes that the search counts, without working sets.
        offloaded: Values that lie in the memory of the host, all together: they take none of the device's.
    """

    held: tuple[Buffer, ...]
    additive: float
    offloaded: tuple[Buffer, ...] = ()

    @cached_property
    def total(self) -> float:
        """Bytes that the device needs in training, the optimizer's slots included."""
        return sum(h.nbytes for h in self.held)

    @cached_property
    def step(self) -> float:
        """Bytes at the peak without the optimizer's slots that stay on the device.

        A compiled gradient step takes as many, unless the peak is the update.
        """
        return sum(h.nbytes for h in self.held if h.why != SLOTS)

    @cached_property
    def by_reason(self) -> Mapping[str, float]:
        """The bytes at the peak, summed up by reason."""
        sums: dict[str, float] = {}
        for h in self.held:
            sums[h.why] = sums.get(h.why, 0.0) + h.nbytes
        return sums


@dataclass(frozen=True, eq=False)
class LiveRanges:
    """The live ranges of a parallel graph's buffers on one device over a step.

    Args:
        counted: Buffers that are live throughout the step and that the search counts.
        beside: Further buffers that are live throughout the step, but that the search does not count.
        region: The sweep over the operators.
        hosted: The optimizer's state in the memory of the host.
    """

    counted: tuple[Buffer, ...]
    beside: tuple[Buffer, ...]
    region: Region
    hosted: tuple[Buffer, ...] = ()

    @property
    def throughout(self) -> tuple[Buffer, ...]:
        """The buffers that are live throughout the step."""
        return (*self.counted, *self.beside)

    @property
    def update(self) -> tuple[Buffer, ...]:
        """The buffers that are live during the update alone, when the state of a weight is fetched: of the largest one."""
        largest = max(self.hosted, key=lambda h: h.nbytes, default=None)
        return () if largest is None else (Buffer(UPDATED, largest.node, 2 * largest.nbytes),)

    @property
    def peak(self) -> Sequence[Buffer]:
        """The buffers at the peak, beside those that are live throughout the step: at an operator's turn, or in the update."""
        return max(self.region.peak, self.update, key=lambda peak: sum(h.nbytes for h in peak))

    @property
    def offloaded(self) -> tuple[Buffer, ...]:
        """The values in the memory of the host."""
        return (*self.region.offloaded, *self.hosted)


def live_ranges(graph: PCG, differentiated: Collection[int], training: Training, backend: Backend = GPU) -> LiveRanges:
    """Sweep the operators of a parallel graph forward and backward. Arguments are as for `predict_memory`."""
    differentiated = differentiated if training.backward else ()
    flow = gradients(graph, differentiated)
    always = [Buffer(ARGUMENTS, node, local(Value(node), graph)) for node in graph.inputs]
    hosted = list[Buffer]()
    for k, node in enumerate(graph.inputs):
        if k in differentiated and node.tensors[0].floating:
            nbytes = local(Value(node), graph)
            always += [Buffer(GRADIENTS, node, nbytes), Buffer(SLOTS, node, training.state.on_device(node) * nbytes)]
            hosted += [Buffer(SLOTS, node, on_host * nbytes)] if (on_host := training.state.on_host(node)) else []
    flying, more = flight(graph, flow, backend)
    always += flying
    region = sweep(graph, Setting(graph, flow, training.backward, backend), always=always)
    results = [Buffer(RESULTS, v.node, local(v, graph)) for v in dict.fromkeys(graph.outputs)]
    beside = (*undivided_state(graph, differentiated, training), *more, *results)
    return LiveRanges(tuple(always), beside, region, tuple(hosted))


def undivided_state(graph: PCG, differentiated: Collection[int], training: Training) -> list[Buffer]:
    """Return the part of the optimizer's state that every device stores, attributed to the first weight."""
    weights = (node for k, node in enumerate(graph.inputs) if k in differentiated and node.tensors[0].floating)
    first = next(weights, None)
    return [Buffer(SLOTS, first, training.state.whole)] if first is not None and training.state.whole else []


def predict_memory(graph: PCG, differentiated: Collection[int], training: Training, backend: Backend = GPU) -> MemoryPrediction:
    """Predict the memory of a parallel graph on one device.

    Args:
        graph: The parallel graph.
        differentiated: The inputs, by number, whose gradients are wanted; ignored if `training` has no backward pass.
        training: Whether there is a backward pass, and the sizes of the optimizer's state.
        backend: The compiler, which needs more memory than the graph names.
    """
    live = live_ranges(graph, differentiated, training, backend)
    additive = sum(h.nbytes for h in live.counted) + live.region.residual_bytes + live.region.momentary
    return MemoryPrediction((*live.throughout, *live.peak), additive, live.offloaded)


def operator_memory(
    graph: PCG, differentiated: Collection[int], training: Training, backend: Backend = GPU
) -> tuple[OperatorMemory, ...]:
    """Return the memory that every operator of the outermost graph needs. Arguments are as for `predict_memory`."""
    differentiated = differentiated if training.backward else ()
    setting = Setting(graph, gradients(graph, differentiated), training.backward, backend)
    return tuple(sweep(graph, setting).operators)


def ends_inside(node: Node) -> float:
    """Return the most bytes of operands and results of any operator inside a node; 0 for a node without a graph inside."""
    if node.inside is None:
        return 0.0
    each = (sum(local(v, node.inside) for v in dict.fromkeys((*n.operands, *n.results))) for n in node.inside.nodes)
    return max(max(each, default=0.0), max(map(ends_inside, node.inside.nodes), default=0.0))
