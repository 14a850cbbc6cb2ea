"""What a report says of an operator's cost: of a live plan term by term, of a file what its summary keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unity.base.formatting import duration, short, size
from unity.pcg.ir.graph import Node
from unity.pcg.ir.user_lines import line_behind
from unity.pcg.types.axis import Axis
from unity.plan.summary import RuleUse, Summary, Talk
from unity.report.picture import Rows, Said
from unity.search.cost.prediction import CollectiveTerm, Prediction
from unity.search.cost.profile_lookup import ROOFLINE
from unity.search.memory.memory import ARGUMENTS, GRADIENTS, SLOTS, MemoryPrediction


def exactly(found: Prediction, memory: MemoryPrediction, axes: Sequence[Axis]) -> Said:
    """Says of a node all terms of the prediction."""
    terms = {id(t.node): t for t in found.operators}
    sent, held = _by_node((t.collective.node, t) for t in found.collectives), _by_node((h.node, h) for h in memory.held)

    def said(node: Node) -> Rows:
        rows: Rows = []
        if (t := terms.get(id(node))) is not None:
            known = "" if t.how == ROOFLINE else f", {t.how}"
            rows.append(("forward", f"{duration(t.forward)}{f' in {t.runs} runs' if t.runs > 1 else ''}{known}"))
            rows.append(("backward", duration(t.backward) if t.backward else "none"))
        rows += [_sent(t, axes) for t in sent.get(id(node), ())]
        return rows + [(h.why, size(h.nbytes)) for h in held.get(id(node), ()) if h.nbytes > 0]

    return said


def on_average(summary: Summary) -> Said:
    """Says of a node what those of its kind at its line take in the mean."""
    work = {(w.line, w.kind): w for w in summary.work}

    def said(node: Node) -> Rows:
        w = work.get((short(node.source), node.kind))
        rows: Rows = []
        if w is not None and w.count:
            many = f", the mean of {w.count} at this line" if w.count > 1 else ""
            rows.append(("forward + backward", f"{duration(w.seconds / w.count)}{many}"))
        return rows

    return said


def of_rules(node: Node, uses: Iterable[RuleUse]) -> Rows:
    """The rules that rewrote a node's line."""
    line = short(node.source)
    return [("rewritten by", f"{u.rule}:  {u.says}") for u in uses if node.source and line in u.lines]


def _by_node(pairs: Iterable[tuple[Node, Any]]) -> Mapping[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for node, one in pairs:
        found.setdefault(id(node), []).append(one)
    return found


def _sent(t: CollectiveTerm, axes: Sequence[Axis]) -> tuple[str, str]:
    c = t.collective
    over = "·".join(axes[i].name for i in c.axes)
    often = f"{c.count} × " if c.count > 1 else ""
    return c.kind, f"{c.direction}: {often}{size(c.nbytes)} over {over}, {duration(t.seconds)}"


def collectives(talk: Iterable[Talk]) -> list[list[Any]]:
    """Rows of the table; figures as pairs of the number, to sort by, and the text."""
    return [
        [t.kind, t.count, t.over, [t.nbytes, size(t.nbytes)], [t.seconds, duration(t.seconds)], t.why, t.line]
        for t in sorted(talk, key=lambda t: -t.seconds)
    ]


def lines(captured: Summary, planned: Summary) -> list[list[Any]]:
    """What computing and communicating take by line of the user's: before and after, the most expensive first."""
    sides = [_by_line(rows) for rows in (captured.work, planned.work, planned.talk)]
    found = {line: [side.get(line, 0.0) for side in sides] for side in sides for line in side}
    order = sorted(found, key=lambda line: -sum(found[line][1:]))
    return [[line or "(no line)", *([s, duration(s) if s else "0"] for s in found[line])] for line in order]


def _by_line(rows: Iterable[Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        found[row.line] = found.get(row.line, 0.0) + row.seconds
    return found


def holders(memory: MemoryPrediction) -> dict[str, Any]:
    """What a device's memory holds when most is held: by reason, and by what made it."""
    order = [ARGUMENTS, GRADIENTS, SLOTS]
    parts = sorted(memory.by_reason.items(), key=lambda p: (order.index(p[0]) if p[0] in order else len(order), -p[1]))
    rows: dict[tuple[str, str, str], float] = {}
    for h in memory.held:
        made = "" if h.why in order else h.node.kind
        key = h.why, made, line_behind(h.node)
        rows[key] = rows.get(key, 0.0) + h.nbytes
    table = sorted(((*k, n) for k, n in rows.items() if n), key=lambda r: -r[3])
    return {
        "whole": [memory.total, size(memory.total)],
        "parts": [[why, nbytes, size(nbytes)] for why, nbytes in parts if nbytes > 0],
        "less": [[why, -nbytes, size(-nbytes)] for why, nbytes in parts if nbytes < 0],
        "rows": [[why, made, line, [n, size(n) if n >= 0 else f"−{size(-n)}"]] for why, made, line, n in table],
    }
