"""Undivided computation: the operators of a plan that every device runs whole, by line, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from unity.base.formatting import duration, short
from unity.pcg.capture.capture import unparallelized
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.halos import undivided_windows
from unity.pcg.types.axis import Axis
from unity.plan.planned_program import PlannedProgram
from unity.search.space.configurations import fits

WORTH_SAYING = 0.05  # share of the predicted computation; less is not reported


@dataclass(frozen=True)
class Undivided:
    """Operators of one kind at one line of the user's that all devices run whole.

    Attributes:
        seconds: of all their runs on one device, forward and backward.
        part: their share of the predicted computation.
        reason: why they are not divided.
    """

    kind: str
    line: str
    count: int
    seconds: float
    part: float
    reason: str


def undivided(program: PlannedProgram) -> tuple[Undivided, ...]:
    """Return the operators that every device of a plan runs whole, the most expensive first; none if their share is small.

    Those that take no time, such as reshapes, are left out.
    """
    prediction = program.prediction
    total = prediction.computing
    if program.family.search.machine.devices == 1 or not total:
        return ()
    reasons = _known_reasons(program.pcg)
    rows: dict[tuple[str, str, str], Undivided] = {}
    for term in prediction.operators:
        node, seconds = term.node, term.forward + term.backward
        if term.share < 1 or not seconds:
            continue
        line = short(node.source)
        reason = reasons.get(id(node)) or _reason(node, program.pcg.axes)
        row = rows.get((node.kind, line, reason), Undivided(node.kind, line, 0, 0.0, 0.0, reason))
        row = replace(row, count=row.count + 1, seconds=row.seconds + seconds, part=row.part + seconds / total)
        rows[node.kind, line, reason] = row
    if sum(row.part for row in rows.values()) <= WORTH_SAYING:
        return ()
    return tuple(sorted(rows.values(), key=lambda row: -row.seconds))


def headline(rows: tuple[Undivided, ...]) -> str:
    """Return a line about the share of the computation that is not divided."""
    part, seconds = sum(row.part for row in rows), sum(row.seconds for row in rows)
    return f"not divided: every device does all of {part:.0%} of the computing ({duration(seconds)})"


def _known_reasons(graph: PCG) -> Mapping[int, str]:
    """Return the reason of every operator that the operator table cannot divide, or not along its windows, by id(node)."""
    windows = {id(node): f"windows along dimension {dim}: {why}" for node, dim, why in undivided_windows(graph)}
    return windows | {id(node): why for node, why in unparallelized(graph)}


def _reason(node: Node, axes: tuple[Axis, ...]) -> str:
    """Return why an operator that the operator table can divide is not divided in a plan."""
    assert node.body is not None
    shapes = [v.tensor.shape for v in (*node.operands, *node.results)]
    if all(n == 1 for shape in shapes for n in shape):
        return "single numbers"
    dividing = [c for c in choices(node.body) if c.divided]
    if not dividing:
        return "none of its dimensions can be divided"
    every = (*dividing, *(c for c in choices(node.body) if c.name == "unused"))
    idle = len(every) - 1
    picks = np.array([[c if k == a else idle for k in range(len(axes))] for c in range(idle) for a in range(len(axes))], int)
    if not fits(every, shapes, picks, axes).any():
        return "no axis divides its dimensions"
    return f'no better plan divides it: explain("{node.kind}{f" at {_place(node)}" if node.source else ""}") prices those that do'


def _place(node: Node) -> str:
    return short(node.source).partition(" ")[0]
