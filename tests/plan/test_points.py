"""What plans' files and reports have of a frontier: all of it, if it was searched for, else some points of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from layered_model import EIGHT, arguments, loss

import unity
from unity.report import content, of_file, of_plan

LAYERS = 3


def planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> unity.Plan:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return unity.optimize(loss, *arguments(LAYERS), machine=EIGHT, search="captured", progress=False)


def searched(plan: unity.Plan) -> bool:
    return "frontier" in vars(plan.program.family) or "frontier" in vars(plan.program.family.search)


def saved(plan: unity.Plan, path: Path) -> dict[str, Any]:
    plan.files.save(path)
    return json.loads(path.read_text())


def test_some_points_are_saved_and_shown_without_searching_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, monkeypatch)
    data = saved(plan, tmp_path / "plan.json")
    live, filed = (content(source)["frontier"] for source in (of_plan(plan), of_file(tmp_path / "plan.json")))
    assert not searched(plan)
    assert not data["whole"]
    assert [p["says"] for p in live["points"]] == [p["says"] for p in filed["points"]]
    assert not live["whole"]
    assert [p["chosen"] for p in live["points"]].count(True) == 1
    assert len(live["points"]) > 2
    again = unity.load(tmp_path / "plan.json", loss, *arguments(LAYERS))
    assert [p.time for p in again.frontier] == [p.time for p in plan.frontier]
    for point in live["points"]:  # the whole frontier is as good, or better
        assert any(p.time <= point["time"] * (1 + 1e-9) and p.memory <= point["memory"] * (1 + 1e-9) for p in plan.frontier)


def test_what_was_searched_for_is_saved_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, monkeypatch)
    wanted = [p.time for p in plan.frontier]
    data = saved(plan, tmp_path / "plan.json")
    assert data["whole"]
    again = unity.load(tmp_path / "plan.json", loss, *arguments(LAYERS))
    assert [p.time for p in again.frontier] == wanted
    assert not searched(again) or "frontier" not in vars(again.program.family.search)
    assert content(of_plan(again))["frontier"]["whole"]
