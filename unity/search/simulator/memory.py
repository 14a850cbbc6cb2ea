"""Memory over a simulated step: what a device holds from when to when, on the schedule that overlap and links produce.

Which buffers are live, and why, is the knowledge of `search.memory`; here they have times. Arguments and optimizer slots are live
all the time, slots in the memory of the host while they are updated. A value is live from the start of its producer until its last
user ends, or, if it is a residual, until the operator that needs it has run backward. A cotangent is live from the first user's
backward pass until its producer's, a gradient from then to the end of the step. Where several operators run at once, the working
sets of all are live.

Scans and remats are taken as wholes: the working set of one is live for as long as it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unity.pcg.analysis.recomputation_marks import runs_again
from unity.pcg.ir.gradient_flow import Gradients, gradients
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.search.cost.cost import Training
from unity.search.memory.backend import Backend
from unity.search.memory.memory import OperatorMemory, ends_inside, operator_memory, undivided_state
from unity.search.simulator.expansion import moments_on
from unity.search.simulator.program import Phase, moments_of_nodes
from unity.search.simulator.timeline import Timeline
from unity.search.space.live_buffers import (
    AGAIN,
    ARGUMENTS,
    COTANGENTS,
    GRADIENTS,
    RESULTS,
    SLOTS,
    UPDATED,
    WORKING,
    Buffer,
    local,
    unmoved,
)

Moment = tuple[float, float]  # start, end
Array = np.ndarray


@dataclass(frozen=True)
class Span:
    """A live range: a buffer, and its start and end in seconds from the start of the step."""

    buffer: Buffer
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class MemoryOverTime:
    """The buffers of one device while a step runs."""

    spans: tuple[Span, ...]

    @cached_property
    def times(self) -> Array:
        """The seconds at which something changes, ascending."""
        return np.unique([t for s in self.spans for t in (s.start, s.end)])

    @cached_property
    def by_reason(self) -> Mapping[str, Array]:
        """For every reason to be live, the bytes from each of `times` to the next; zero after the last."""
        changes: dict[str, Array] = {}
        for s in self.spans:
            change = changes.setdefault(s.buffer.why, np.zeros(len(self.times)))
            change[np.searchsorted(self.times, s.start)] += s.buffer.nbytes
            change[np.searchsorted(self.times, s.end)] -= s.buffer.nbytes
        return {why: np.cumsum(change) for why, change in changes.items()}

    @cached_property
    def nbytes(self) -> Array:
        """Bytes from each of `times` to the next."""
        return sum(self.by_reason.values(), np.zeros(len(self.times)))

    @property
    def peak(self) -> float:
        """The maximum of the live bytes."""
        return float(self.nbytes.max(initial=0.0))

    @property
    def moment(self) -> float:
        """The first time, in seconds, at which the peak is reached."""
        return float(self.times[self.nbytes.argmax()]) if len(self.times) else 0.0

    @property
    def held(self) -> tuple[Buffer, ...]:
        """The buffers that are live at the peak, largest first."""
        there = (s.buffer for s in self.spans if s.start <= self.moment < s.end)
        return tuple(sorted(there, key=lambda h: -h.nbytes))


@dataclass(frozen=True, eq=False)
class SimulatedStep:
    """The training step to simulate: a parallel graph, the inputs with respect to which gradients are taken, the training's other
    needs, and the backend.
    """

    graph: PCG
    differentiated: Collection[int]
    training: Training
    backend: Backend


def memory_over_time(step: SimulatedStep, timeline: Timeline, device: int) -> MemoryOverTime:
    """Return the memory of a device over time. `device` is one of those that are simulated; there is one if they are folded."""
    ranges = _Spans(step, timeline, device)
    return MemoryOverTime(tuple(s for s in ranges.spans() if s.buffer.nbytes and s.end > s.start))


class _Spans:
    """The times at which the nodes of the outermost graph run on a device, and the live ranges that follow."""

    def __init__(self, step: SimulatedStep, timeline: Timeline, device: int) -> None:
        self.graph, self.training = step.graph, step.training
        self.differentiated = frozenset(step.differentiated)
        self.flow: Gradients = gradients(self.graph, self.differentiated)
        self.keeping = operator_memory(self.graph, self.differentiated, step.training, step.backend)
        self.end = timeline.makespan
        self.readers: dict[Value, list[Node]] = {}
        for node in self.graph.nodes:
            for v in dict.fromkeys(node.operands):
                self.readers.setdefault(v, []).append(node)
        self._runs = moments_of_nodes(self.graph, moments_on(timeline, device))
        self._forward = self.forward_moments()
        self._backward = self.backward_moments()

    def forward_moments(self) -> dict[int, Moment]:
        """Return by id(node) when it runs forward. A node that takes no time runs when its operands are available."""
        moments: dict[int, Moment] = {}
        for node in self.graph.nodes:
            ready = max((moments[id(v.node)][1] for v in node.operands), default=0.0)
            moments[id(node)] = self._runs.get((id(node), Phase.FORWARD), (ready, ready))
        return moments

    def backward_moments(self) -> dict[int, Moment]:
        """Return by id(node) when it runs backward, its recomputation included; nodes without a gradient are missing."""
        moments: dict[int, Moment] = {}
        for node in reversed(self.graph.nodes):
            if not any(map(self.flow, node.results)) or node.kind == "input":
                continue
            after = [moments[id(r)][1] for v in node.results for r in self.readers.get(v, ()) if id(r) in moments]
            ready = max(after, default=max(end for _, end in self._forward.values()))
            ran = [m for phase in (Phase.RECOMPUTE, Phase.BACKWARD) if (m := self._runs.get((id(node), phase))) is not None]
            moments[id(node)] = (min(m[0] for m in ran), max(m[1] for m in ran)) if ran else (ready, ready)
        return moments

    def spans(self) -> Iterator[Span]:
        """Yield all live ranges."""
        yield from self._arguments()
        for keeper in self.keeping:
            yield from self._residuals(keeper)
        yield from self.values()
        yield from self.cotangents()

    def _arguments(self) -> Iterator[Span]:
        for k, node in enumerate(self.graph.inputs):
            nbytes = local(Value(node), self.graph)
            yield Span(Buffer(ARGUMENTS, node, nbytes), 0.0, self.end)
            if k in self.differentiated and node.tensors[0].floating:
                yield Span(Buffer(SLOTS, node, self.training.state.on_device(node) * nbytes), 0.0, self.end)
                if (updated := self._runs.get((id(node), Phase.UPDATE))) is not None:
                    yield Span(Buffer(UPDATED, node, 2 * self.training.state.on_host(node) * nbytes), *updated)
        for buffer in undivided_state(self.graph, self.differentiated, self.training):
            yield Span(buffer, 0.0, self.end)

    def _residuals(self, keeper: OperatorMemory) -> Iterator[Span]:
        """Yield the residuals of an operator, until it has run backward, and its working sets apart from operands and results."""
        node = keeper.node
        forward, backward = self._forward[id(node)], self._backward.get(id(node))
        until = backward[1] if backward is not None else forward[1]
        for h in keeper.kept:
            yield Span(h, self._forward.get(id(h.node), forward)[0], until)
        inside = ends_inside(node)
        yield Span(Buffer(WORKING, node, inside if backward is not None else max(inside, keeper.own)), *forward)
        if backward is not None:
            yield Span(Buffer(WORKING, node, keeper.own), *backward)

    def values(self) -> Iterator[Span]:
        """Yield the values of the forward pass that are not residuals, and those that are gathered again in the backward pass."""
        residuals = {v for keeper in self.keeping for v in keeper.values}
        inputs = {id(node) for node in self.graph.inputs}
        outputs = {unmoved(v) for v in self.graph.outputs}
        for base, last in self._reads(self._forward, lambda m: m[1], max).items():
            if id(base.node) in inputs or (base in residuals and base not in outputs):
                continue
            start = self._forward[id(base.node)]
            out = base in outputs
            buffer = Buffer(RESULTS if out else WORKING, base.node, local(base, self.graph))
            yield Span(buffer, start[0], self.end if out else max(last, start[1]))
            alone = base.node.kind in PARALLELIZATION or runs_again(base.node)
            if alone and (gathered := self._runs.get((id(base.node), Phase.RECOMPUTE))) is not None:
                used = [self._backward[id(r)][1] for r in self.readers.get(base, ()) if id(r) in self._backward]
                yield Span(Buffer(AGAIN, base.node, buffer.nbytes), gathered[0], max(used, default=gathered[1]))

    def cotangents(self) -> Iterator[Span]:
        """Yield the cotangents until they are read, and the gradients of weights, which stay."""
        weights = {id(n) for k, n in enumerate(self.graph.inputs) if k in self.differentiated}
        for base, first in self._reads(self._backward, lambda m: m[0], min).items():
            if id(base.node) in weights:
                yield Span(Buffer(GRADIENTS, base.node, local(base, self.graph)), first, self.end)
            elif id(base.node) in self._backward:
                yield Span(Buffer(COTANGENTS, base.node, local(base, self.graph)), first, self._backward[id(base.node)][1])

    def _reads(
        self, moments: Mapping[int, Moment], end: Callable[[Moment], float], best: Callable[..., float]
    ) -> dict[Value, float]:
        """Return for every buffer the best of the times at which any of the values that alias it is read."""
        read_at: dict[Value, list[float]] = {}
        for node in self.graph.nodes:
            for v in node.results:
                times = [end(moments[id(r)]) for r in self.readers.get(v, ()) if id(r) in moments]
                read_at.setdefault(unmoved(v), []).extend(times or ([end(moments[id(node)])] if id(node) in moments else []))
        return {base: best(times) for base, times in read_at.items() if times}
