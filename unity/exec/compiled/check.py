"""Comparison of a plan's predictions with its compiled program: collectives by kind and by line, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from unity.exec.compiled.divergence import Disagreement, argument_labels, disagreements
from unity.exec.compiled.hlo import CompiledCollective, Memory, collectives, memory
from unity.exec.pipelines.guarded import taken_share
from unity.exec.planned_step import PlannedStep
from unity.pcg.ir.graph import PCG
from unity.pcg.ir.user_lines import labelled_place, place, source_of_use
from unity.pcg.parallel.traffic import FORWARD, Collective, traffic
from unity.search.memory.timeline import MemoryTimeline, memory_timeline


@dataclass(frozen=True)
class ComparedLine:
    """One kind of collective, or of memory: elements or bytes on one device in one step, predicted and compiled."""

    kind: str
    predicted: int
    compiled: int

    @property
    def difference(self) -> float:
        """(compiled - predicted) / the larger of both."""
        return (self.compiled - self.predicted) / max(self.compiled, self.predicted, 1)


@dataclass(frozen=True)
class ComparedPlace(ComparedLine):
    """The collectives of one kind at one line of the user's, "model.py:42", or at none ("")."""

    line: str


@dataclass(frozen=True)
class Check:
    """A plan compared with its compiled program.

    Attributes:
        lines: every kind of collective, in elements, because CPU backends widen bfloat16 collectives.
        places: every kind of collective at every line of the user's, by the names in the compiled program.
        memory: bytes of the compiled program.
        timeline: the predicted memory of the step.
        disagreements: collectives that some of their devices may not reach, so that the program may hang.
    """

    lines: tuple[ComparedLine, ...]
    places: tuple[ComparedPlace, ...]
    memory: Memory
    timeline: MemoryTimeline
    disagreements: tuple[Disagreement, ...] = ()

    @property
    def total(self) -> ComparedLine:
        """All kinds of collectives together."""
        return ComparedLine("all", sum(line.predicted for line in self.lines), sum(line.compiled for line in self.lines))

    @property
    def deviations(self) -> tuple[ComparedPlace, ...]:
        """The lines at which the program communicates otherwise than planned, the largest difference first.

        A compiler may move a collective, so that it counts at another line. `agrees` therefore compares the kinds alone.
        """
        differing = (p for p in self.places if p.predicted != p.compiled)
        return tuple(sorted(differing, key=lambda p: -abs(p.compiled - p.predicted)))

    def agrees(self, tolerance: float = 0.02) -> bool:
        """Return whether every kind and the total agree within `tolerance` of the total, and all devices reach all collectives."""
        if self.disagreements:
            return False
        room = tolerance * max(self.total.compiled, self.total.predicted, 1)
        return all(abs(line.compiled - line.predicted) <= room for line in (*self.lines, self.total))

    def __str__(self) -> str:
        rows = [f"{'collective':20} {'predicted':>14} {'compiled':>14}  (elements on one device)"]
        lines = (*self.lines, self.total)
        rows += [f"{line.kind:20} {line.predicted:14,} {line.compiled:14,}  {line.difference:+.1%}" for line in lines]
        if not self.agrees():
            rows.append("communicates otherwise than planned, by line:")
            rows += [f"{p.kind:20} {p.predicted:14,} {p.compiled:14,}  {p.line or '(no line)'}" for p in self.deviations]
        rows.append(f"{'memory':20} {'predicted':>14} {'compiled':>14}  (bytes on one device, without the optimizer's)")
        lines = self.memory_lines
        rows += [f"{line.kind:20} {line.predicted:14,} {line.compiled:14,}  {line.difference:+.1%}" for line in lines]
        rows += [f"may hang, not all devices reach it: {disagreement}" for disagreement in self.disagreements]
        return "\n".join(rows)

    __repr__ = __str__

    @property
    def memory_lines(self) -> tuple[ComparedLine, ...]:
        """Bytes on one device in one step, without the optimizer: arguments, outputs, temporaries, and all together."""
        predicted, compiled = self.timeline, self.memory
        return (
            ComparedLine("arguments", predicted.arguments, compiled.arguments),
            ComparedLine("outputs", predicted.outputs, compiled.outputs - compiled.aliased),
            ComparedLine("temporaries", predicted.temporaries, compiled.temporaries),
            ComparedLine("all", predicted.step, compiled.total),
        )


def predicted_elements(graph: PCG, differentiated: Any, direction: str | None = None) -> Mapping[str, int]:
    """Return the predicted elements of every kind of collective in one step, on one device.

    Equal collectives of one value count once, as XLA runs them, except those that the backward pass repeats for a single user.
    """
    elements: Counter[str] = Counter()
    for c, amount in _predicted(graph, differentiated, direction):
        elements[c.kind] += amount
    return elements


def _predicted(graph: PCG, differentiated: Any, direction: str | None) -> Iterator[tuple[Collective, int]]:
    """Yield the collectives that XLA runs, with their elements in one step. Of equal ones of one value, the first has them all."""
    shared: Counter[Hashable] = Counter()
    for c in traffic(graph, differentiated):
        if direction in (None, c.direction) and not c.folded:
            runs = c.alone
            for name, common in ((c.name, c.count - c.repeats), (c.repeated, c.repeats - c.alone)):
                runs += max(0, common - shared[name])
                if name is not None:
                    shared[name] = max(shared[name], common)
            yield c, c.elements * runs


def _places_of_nodes(graph: PCG, around: str = "") -> Iterator[tuple[int, str]]:
    """Yield the id of every node, nested ones included, with its line.

    Nodes without a line have that of the operator around them, since `labelled_place` finds that in compiled programs.
    """
    for node in graph.nodes:
        line = place(source_of_use(node, graph)) or around
        yield id(node), line
        if node.inside is not None:
            yield from _places_of_nodes(node.inside, line)


def _compared_places(step: PlannedStep, communicated: Iterable[tuple[CompiledCollective, Fraction]]) -> tuple[ComparedPlace, ...]:
    """Compare a step's collectives with `communicated`, those of its compiled program with their elements, by kind and line."""
    places = dict(_places_of_nodes(step.graph))
    predicted, compiled = Counter[tuple[str, str]](), dict[tuple[str, str], Fraction]()
    for c, amount in _predicted(step.graph, step.differentiated, None if step.training.backward else FORWARD):
        predicted[c.kind, places[id(c.node)]] += amount
    for c, amount in communicated:
        key = c.kind, labelled_place(c.op_name)
        compiled[key] = compiled.get(key, Fraction(0)) + amount
    keys = sorted({*predicted, *compiled})
    return tuple(ComparedPlace(kind, predicted[kind, line], round(compiled.get((kind, line), 0)), line) for kind, line in keys)


def compare(step: PlannedStep, compiled: Any = None) -> Check:
    """Compare the predictions about a step with its compiled program, which is compiled here unless it is passed."""
    compiled = compiled or step.compile()
    text = compiled.as_text()
    elements: dict[str, Fraction] = {}
    communicated = [(c, c.elements * c.count * taken_share(c.op_name)) for c in collectives(text)]
    for c, amount in communicated:
        elements[c.kind] = elements.get(c.kind, Fraction(0)) + amount
    predicted = predicted_elements(step.graph, step.differentiated, None if step.training.backward else FORWARD)
    kinds = sorted({*elements, *predicted})
    lines = tuple(ComparedLine(k, int(predicted.get(k, 0)), round(elements.get(k, 0))) for k in kinds)
    timeline = memory_timeline(step.graph, step.differentiated, step.without_update, step.backend)
    places = _compared_places(step, communicated)
    return Check(lines, places, memory(compiled), timeline, tuple(disagreements(text, argument_labels(compiled))))
