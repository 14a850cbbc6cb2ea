"""A timeline as a trace and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_models import MACHINE
from test_simulator_program import data_parallel, layers

from unity.base.errors import PlanError
from unity.search.simulator import Simulation, simulate


def simulated() -> Simulation:
    graph, captured, _ = data_parallel(layers(2))
    return simulate(graph, MACHINE, captured.differentiated)


def test_a_trace_has_every_task_in_its_place(tmp_path: Path) -> None:
    found, path = simulated(), tmp_path / "step.json"
    path.write_text("old")
    found.save_trace(path)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    tasks = found.timeline.graph.tasks
    timed = {n for n, t in tasks.items() if found.timeline.graph.devices[t.device].kind != "barrier"}
    assert {e["args"]["task"] for e in events} == timed
    for e in events:
        name = e["args"]["task"]
        assert e["ts"] == pytest.approx(found.timeline.start[name] * 1e6)
        assert e["ts"] + e["dur"] == pytest.approx(found.timeline.end[name] * 1e6)
        assert e["name"] == found.labels[name]
        assert e["args"]["ready"] <= e["ts"]
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(found.makespan * 1e6)
    assert any(e["name"].startswith("all-reduce") and e["args"]["bytes"] > 0 for e in events)
    assert [p.name for p in tmp_path.iterdir()] == ["step.json"]


def test_a_trace_that_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere.step\.json cannot be written: No such file"):
        simulated().save_trace(tmp_path / "nowhere" / "step.json")


def test_a_trace_counts_live_bytes(tmp_path: Path) -> None:
    found, path = simulated(), tmp_path / "step.json"
    found.save_trace(path)
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "C"]
    (memory,) = found.memory.values()
    assert [e["ts"] for e in events] == pytest.approx([t * 1e6 for t in memory.times])
    assert max(sum(e["args"].values()) for e in events) == pytest.approx(memory.peak)


def test_a_picture_has_a_row_for_each_device_that_works(tmp_path: Path) -> None:
    found = simulated()
    figure = found.plot(tmp_path / "step.png")
    axes, memory = figure.axes
    rows = [t.get_text() for t in axes.get_yticklabels()]
    assert rows == [name for name, seconds in found.busy.items() if seconds > 0]
    assert len(axes.collections) == len(rows)
    (held,) = found.memory.values()
    assert len(memory.collections) == len(held.by_reason)
    assert (tmp_path / "step.png").stat().st_size > 1000
