"""A simulated step as data: what every device and link does when. Where all devices are alike, one stands for all."""

from __future__ import annotations

from typing import Any

from unity.base.formatting import duration
from unity.report.picture import Shared
from unity.search.simulator import Simulation

ROWS, BARS = 64, 20_000  # of the picture: the busiest rows, the longest bars
KINDS = ("compute", "link")


def timeline_of(simulation: Simulation) -> dict[str, Any]:
    """Bars of each row as (start, length, number of a label), in units of a hundred-thousandth of the whole."""
    found, labels = simulation.timeline, Shared()
    unit = found.makespan / 1e5 or 1.0
    used = [k for k, r in enumerate(found.graph.devices) if r.kind in KINDS and found.busy[k] > 0]
    shown = sorted(sorted(used, key=lambda k: -found.busy[k])[:ROWS])
    bars = [(found.graph.tasks[name].seconds, k, name) for k in shown for name in found.order[k]]
    kept = sorted(bars, reverse=True)[:BARS]
    rows: dict[int, list[list[float]]] = {k: [] for k in shown}
    for seconds, k, name in sorted(kept, key=lambda bar: found.start[bar[2]]):
        label = labels.of(simulation.labels.get(name, ""))
        rows[k].append([round(found.start[name] / unit, 1), round(seconds / unit, 1), label])
    return {
        "whole": duration(found.makespan),
        "seconds": found.makespan,
        "rows": [_row(simulation, k, bars) for k, bars in rows.items()],
        "left": [len(used) - len(shown), len(bars) - len(kept)],
        "labels": labels.data(),
    }


def on_page(timeline: dict[str, Any], shared: Shared) -> dict[str, Any]:
    """A timeline with the numbers that its labels have on a page."""
    number = [shared.of(label) for label in timeline["labels"]]
    rows = [{**row, "bars": [[start, length, number[k]] for start, length, k in row["bars"]]} for row in timeline["rows"]]
    return {**{k: v for k, v in timeline.items() if k != "labels"}, "rows": rows}


def _row(simulation: Simulation, k: int, bars: list[list[float]]) -> dict[str, Any]:
    resource, busy = simulation.timeline.graph.devices[k], simulation.timeline.busy[k]
    part = busy / simulation.makespan if simulation.makespan else 0.0
    return {"name": _said(resource.name, resource.kind), "kind": resource.kind, "busy": f"{part:.0%}", "bars": bars}


def _said(name: str, kind: str) -> str:
    """What a row is called; where one device stands for all, by what it does alone."""
    device, _, link = name.rpartition(", ")
    if not (device or name).startswith("each of "):
        return name
    return "computing" if kind == "compute" else link
