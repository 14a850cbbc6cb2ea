"""Where a parallel graph's memory goes on one device: what holds how many bytes when most is held.

Always held are arguments, optimizer slots and results; and gradients, but until one is computed other values may lie in its place.
Until its reader's backward pass: what `pcg.residuals` says is kept, of a scan for every step. For a moment: an operator's working
set. In a remat nothing is kept; but when its backward pass comes, all that it would have kept is there. The backward pass takes
operators in reverse, so that most is held at some operator, together with what those before it keep.

The search adds up the same terms but for what is there for a moment, which is not a sum; `tests/search/memory/test_memory.py` holds
the two against each other. What a backend makes for itself beyond that is said in `search.backend`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

from unity.pcg.ir.gradient_flow import gradients
from unity.pcg.ir.graph import PCG, Node, Value
from unity.search.cost.cost import Training
from unity.search.memory.backend import GPU, Backend
from unity.search.memory.in_flight import flight
from unity.search.memory.region import Keeping, Region
from unity.search.memory.residuals import Setting
from unity.search.space.live_buffers import ARGUMENTS, GRADIENTS, RESULTS, SLOTS, Held, local


@dataclass(frozen=True)
class MemoryPrediction:
    """Everything that is held at the moment when most is. `additive`: what the search counts, which leaves working sets out."""

    held: tuple[Held, ...]
    additive: float

    @cached_property
    def total(self) -> float:
        """Bytes that the device must have in training: also the optimizer's."""
        return sum(h.nbytes for h in self.held)

    @cached_property
    def step(self) -> float:
        """Bytes of one gradient step: what the compiled program has. It knows no optimizer."""
        return sum(h.nbytes for h in self.held if h.why != SLOTS)

    @cached_property
    def by_reason(self) -> Mapping[str, float]:
        """The bytes by why they are held."""
        found: dict[str, float] = {}
        for h in self.held:
            found[h.why] = found.get(h.why, 0.0) + h.nbytes
        return found


@dataclass(frozen=True, eq=False)
class LiveRanges:
    """What a parallel graph holds on one device over a step: buffers that are live throughout, and its operators' region.

    `counted`: buffers that the search counts, live throughout; `beside`: further ones, which it leaves out.
    """

    counted: tuple[Held, ...]
    beside: tuple[Held, ...]
    region: Region

    @property
    def throughout(self) -> tuple[Held, ...]:
        """The buffers that are live throughout the step."""
        return (*self.counted, *self.beside)


def live_ranges(graph: PCG, differentiated: Collection[int], training: Training, backend: Backend = GPU) -> LiveRanges:
    """Sweep the operators of a parallel graph forward and backward. Arguments are as for `predict_memory`."""
    differentiated = differentiated if training.backward else ()
    flow = gradients(graph, differentiated)
    always = [Held(ARGUMENTS, node, local(Value(node), graph)) for node in graph.inputs]
    for k, node in enumerate(graph.inputs):
        if k in differentiated and node.tensors[0].floating:
            nbytes = local(Value(node), graph)
            always += [Held(GRADIENTS, node, nbytes), Held(SLOTS, node, training.optimizer_slots * nbytes)]
    flying, more = flight(graph, flow, backend)
    always += flying
    region = Region(graph, Setting(graph, flow, training.backward, backend), always=always)
    results = [Held(RESULTS, v.node, local(v, graph)) for v in dict.fromkeys(graph.outputs)]
    return LiveRanges(tuple(always), (*more, *results), region)


def predict_memory(graph: PCG, differentiated: Collection[int], training: Training, backend: Backend = GPU) -> MemoryPrediction:
    """Predict the memory of a parallel graph on one device.

    Args:
        graph: the parallel graph.
        differentiated: the inputs that gradients are taken for, if `training` has them.
        training: whether there is a backward pass, and the optimizer's slots.
        backend: what compiles the program, and holds more than the graph names.
    """
    live = live_ranges(graph, differentiated, training, backend)
    additive = sum(h.nbytes for h in live.counted) + live.region.steps + live.region.momentary
    return MemoryPrediction((*live.throughout, *live.region.peak), additive)


def keeping(graph: PCG, differentiated: Collection[int], training: Training, backend: Backend = GPU) -> tuple[Keeping, ...]:
    """What every operator of the outermost graph needs. Arguments are as for `predict_memory`."""
    differentiated = differentiated if training.backward else ()
    found = Region(graph, Setting(graph, gradients(graph, differentiated), training.backward, backend))
    return tuple(found.keeping)


def ends_inside(node: Node) -> float:
    """Of a node with a graph inside, the most bytes that one operator there reads and makes; nothing of others."""
    if node.inside is None:
        return 0.0
    each = (sum(local(v, node.inside) for v in dict.fromkeys((*n.operands, *n.results))) for n in node.inside.nodes)
    return max(max(each, default=0.0), max(map(ends_inside, node.inside.nodes), default=0.0))
