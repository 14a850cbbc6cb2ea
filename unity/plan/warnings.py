"""Warnings about a plan, by the user's line: effects that it drops, what it does not divide, and products that are slow."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace
from math import prod
from typing import Literal

from unity.base.documents import Record
from unity.base.formatting import pattern, short
from unity.machine.hardware import ALIGNMENT
from unity.machine.machine import Machine
from unity.pcg.capture.capture import unparallelized
from unity.pcg.ir.gradient_flow import Gradients, gradients
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.ir.program import Body
from unity.pcg.ir.user_lines import source_of_use
from unity.pcg.propagation.halos import undivided_windows
from unity.plan.effects import dropped_effects
from unity.plan.planned_program import PlannedProgram
from unity.plan.undivided import undivided
from unity.search.cost.alignment import depends_on_alignment, misaligned_rows
from unity.search.cost.prediction import local_shapes, operator_seconds
from unity.search.cost.roofline import dense_work

LARGE = 16  # indices of a dimension that is worth dividing
WORTH_WARNING = 0.01  # share of the predicted computation that an operator takes

Topic = Literal["dropped", "unknown", "windows", "dimension", "whole", "misaligned"]


class PlanWarning(Record):
    """A part of the user's program that a plan drops, does not divide, or runs slowly.

    Attributes:
        topic: "dropped" (an effect that does not run), "unknown" (an operator that cannot be divided), "windows" (a dimension along
            which windows cannot be divided), "dimension" (an argument's dimension that no axis divides), "whole" (an operator
            that could be divided, but runs whole on every device) or "misaligned" (a matrix product that its sizes make slow).
        line: the user's line.
        subject: the effect, operator or argument. Warnings of one topic about one subject at one line are the same.
        text: the warning.
    """

    topic: Topic
    line: str
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.text} ({self.line})" if self.line else self.text


def warnings_of(program: PlannedProgram) -> tuple[PlanWarning, ...]:
    """Return the warnings about a plan."""
    refused = tuple(undividable(program))
    known = {(w.line, w.subject) for w in refused}
    whole = (w for w in _whole(program) if (w.line, w.subject) not in known)
    return (*_dropped(program), *refused, *whole, *misaligned(program))


def undividable(program: PlannedProgram) -> Iterator[PlanWarning]:
    """Yield the operators and dimensions that no plan of the program divides, with the reason.

    These are unknown primitives, dimensions along which some windows slide, and arguments' dimensions that no axis divides.
    """
    for node, why in unparallelized(program.serial):
        yield PlanWarning("unknown", short(node.source), node.kind, f"{node.kind} runs whole on every device: {why}")
    windows = Counter((node.kind, dim, why, short(node.source)) for node, dim, why in undivided_windows(program.serial))
    for (kind, dim, why, line), n in windows.items():
        text = f"{n} × {kind} stays whole along dimension {dim}: {why}"
        yield PlanWarning("windows", line, f"dimension {dim} of {kind}", text)
    smallest, total = min((a.size for a in program.pcg.axes), default=1), prod(a.size for a in program.pcg.axes)
    padded = program.padding.sizes.keys() if program.padding is not None else ()
    yield from _indivisible(program.original, smallest, total, padded)


def _indivisible(graph: PCG, smallest: int, total: int, padded: Collection[int]) -> Iterator[PlanWarning]:
    """Yield the arguments' dimensions that no axis divides and that are not padded, the first argument of each size."""
    listed = set()
    for node in graph.inputs:
        for dim, n in enumerate(node.tensors[0].shape):
            if n >= LARGE and n % smallest and n not in padded and (n, dim) not in listed:
                listed.add((n, dim))
                text = (
                    f"{node.name}: no axis divides dimension {dim} of size {n}; the nearest size that all"
                    f" {total} devices divide is {-(-n // total) * total}"
                )
                line = short(source_of_use(node, graph))
                yield PlanWarning("dimension", line, f"dimension {dim} of {pattern(node.name)}", text)


def _dropped(program: PlannedProgram) -> Iterator[PlanWarning]:
    captured = program.family.original
    for notice in dict.fromkeys((*captured.notices, *dropped_effects(captured, program.pcg))):
        yield PlanWarning("dropped", short(notice.line), notice.text.partition(" is ")[0], notice.text)


def _whole(program: PlannedProgram) -> Iterator[PlanWarning]:
    for row in undivided(program):
        if row.part >= WORTH_WARNING:
            text = f"{row.kind} runs whole on every device, {row.part:.0%} of the computing: {row.reason}"
            yield PlanWarning("whole", row.line, row.kind, text)


def misaligned(program: PlannedProgram) -> Iterator[PlanWarning]:
    """Yield the matrix products that are slow because rows do not begin at multiples of `ALIGNMENT` bytes, with their sizes.

    A product that mostly waits for memory, such as one with a single column, is as fast with any rows, and yields no warning.
    """
    machine = program.family.search.machine
    if machine.device.misaligned == 1:
        return
    prediction = program.prediction
    flow = gradients(program.pcg, program.family.differentiated)
    taken, lost = (defaultdict[tuple[str, str, tuple[int, ...]], float](float) for _ in range(2))
    for term in prediction.operators:
        body = term.node.body
        if body is None or not depends_on_alignment(machine.device, body):
            continue
        if rows := misaligned_rows(dense_work(body)[1], local_shapes(term.node, program.pcg), body):
            key = short(term.node.source), term.node.kind, rows
            forward, backward = _saved_by_alignment(term.node, body, program.pcg, flow, machine)
            taken[key] += term.forward + term.backward
            lost[key] += term.forward * forward + term.backward * backward
    for key, seconds in lost.items():
        if seconds >= WORTH_WARNING * prediction.computing:
            (line, kind, sizes), times = key, taken[key] / (taken[key] - seconds)
            text = (
                f"{kind} takes about {times:.2g} times as long with rows of {', '.join(map(str, sizes))} elements, which are no"
                f" multiple of {ALIGNMENT} bytes: other sizes, or padding=True, may be faster"
            )
            yield PlanWarning("misaligned", line, f"rows of {kind}", text)


def _saved_by_alignment(node: Node, body: Body, graph: PCG, flow: Gradients, machine: Machine) -> tuple[float, float]:
    """Return the fractions of a product's seconds, forward and backward, that aligned rows would save by the roofline."""
    devices = machine.device, replace(machine.device, misaligned=1.0)
    seconds = (operator_seconds(node, body, graph, flow, replace(machine, device=d, profile=None))[:2] for d in devices)
    forward, backward = (1 - aligned / slow if slow else 0.0 for slow, aligned in zip(*seconds, strict=True))
    return forward, backward
