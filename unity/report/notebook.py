"""The short form of a plan in a notebook: its figures, and where its arguments are. It needs no jinja2 and no search."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from unity.base.formatting import duration, size
from unity.diff.placements import type_in_words
from unity.plan.plan import Plan
from unity.report.arguments import argument_kinds

MAX_ROWS = 12
LEFT = "text-align:left"


def summary(plan: Plan) -> str:
    """Return a plan in short, as HTML in the notebook's own colours."""
    graph, machine = plan.pcg, plan.machine
    kinds = argument_kinds(graph)
    rows = [
        (k.name, str(k.count), str(k.node.tensors[0]), type_in_words(k.node.types[0], graph.axes), size(k.here))
        for k in kinds[:MAX_ROWS]
    ]
    rest = kinds[MAX_ROWS:]
    if rest:
        more = f"… and {sum(k.count for k in rest)} more"
        rows.append((more, "", "", "", size(sum(k.here for k in rest))))
    head = (
        f"<b>{escape(plan.__name__)}</b> on {escape(machine.name)}: {duration(plan.time)} a step, "
        f"{size(plan.memory)} on each of {machine.devices} devices (predicted)"
    )
    columns = ("argument", "×", "shape", "held as", "on a device")
    return f"<div>{head}{_table(columns, rows)}</div>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th style="{LEFT}">{escape(c)}</th>' for c in columns)
    body = "".join("<tr>" + "".join(f'<td style="{LEFT}">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
