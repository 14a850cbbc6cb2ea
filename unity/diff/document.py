"""A difference of two plans as headings and tables of text, for the formats to lay out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unity.base.formatting import duration, size
from unity.diff.comparison import PlanComparison
from unity.diff.edits import ADDED, CHANGED, REMOVED
from unity.diff.regions import CostChange, step_costs
from unity.plan.summary import RuleUse, Summary

MAX_ROWS = 400  # rows of a table that are shown; the others are counted
UNMARKED = " "


@dataclass(frozen=True)
class DocumentRow:
    """Cells, and a mark: `ADDED`, `REMOVED`, `CHANGED` or `UNMARKED`."""

    mark: str
    cells: tuple[str, ...]
    heading: bool = False


@dataclass(frozen=True)
class DocumentTable:
    """A title, the columns' names, and the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[DocumentRow, ...]


@dataclass(frozen=True)
class Document:
    """A title, and the tables that show the difference, none if nothing differs."""

    title: str
    tables: tuple[DocumentTable, ...]


def document(diff: PlanComparison) -> Document:
    """Return a difference as tables: costs, rules, lines, collectives."""
    title = f"{_name(diff.before)}  →  {_name(diff.after)}"
    if not diff:
        return Document(f"{title}: no difference", ())
    tables = (_costs(*diff.shown), _rules(diff), _regions(diff), _collectives(diff))
    return Document(title, tuple(t for t in tables if t.rows))


def _name(s: Summary) -> str:
    return f"{s.name} on {s.machine}" if s.machine else s.name


def _costs(before: Summary, after: Summary) -> DocumentTable:
    """Return the costs of a step. Graphs without a plan have no costs, but have a mesh."""
    rows = [
        DocumentRow(UNMARKED, (what, _seconds(c.before), _seconds(c.after), _factor(c)))
        for what, c in step_costs(before, after).items()
    ]
    memory = CostChange(before.memory, after.memory)
    rows.append(DocumentRow(UNMARKED, ("memory on each device", size(memory.before), size(memory.after), _factor(memory))))
    rows.append(DocumentRow(UNMARKED, ("devices", str(before.devices), str(after.devices), "")))
    mesh = DocumentRow(UNMARKED, ("mesh", _mesh(before), _mesh(after), ""))
    columns = ("predicted", "before", "after", "")
    return DocumentTable("costs", columns, (*(rows if before.machine and after.machine else ()), mesh))


def _mesh(s: Summary) -> str:
    return " × ".join(f"{a.name} of {a.size}" for a in s.graph.axes) or "none"


def _factor(c: CostChange) -> str:
    if c.same:
        return "the same"
    if not (c.before and c.after):
        return ""
    return f"{100 * (c.after / c.before - 1):+.3g}%"


def _rules(diff: PlanComparison) -> DocumentTable:
    rows = [DocumentRow(mark, (f"{use.times} ×", use.rule, use.says, _lines_and_axes(use))) for mark, use in diff.rules]
    title = "rules, in the order in which they were applied"
    return DocumentTable(title, ("", "rule", "what it says", "where"), cut(rows, "rules"))


def _lines_and_axes(use: RuleUse) -> str:
    along = f"along {'·'.join(use.over)}" if use.over else ""
    return ", ".join(x for x in (*use.lines, along) if x)


def _regions(diff: PlanComparison) -> DocumentTable:
    """Return a heading for every line with its costs, and below it the line's rules and edits."""
    rows = []
    for region in diff.regions:
        costs = [_before_and_after(c) for c in (region.computing, region.communicating)]
        rows.append(DocumentRow(UNMARKED, (region.line or "(no line)", "", "", *costs), heading=True))
        rows += [DocumentRow(CHANGED, (f"{use.times} ×", "rule", f"{use.rule}:  {use.says}", "", "")) for use in region.rules]
        rows += [
            DocumentRow(e.mark, (f"{count} ×", e.kind, f"{'moved: ' if e.topic == 'move' else ''}{e.what}", "", ""))
            for e, count in region.edits
        ]
    return DocumentTable("what is different, by line", ("", "operator", "", "computing", "communicating"), cut(rows, "rows"))


def _before_and_after(c: CostChange) -> str:
    if not (c.before or c.after):
        return ""
    return _seconds(c.after) if c.same else f"{_seconds(c.before)} → {_seconds(c.after)}"


def _seconds(seconds: float) -> str:
    return duration(seconds) if seconds else "0"


def _collectives(diff: PlanComparison) -> DocumentTable:
    rows = []
    for c in diff.collectives:
        t, (before, after) = c.alike, c.counts
        mark = ADDED if not before else REMOVED if not after else CHANGED
        count = f"{after or before} ×" if not (before and after) or before == after else f"{before} → {after} ×"
        rows.append(DocumentRow(mark, (count, t.kind, t.over, size(t.nbytes), _before_and_after(c.seconds), t.why, t.line)))
    columns = ("", "collective", "over", "bytes", "time", "why", "line")
    return DocumentTable("collectives", columns, cut(rows, "collectives"))


def cut(rows: Sequence[DocumentRow], what: str, most: int = MAX_ROWS) -> tuple[DocumentRow, ...]:
    """Return the first rows, and if there are more, a last row that counts them: "… and 12 more `what`"."""
    if len(rows) <= most:
        return tuple(rows)
    rest = (f"… and {len(rows) - most} more {what}", *("" for _ in rows[0].cells[1:]))
    return (*rows[:most], DocumentRow(UNMARKED, rest))
