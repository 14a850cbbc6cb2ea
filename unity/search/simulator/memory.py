"""Memory over a simulated step: what a device holds from when to when, on the schedule that overlap and links make.

What is held, and for whose sake, is what `search.memory` counts; here it has moments. Arguments and slots are there all the time.
A value lies in memory from when its maker starts until its last reader is done, or, if the backward pass needs it, until the
operator that it is kept for has run backward. A cotangent does from the first reader's backward pass until its maker's, a
gradient from then until the end. Where several things run at once, all that they work on is there.

Scans and remats are taken as wholes: what one of them works on is there for as long as it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unity.pcg.analysis.rematerialization import runs_again
from unity.pcg.ir.gradient_flow import Gradients, gradients
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.search.cost.cost import Training
from unity.search.memory.backend import Backend
from unity.search.memory.memory import Keeping, ends_inside, keeping
from unity.search.simulator import program
from unity.search.simulator.expansion import moments_on
from unity.search.simulator.timeline import Timeline
from unity.search.space.live_buffers import AGAIN, ARGUMENTS, COTANGENTS, GRADIENTS, RESULTS, SLOTS, WORKING, Held, local, unmoved

Moment = tuple[float, float]  # from, until
Array = np.ndarray


@dataclass(frozen=True)
class Span:
    """Something that is held, from a moment to another, in seconds from the start of the step."""

    held: Held
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class MemoryOverTime:
    """What one device holds while a step runs."""

    spans: tuple[Span, ...]

    @cached_property
    def times(self) -> Array:
        """The seconds at which something changes, ascending."""
        return np.unique([t for s in self.spans for t in (s.start, s.end)])

    @cached_property
    def by_reason(self) -> Mapping[str, Array]:
        """For every reason, the bytes from each of `times` to the next; after the last, nothing is said."""
        found: dict[str, Array] = {}
        for s in self.spans:
            change = found.setdefault(s.held.why, np.zeros(len(self.times)))
            change[np.searchsorted(self.times, s.start)] += s.held.nbytes
            change[np.searchsorted(self.times, s.end)] -= s.held.nbytes
        return {why: np.cumsum(change) for why, change in found.items()}

    @cached_property
    def nbytes(self) -> Array:
        """Bytes from each of `times` to the next."""
        return sum(self.by_reason.values(), np.zeros(len(self.times)))

    @property
    def peak(self) -> float:
        """The most bytes that are held at once."""
        return float(self.nbytes.max(initial=0.0))

    @property
    def moment(self) -> float:
        """Seconds at which most is held first."""
        return float(self.times[self.nbytes.argmax()]) if len(self.times) else 0.0

    @property
    def held(self) -> tuple[Held, ...]:
        """All that is there at the peak, largest first."""
        there = (s.held for s in self.spans if s.start <= self.moment < s.end)
        return tuple(sorted(there, key=lambda h: -h.nbytes))


@dataclass(frozen=True, eq=False)
class Step:
    """What a step is of: a parallel graph, the inputs that gradients are taken for, what else counts, and who compiles it."""

    graph: PCG
    differentiated: Collection[int]
    training: Training
    backend: Backend


def memory_over_time(step: Step, timeline: Timeline, device: int) -> MemoryOverTime:
    """What a device holds. `device`: of those that are simulated; folded there is one."""
    found = _Spans(step, timeline, device)
    return MemoryOverTime(tuple(s for s in found.spans() if s.held.nbytes and s.end > s.start))


class _Spans:
    """When the nodes of the outermost graph run on a device, and from that, when everything is held."""

    def __init__(self, step: Step, timeline: Timeline, device: int) -> None:
        self.graph, self.training = step.graph, step.training
        self.differentiated = frozenset(step.differentiated)
        self.flow: Gradients = gradients(self.graph, self.differentiated)
        self.keeping = keeping(self.graph, self.differentiated, step.training, step.backend)
        self.end = timeline.makespan
        self.readers: dict[Value, list[Node]] = {}
        for node in self.graph.nodes:
            for v in dict.fromkeys(node.operands):
                self.readers.setdefault(v, []).append(node)
        self.run = program.moments_of_nodes(self.graph, moments_on(timeline, device))
        self.forth = self.forward_moments()
        self.back = self.backward_moments()

    def forward_moments(self) -> dict[int, Moment]:
        """By id(node): when it runs forward; what takes no time does when its operands are there."""
        found: dict[int, Moment] = {}
        for node in self.graph.nodes:
            ready = max((found[id(v.node)][1] for v in node.operands), default=0.0)
            found[id(node)] = self.run.get((id(node), program.FORTH), (ready, ready))
        return found

    def backward_moments(self) -> dict[int, Moment]:
        """By id(node): when it runs backward, what is computed again for it included; nothing where no gradient flows."""
        found: dict[int, Moment] = {}
        for node in reversed(self.graph.nodes):
            if not any(map(self.flow, node.results)) or node.kind == "input":
                continue
            after = [found[id(r)][1] for v in node.results for r in self.readers.get(v, ()) if id(r) in found]
            ready = max(after, default=max(end for _, end in self.forth.values()))
            ran = [m for phase in (program.AGAIN, program.BACK) if (m := self.run.get((id(node), phase))) is not None]
            found[id(node)] = (min(m[0] for m in ran), max(m[1] for m in ran)) if ran else (ready, ready)
        return found

    def spans(self) -> Iterator[Span]:
        """Everything that is held, each for its time."""
        yield from self.always()
        for keeper in self.keeping:
            yield from self.kept(keeper)
        yield from self.values()
        yield from self.cotangents()

    def always(self) -> Iterator[Span]:
        for k, node in enumerate(self.graph.inputs):
            nbytes = local(Value(node), self.graph)
            yield Span(Held(ARGUMENTS, node, nbytes), 0.0, self.end)
            if k in self.differentiated and node.tensors[0].floating:
                yield Span(Held(SLOTS, node, self.training.optimizer_slots * nbytes), 0.0, self.end)

    def kept(self, keeper: Keeping) -> Iterator[Span]:
        """What an operator keeps, from when it is made until it has run backward, and what it works on beside its ends."""
        node = keeper.node
        forth, back = self.forth[id(node)], self.back.get(id(node))
        until = back[1] if back is not None else forth[1]
        for h in keeper.kept:
            yield Span(h, self.forth.get(id(h.node), forth)[0], until)
        inside = ends_inside(node)
        yield Span(Held(WORKING, node, inside if back is not None else max(inside, keeper.own)), *forth)
        if back is not None:
            yield Span(Held(WORKING, node, keeper.own), *back)

    def values(self) -> Iterator[Span]:
        """What is made forward and not kept; and in the backward pass, what is gathered again."""
        kept = {v for keeper in self.keeping for v in keeper.values}
        given = {id(node) for node in self.graph.inputs}
        outputs = {unmoved(v) for v in self.graph.outputs}
        for base, last in self.classes(self.forth, lambda m: m[1], max).items():
            if id(base.node) in given or (base in kept and base not in outputs):
                continue
            start = self.forth[id(base.node)]
            out = base in outputs
            held = Held(RESULTS if out else WORKING, base.node, local(base, self.graph))
            yield Span(held, start[0], self.end if out else max(last, start[1]))
            alone = base.node.kind in PARALLELIZATION or runs_again(base.node)
            if alone and (gathered := self.run.get((id(base.node), program.AGAIN))) is not None:
                used = [self.back[id(r)][1] for r in self.readers.get(base, ()) if id(r) in self.back]
                yield Span(Held(AGAIN, base.node, held.nbytes), gathered[0], max(used, default=gathered[1]))

    def cotangents(self) -> Iterator[Span]:
        """Cotangents until they are read; of weights, gradients, which stay."""
        weights = {id(n) for k, n in enumerate(self.graph.inputs) if k in self.differentiated}
        for base, first in self.classes(self.back, lambda m: m[0], min).items():
            if id(base.node) in weights:
                yield Span(Held(GRADIENTS, base.node, local(base, self.graph)), first, self.end)
            elif id(base.node) in self.back:
                yield Span(Held(COTANGENTS, base.node, local(base, self.graph)), first, self.back[id(base.node)][1])

    def classes(
        self, moments: Mapping[int, Moment], end: Callable[[Moment], float], best: Callable[..., float]
    ) -> dict[Value, float]:
        """For every value that has memory of its own, the best moment at which it, or what lies where it lies, is read."""
        found: dict[Value, list[float]] = {}
        for node in self.graph.nodes:
            for v in node.results:
                times = [end(moments[id(r)]) for r in self.readers.get(v, ()) if id(r) in moments]
                found.setdefault(unmoved(v), []).extend(times or ([end(moments[id(node)])] if id(node) in moments else []))
        return {base: best(times) for base, times in found.items() if times}
