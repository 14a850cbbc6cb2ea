"""Comparison of a plan's predictions with its compiled program: collectives by kind, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from unity.exec.compiled.agreement import Disagreement, argument_labels, disagreements
from unity.exec.compiled.hlo import Memory, collectives, memory
from unity.exec.pipelines.guarded import part_taken
from unity.exec.planned_step import PlannedStep
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.traffic import FORWARD, traffic
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
class Check:
    """A plan against its compiled program.

    Attributes:
        lines: every kind of collective, in elements, because CPU backends widen bfloat16 collectives.
        memory: bytes of the compiled program.
        timeline: the predicted memory of the step.
        disagreements: collectives that not all of their devices surely reach, so that the program may hang.
    """

    lines: tuple[ComparedLine, ...]
    memory: Memory
    timeline: MemoryTimeline
    disagreements: tuple[Disagreement, ...] = ()

    @property
    def total(self) -> ComparedLine:
        """All kinds of collectives together."""
        return ComparedLine("all", sum(line.predicted for line in self.lines), sum(line.compiled for line in self.lines))

    def agrees(self, tolerance: float = 0.02) -> bool:
        """Whether every kind, and the total, agree within `tolerance` of the total, and all devices reach every collective."""
        if self.disagreements:
            return False
        room = tolerance * max(self.total.compiled, self.total.predicted, 1)
        return all(abs(line.compiled - line.predicted) <= room for line in (*self.lines, self.total))

    def __str__(self) -> str:
        rows = [f"{'collective':20} {'predicted':>14} {'compiled':>14}  (elements on one device)"]
        lines = (*self.lines, self.total)
        rows += [f"{line.kind:20} {line.predicted:14,} {line.compiled:14,}  {line.difference:+.1%}" for line in lines]
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
    """Return the elements of every kind of collective in one step, on one device.

    Equal collectives of one value count once, as XLA runs them, except those that the backward pass repeats for a single reader.
    """
    elements: Counter[str] = Counter()
    shared: Counter[Hashable] = Counter()
    for c in traffic(graph, differentiated):
        if direction in (None, c.direction):
            common = c.count - c.alone
            elements[c.kind] += c.elements * (c.alone + max(0, common - shared[c.name]))
            if c.name is not None:
                shared[c.name] = max(shared[c.name], common)
    return elements


def compare(step: PlannedStep, compiled: Any = None) -> Check:
    """Compare a step with the prediction. It is compiled here unless the compiled program is given."""
    compiled = compiled or step.compile()
    text = compiled.as_text()
    elements: dict[str, Fraction] = {}
    for c in collectives(text):
        elements[c.kind] = elements.get(c.kind, Fraction(0)) + c.elements * c.count * part_taken(c.op_name)
    predicted = predicted_elements(step.graph, step.differentiated, None if step.training.backward else FORWARD)
    kinds = sorted({*elements, *predicted})
    lines = tuple(ComparedLine(k, int(predicted.get(k, 0)), round(elements.get(k, 0))) for k in kinds)
    timeline = memory_timeline(step.graph, step.differentiated, step.training, step.backend)
    return Check(lines, memory(compiled), timeline, tuple(disagreements(text, argument_labels(compiled))))
