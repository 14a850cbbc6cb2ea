"""What other benchmarks kept of the published searches, for the same page: how long they search, and what they miss of the optimum.

Those run one after the other on idle cores, as seconds and proofs of an optimum want it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.seeds.results import Table

SPEED, OPTIMAL = "published_speed", "optimal"


def beside(folder: Path) -> list[Table]:
    """The tables of whatever was kept in a folder of results."""
    every = ((SPEED, speed), (OPTIMAL, optimal), (OPTIMAL, against))
    return [make(found) for name, make in every if (found := _kept(folder / f"{name}.json"))]


def _kept(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def speed(kept: dict[str, Any]) -> Table:
    """OptCNN's table 3 and FlexFlow's table 5: CPU seconds of a search."""
    rows = [
        (
            *(row["algorithm"], row["model"], str(row["devices"]), f"{row['published']:g}", f"{row['search']:.3g}"),
            *("" if row.get("whole", True) else "at the pace of the first seconds", "yes" if row["met"] else "no"),
        )
        for row in kept["rows"]
    ]
    targets, date = kept["targets"], kept["date"]
    notes = (
        f"`python -m benchmarks.{SPEED}`, {date}. The target is {targets['optcnn']:g} times the published seconds for OptCNN, "
        f"whose algorithm alone is counted, as in the paper, and {targets['flexflow']:g} for FlexFlow, of which every "
        f"{kept['configured']} has {kept['proposals_per_operator']} proposals; how many the paper's searches made is not "
        f"published. A chain is looked at for {kept['seconds_at_most']:g} s at most.",
    )
    slow = [row for row in kept["rows"] if not row["met"] and "each_ms" in row]
    if slow:
        least, longest = (pick(row["each_ms"] for row in slow) for pick in (min, max))
        which = ", ".join(f"{row['model']} on {row['devices']}" for row in slow)
        notes += (
            f"Longer than published: {which}. A proposal takes {least:.3g} to {longest:.3g} ms there, in Python on one core; how "
            "long one takes in the paper, and how many its rule made before it stopped, is not published.",
        )
    columns = ("algorithm", "model", "GPUs", "paper s", "here, CPU s", "of which", "target met")
    return Table("OptCNN, table 3, and FlexFlow, table 5: seconds of the search", columns, tuple(rows), notes)


def optimal(kept: dict[str, Any]) -> Table:
    """FlexFlow's section 8.3: small executions against their optimum."""
    rows = [(*_what(row), *_found(row, "flexflow"), *_found(row, "optcnn")) for row in kept["rows"]]
    notes = (
        f"`python -m benchmarks.{OPTIMAL}`, {kept['date']}. In the simulator: LeNet operator by operator, RNNLM by depth-first "
        f"search with A* pruning, of at most {kept['most_nodes']} nodes; any: any degrees on any devices, mesh: what a mesh can "
        "express. By costs: the exact search.",
        "Not proved, for RNNLM: the bound is little more than all work, shared evenly by all GPUs at all times. The optimum is "
        "between the two figures.",
        "In the paper FlexFlow finds the optimum of LeNet and of RNNLM with two steps on 4 GPUs. Here it goes by the simulator, so "
        "by our costs it need not; and at which β its chains ran, and with how many proposals, is not published.",
    )
    columns = (
        *("model", "GPUs", "space", "operators", "optimum, ms", "proved"),
        *("FlexFlow ms", "FlexFlow / optimum", "OptCNN ms", "OptCNN / optimum"),
    )
    return Table("FlexFlow, section 8.3: against the optimum", columns, tuple(rows), notes)


def against(kept: dict[str, Any]) -> Table:
    """Every algorithm against the optimum by costs."""
    rows = [row for row in kept["rows"] if row["space"] == "costs"]
    names = dict.fromkeys(key.removesuffix("_ms") for row in rows for key in row if key.endswith("_ms") and key != "optimal_ms")
    cells = [(name, *(cell for row in rows for cell in _found(row, name))) for name in names]
    columns = ("algorithm", *(cell for row in rows for cell in (f"{row['model']} ms", f"{row['model']} / optimum")))
    optimum = ("the optimum", *(cell for row in rows for cell in (f"{row['optimal_ms']:.4g}", "1")))
    devices = ", ".join(sorted({str(row["devices"]) for row in rows}))
    refused = [f"{row['model']}, {key.removeprefix('no ')}: {row[key]}" for row in rows for key in row if key.startswith("no ")]
    note = "By this project's costs, of all its strategies, by exact search: what `unity.optimize` gives without rewriting."
    title = f"Every algorithm against the optimum by costs, on {devices} P100"
    return Table(title, columns, (optimum, *cells), (note, *refused))


def _what(row: dict[str, Any]) -> tuple[str, ...]:
    proved = "yes" if row["whole"] else "between these" if "best_ms" in row else "of the values listed"
    optimum = " to ".join(f"{ms:.4g}" for ms in _optimum(row))
    return row["model"], str(row["devices"]), row["space"], str(row["operators"]), optimum, proved


def _optimum(row: dict[str, Any]) -> tuple[float, ...]:
    """Milliseconds; or a lower bound, and the best that is known."""
    return (row["optimal_ms"],) if row["whole"] or "best_ms" not in row else (row["optimal_ms"], row["best_ms"])


def _found(row: dict[str, Any], which: str) -> tuple[str, str]:
    found = row.get(f"{which}_ms")
    if found is None:
        return "", ""
    return f"{found:.4g}", " to ".join(f"{found / ms:.4g}" for ms in reversed(_optimum(row)))
