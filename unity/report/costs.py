"""Costs in words and tables: of operators, collectives, source lines and memory.

A plan with its function gives every term of the prediction. For a plan's file, costs are means of its summary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from unity.base.formatting import duration, short, size
from unity.pcg.ir.graph import Node
from unity.pcg.parallel.axis_names import AxisNames
from unity.plan.files.document import MemoryTable
from unity.plan.summary import RuleUse, Summary, Talk, seconds_by_line
from unity.report.picture import Description, Rows
from unity.search.cost.prediction import CollectiveTerm, Prediction
from unity.search.cost.profile_lookup import ROOFLINE
from unity.search.memory.buffers_by_line import by_line, merge_rows
from unity.search.memory.memory import ARGUMENTS, GRADIENTS, SLOTS, MemoryPrediction
from unity.search.space.live_buffers import OFFLOADED


def exact_costs(prediction: Prediction, memory: MemoryPrediction, names: AxisNames) -> Description:
    """Return a function that describes a node by all terms of the prediction."""
    terms = {id(t.node): t for t in prediction.operators}
    sent, held = _by_node((t.collective.node, t) for t in prediction.collectives), _by_node((h.node, h) for h in memory.held)
    transfers = _by_node((t.node, t) for t in prediction.transfers)

    def description(node: Node) -> Rows:
        rows: Rows = []
        if (t := terms.get(id(node))) is not None:
            source = "" if t.how == ROOFLINE else f", {t.how}"
            rows.append(("forward", f"{duration(t.forward)}{f' in {t.runs} runs' if t.runs > 1 else ''}{source}"))
            rows.append(("backward", duration(t.backward) if t.backward else "none"))
        rows += [_collective_row(t, names) for t in sent.get(id(node), ())]
        rows += [(OFFLOADED, f"{t.count} × {size(t.nbytes)}, {duration(t.seconds)}") for t in transfers.get(id(node), ())]
        return rows + [(h.why, size(h.nbytes)) for h in held.get(id(node), ()) if h.nbytes > 0]

    return description


def average_costs(summary: Summary) -> Description:
    """Return a function that describes a node by the mean costs of its kind at its source line."""
    work = {(w.line, w.kind): w for w in summary.work}

    def description(node: Node) -> Rows:
        w = work.get((short(node.source), node.kind))
        rows: Rows = []
        if w is not None and w.count:
            mean = f", the mean of {w.count} at this line" if w.count > 1 else ""
            rows.append(("forward + backward", f"{duration(w.seconds / w.count)}{mean}"))
        return rows

    return description


def rules_of_node(node: Node, uses: Iterable[RuleUse]) -> Rows:
    """Return the rules that rewrote a node's source line."""
    line = short(node.source)
    return [("rewritten by", f"{u.rule}:  {u.says}") for u in uses if node.source and line in u.lines]


def _by_node(pairs: Iterable[tuple[Node, Any]]) -> Mapping[int, list[Any]]:
    by_node: dict[int, list[Any]] = {}
    for node, item in pairs:
        by_node.setdefault(id(node), []).append(item)
    return by_node


def _collective_row(t: CollectiveTerm, names: AxisNames) -> tuple[str, str]:
    c = t.collective
    times = f"{c.count} × " if c.count > 1 else ""
    return c.kind, f"{c.direction}: {times}{size(c.nbytes)} over {names.listed(c.axes)}, {duration(t.seconds)}"


def collectives(talk: Iterable[Talk]) -> list[list[Any]]:
    """Return the rows of the table of collectives. A figure is a pair of the number, to sort by, and its text."""
    return [
        [t.kind, t.count, t.over, [t.nbytes, size(t.nbytes)], [t.seconds, duration(t.seconds)], t.why, t.line]
        for t in sorted(talk, key=lambda t: -t.seconds)
    ]


def lines(captured: Summary, planned: Summary) -> list[list[Any]]:
    """Return the seconds of every source line, before and after, the most expensive line first."""
    sides = [seconds_by_line(rows) for rows in (captured.work, planned.work, planned.talk)]
    seconds = {line: [side.get(line, 0.0) for side in sides] for side in sides for line in side}
    order = sorted(seconds, key=lambda line: -sum(seconds[line][1:]))
    return [[line or "(no line)", *([s, duration(s) if s else "0"] for s in seconds[line])] for line in order]


def live_memory(memory: MemoryPrediction) -> MemoryTable:
    """Return the live buffers of a device at its peak, by reason and by operator."""
    order = [ARGUMENTS, GRADIENTS, SLOTS]
    parts = sorted(memory.by_reason.items(), key=lambda p: (order.index(p[0]) if p[0] in order else len(order), -p[1]))
    named = (replace(row, operator="" if row.why in order else row.operator) for row in by_line(memory.held))
    offloaded = sum(h.nbytes for h in memory.offloaded)
    return MemoryTable(
        whole=(memory.total, size(memory.total)),
        parts=tuple((why, nbytes, size(nbytes)) for why, nbytes in parts if nbytes > 0),
        less=tuple((why, -nbytes, size(-nbytes)) for why, nbytes in parts if nbytes < 0),
        rows=tuple((row.why, row.operator, row.line, (row.nbytes, size(row.nbytes))) for row in merge_rows(named)),
        offloaded=(offloaded, size(offloaded)) if offloaded else None,
    )
