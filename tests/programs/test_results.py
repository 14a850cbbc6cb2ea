"""A benchmark that records some cases leaves the results of others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import recomputation, record


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, measured: int, *cases: str) -> None:
    """Run the benchmark of recomputed layers, with a figure in place of a search."""

    def case(name: str) -> Any:
        return SimpleNamespace(rows=lambda name: [{"model": name, "s": measured}] * 2)

    monkeypatch.setattr(recomputation, "case_of", case)
    monkeypatch.setattr(recomputation, "show", lambda title, rows: None)
    monkeypatch.setattr(sys, "argv", ["recomputation", *cases])
    recomputation.main()


def test_named_cases_are_recorded_beside_the_others_in_order(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *others = recomputation.MODELS
    run(monkeypatch, 1, second)
    run(monkeypatch, 2, first)
    run(monkeypatch, 3, second)
    content = json.loads((in_folder / "recomputation.json").read_text())
    assert [(row["model"], row["s"]) for row in content["rows"]] == [(first, 2), (first, 2), (second, 3), (second, 3)]
    assert content["missing"] == others


def test_without_names_all_cases_are_recorded_anew(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, 1, *list(recomputation.MODELS)[:1])
    run(monkeypatch, 2)
    content = json.loads((in_folder / "recomputation.json").read_text())
    assert [row["s"] for row in content["rows"]] == [2, 2] * len(recomputation.MODELS)
    assert content["missing"] == []
