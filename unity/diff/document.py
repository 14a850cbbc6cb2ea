"""A difference as headings and tables of text, whatever it is shown in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unity.base.formatting import duration, size
from unity.diff.compare import PlanDiff, costs
from unity.diff.edits import ADDED, CHANGED, REMOVED
from unity.diff.regions import Cost
from unity.plan.summary import RuleUse, Summary

ROWS = 400  # of a table, before the rest is counted only
SAME = " "


@dataclass(frozen=True)
class Row:
    """Cells, and a mark: what is added, removed, changed, or neither."""

    mark: str
    cells: tuple[str, ...]
    heading: bool = False


@dataclass(frozen=True)
class Table:
    """A heading, the columns, the rows."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Document:
    """A title and tables; none of them where nothing is different."""

    title: str
    tables: tuple[Table, ...]


def document(found: PlanDiff) -> Document:
    """A difference in words."""
    title = f"{_named(found.before)}  →  {_named(found.after)}"
    if not found:
        return Document(f"{title}: no difference", ())
    tables = (_costs(found), _rules(found), _regions(found), _collectives(found))
    return Document(title, tuple(t for t in tables if t.rows))


def _named(s: Summary) -> str:
    return f"{s.name} on {s.machine}" if s.machine else s.name


def _costs(found: PlanDiff) -> Table:
    """Graphs alone have no costs, and are on meshes all the same."""
    one, other = found.before, found.after
    rows = [Row(SAME, (what, _seconds(c.before), _seconds(c.after), _factor(c))) for what, c in costs(found).items()]
    memory = Cost(one.memory, other.memory)
    rows.append(Row(SAME, ("memory on each device", size(memory.before), size(memory.after), _factor(memory))))
    rows.append(Row(SAME, ("devices", str(one.devices), str(other.devices), "")))
    mesh = Row(SAME, ("mesh", _mesh(one), _mesh(other), ""))
    return Table("costs", ("predicted", "before", "after", ""), (*(rows if one.machine and other.machine else ()), mesh))


def _mesh(s: Summary) -> str:
    return " × ".join(f"{a.name} of {a.size}" for a in s.graph.axes) or "none"


def _factor(c: Cost) -> str:
    if c.same:
        return "the same"
    if not (c.before and c.after):
        return ""
    return f"{c.before / c.after:.3g} times less" if c.after < c.before else f"{c.after / c.before:.3g} times more"


def _rules(found: PlanDiff) -> Table:
    rows = [Row(mark, (f"{use.times} ×", use.rule, use.says, _where(use))) for mark, use in found.rules]
    return Table("rules, in the order in which they were applied", ("", "rule", "what it says", "where"), _cut(rows, "rules"))


def _where(use: RuleUse) -> str:
    along = f"along {'·'.join(use.over)}" if use.over else ""
    return ", ".join(x for x in (*use.lines, along) if x)


def _regions(found: PlanDiff) -> Table:
    """A row for every line of the user's, with its costs; below it what is otherwise there."""
    rows = []
    for region in found.regions:
        times = [_pair(c) for c in (region.computing, region.communicating)]
        rows.append(Row(SAME, (region.line or "(no line)", "", "", *times), heading=True))
        rows += [Row(CHANGED, (f"{use.times} ×", "rule", f"{use.rule}:  {use.says}", "", "")) for use in region.rules]
        rows += [Row(e.mark, (f"{often} ×", e.kind, f"{_topic(e.topic)}{e.what}", "", "")) for e, often in region.edits]
    return Table("what is different, by line", ("", "operator", "", "computing", "communicating"), _cut(rows, "rows"))


def _topic(topic: str) -> str:
    return "moved: " if topic == "move" else ""


def _pair(c: Cost) -> str:
    if not (c.before or c.after):
        return ""
    return _seconds(c.after) if c.same else f"{_seconds(c.before)} → {_seconds(c.after)}"


def _seconds(seconds: float) -> str:
    return duration(seconds) if seconds else "0"


def _collectives(found: PlanDiff) -> Table:
    rows = []
    for c in found.collectives:
        t, (before, after) = c.alike, c.counts
        mark = ADDED if not before else REMOVED if not after else CHANGED
        often = f"{after or before} ×" if not (before and after) or before == after else f"{before} → {after} ×"
        rows.append(Row(mark, (often, t.kind, t.over, size(t.nbytes), _pair(c.seconds), t.why, t.line)))
    columns = ("", "collective", "over", "bytes", "time", "why", "line")
    return Table("collectives", columns, _cut(rows, "collectives"))


def _cut(rows: Sequence[Row], what: str) -> tuple[Row, ...]:
    return tuple(_first(rows, what))


def _first(rows: Sequence[Row], what: str) -> Iterator[Row]:
    yield from rows[:ROWS]
    if len(rows) > ROWS:
        width = len(rows[0].cells)
        yield Row(SAME, (f"… and {len(rows) - ROWS} more {what}", *("" for _ in range(width - 1))))
