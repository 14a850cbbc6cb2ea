"""The timeline of a simulated step as data: the tasks of every device and link. If all devices do the same, one stands for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict

from unity.base.documents import plain
from unity.base.formatting import duration
from unity.plan.files.document import TimelineRow, TimelineTable
from unity.report.picture import Interned
from unity.search.simulator import Simulation

MAX_ROWS, MAX_BARS = 64, 20_000  # the busiest rows and the longest bars are shown
RESOURCE_KINDS = ("compute", "link")


def timeline_of(simulation: Simulation) -> TimelineTable:
    """Return the bars of each row as (start, length, number of a label), in units of 1e-5 of the step."""
    timeline, labels = simulation.timeline, Interned()
    unit = timeline.makespan / 1e5 or 1.0
    used = [k for k, r in enumerate(timeline.graph.devices) if r.kind in RESOURCE_KINDS and timeline.busy[k] > 0]
    shown = sorted(sorted(used, key=lambda k: -timeline.busy[k])[:MAX_ROWS])
    bars = [(timeline.graph.tasks[name].seconds, k, name) for k in shown for name in timeline.order[k]]
    longest = sorted(bars, reverse=True)[:MAX_BARS]
    rows: dict[int, list[tuple[float, float, int]]] = {k: [] for k in shown}
    for seconds, k, name in sorted(longest, key=lambda bar: timeline.start[bar[2]]):
        label = labels.of(simulation.labels.get(name, ""))
        rows[k].append((round(timeline.start[name] / unit, 1), round(seconds / unit, 1), label))
    return TimelineTable(
        whole=duration(timeline.makespan),
        seconds=timeline.makespan,
        rows=tuple(_row(simulation, k, bars) for k, bars in rows.items()),
        left=(len(used) - len(shown), len(bars) - len(longest)),
        labels=tuple(labels.data()),
    )


def on_page(timeline: TimelineTable, interned: Interned) -> dict[str, Any]:
    """Return a timeline as data, with its labels replaced by their numbers on a page."""
    number = [interned.of(label) for label in timeline.labels]
    rows = [{**asdict(row), "bars": [[start, length, number[k]] for start, length, k in row.bars]} for row in timeline.rows]
    return {**{k: v for k, v in plain(timeline).items() if k != "labels"}, "rows": rows}


def _row(simulation: Simulation, k: int, bars: Sequence[tuple[float, float, int]]) -> TimelineRow:
    resource, busy = simulation.timeline.graph.devices[k], simulation.timeline.busy[k]
    part = busy / simulation.makespan if simulation.makespan else 0.0
    return TimelineRow(_row_name(resource.name, resource.kind), resource.kind, f"{part:.0%}", tuple(bars))


def _row_name(name: str, kind: str) -> str:
    """Return a row's name; without the device, if one device stands for all."""
    device, _, link = name.rpartition(", ")
    if not (device or name).startswith("each of "):
        return name
    return "computing" if kind == "compute" else link
