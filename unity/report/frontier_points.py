"""The points of the frontier, each with its differences from the plan of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from unity.base.formatting import duration, pattern, size
from unity.diff.placements import stored_in_words
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.types.parallel_type import Type
from unity.report.picture import Interned
from unity.search.session import Candidate

MAX_DIFFERENCES = 8  # differences of a point that are listed one by one


def points_of(
    serial: PCG, candidates: Sequence[Candidate], chosen: Candidate, interned: Interned, names: AxisNames
) -> list[dict[str, Any]]:
    """Return all points as data, fastest first.

    Args:
        serial: the graph that their assignments are for.
        candidates: the points.
        chosen: the point of the report.
        interned: the texts of the page.
        names: the names of the mesh axes.
    """
    points = list(candidates) or [chosen]
    if not any(_is_chosen(c, chosen) for c in points):
        points.append(chosen)
    points.sort(key=lambda c: (c.time, c.memory))
    texts = [_differences(serial, c, chosen, names) for c in points]
    return [{**_point(c, chosen), "differs": list(map(interned.of, rows))} for c, rows in zip(points, texts, strict=True)]


def _is_chosen(c: Candidate, chosen: Candidate) -> bool:
    return (c.time, c.memory) == (chosen.time, chosen.memory)


def _point(c: Candidate, chosen: Candidate) -> dict[str, Any]:
    says = f"{duration(c.time)} a step, {size(c.memory)} on each device"
    return {"time": c.time, "memory": c.memory, "says": says, "chosen": _is_chosen(c, chosen)}


def _differences(serial: PCG, c: Candidate, chosen: Candidate, names: AxisNames) -> list[str]:
    """Return, in words, the arguments that are stored otherwise than in the chosen plan, and the numbers of other differences."""
    if _is_chosen(c, chosen):
        return []
    stored: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    for node, _ in serial.walk():
        one, other = (side.assignment.results.get(id(node), ()) for side in (chosen, c))
        if one == other:
            continue
        if node.kind == "input":
            stored[_moved(node, one, other, names)] += 1
        else:
            operators[node.kind] += 1
    rows = [f"{n} × {text}" if n > 1 else text for text, n in stored.most_common(MAX_DIFFERENCES)]
    if len(stored) > MAX_DIFFERENCES:
        rows.append(f"… and {sum(stored.values()) - sum(n for _, n in stored.most_common(MAX_DIFFERENCES))} more arguments")
    if operators:
        kinds = ", ".join(f"{n} {kind}" for kind, n in operators.most_common(MAX_DIFFERENCES))
        rows.append(f"operators that are split otherwise: {kinds}")
    before, after = chosen.assignment, c.assignment
    for growth, what in (
        (len(after.again) - len(before.again), "operands are gathered again in the backward pass"),
        (len(after.recomputed) - len(before.recomputed), "operators compute inner values again"),
        (len(after.rerun) - len(before.rerun), "operators run again in the backward pass"),
    ):
        rows += [f"{abs(growth)} {'more' if growth > 0 else 'fewer'} {what}"] if growth else []
    return rows or ["the same types; what is moved, or computed again, differs"]


def _moved(node: Node, one: tuple[Type, ...], other: tuple[Type, ...], names: AxisNames) -> str:
    before, after = (stored_in_words(types[0], names) if types else "" for types in (one, other))
    return f"{pattern(node.name or 'an input of a loop')}: {before} → {after}"
