"""`unity diff` and `unity show`: on plans and graphs in files, without their functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cli_models
import pytest

import unity
from unity.cli import main
from unity.pcg.ir.compact_json import fold
from unity.pcg.ir.graph_json import to_json
from unity.plan.files.plan_file import SCHEMA, sealed

EIGHT = unity.Machine.grid(1, 8, "a100")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two plans and their graphs, saved."""
    place = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        plan = unity.optimize(cli_models.loss, *cli_models.arguments(), machine=EIGHT, progress=False)
        lean = plan.frontier[-1]
        plan.files.save(place / "fast.json")
        lean.files.save(place / "lean.json")
    (place / "graph.json").write_text(json.dumps(to_json(plan.program.pcg)))
    (place / "folded.json").write_text(json.dumps(fold(lean.program.pcg)))
    return place


def run(*words: Any) -> int:
    return main([str(w) for w in words])


def test_the_exit_status_is_that_of_diff(folder: Path, capsys: pytest.CaptureFixture) -> None:
    fast, lean = folder / "fast.json", folder / "lean.json"
    assert run("diff", fast, lean) == 1
    shown = capsys.readouterr().out
    assert "memory on each device" in shown
    assert "cli_models.py" in shown
    assert "\x1b" not in shown
    assert run("diff", fast, fast) == 0
    assert "fast.json: loss on a100-1x8: no difference" in capsys.readouterr().out
    assert run("diff", fast) == 1
    assert "one device of" in capsys.readouterr().out
    assert run("diff", fast, lean, "--quiet") == 1
    assert run("diff", fast, fast, "-q") == 0
    assert capsys.readouterr().out == ""


def test_graphs_are_compared(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("diff", folder / "graph.json", folder / "fast.json", "--json") == 1  # the same graph, without costs
    data = json.loads(capsys.readouterr().out)
    assert data["regions"] == [r for r in data["regions"] if not r["edits"]]
    assert (data["graph"]["removed"], data["graph"]["added"], data["graph"]["changed"]) == ([], [], [])
    assert run("diff", folder / "graph.json", folder / "graph.json") == 0
    assert run("diff", folder / "graph.json", folder / "folded.json") == 1
    assert run("diff", folder / "graph.json") == 2


STARTS = {"text": "fast.json: loss on", "markdown": "# ", "json": "{", "dot": "digraph", "html": "<!DOCTYPE html>"}


@pytest.mark.parametrize(("form", "start"), STARTS.items())
def test_every_format_is_printed_and_written(
    folder: Path, capsys: pytest.CaptureFixture, tmp_path: Path, form: str, start: str
) -> None:
    both = folder / "fast.json", folder / "lean.json"
    assert run("diff", *both, "--format", form) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(start)
    assert run("diff", *both, "--format", form, "-o", tmp_path / "out", "--quiet") == 1
    assert capsys.readouterr().out == ""
    assert (tmp_path / "out").read_text().split() == printed.split()
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_file_that_cannot_be_written_is_an_error(folder: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert run("diff", folder / "fast.json", "-o", tmp_path / "none" / "out.html") == 2
    assert "cannot be written: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no JSON"),
        (b"\xff\xfe\x00", "is no JSON"),
        ("[]", "neither a plan nor a graph"),
        ('{"unity": "machine"}', "neither a plan nor a graph"),
        (json.dumps(unity.Machine.grid(1, 8, "a100").to_json()), "is a machine, neither a plan nor a graph"),
        ('{"unity": "graph diff"}', "is a difference of two graphs, neither a plan nor a graph"),
        ('{"unity": "plan", "schema": 0}', f"plan schema 0, this version of unity reads {SCHEMA}: plan again"),
        (json.dumps(sealed({"unity": "plan", "schema": SCHEMA})), "damaged at $."),
        ('{"unity": "graph", "schema": 99}', "schema 99"),
        ('{"unity": "folded graph"}', "damaged"),
    ],
)
def test_other_files_are_refused(folder: Path, capsys: pytest.CaptureFixture, tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run("diff", folder / "fast.json", path) == 2
    assert run("show", path) == 1
    for line in capsys.readouterr().err.strip().split("\n"):
        assert message in line
        assert "other.json" in line


def test_show_prints_the_graph(folder: Path, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert run("show", folder / "fast.json") == 0
    shown = capsys.readouterr().out
    assert "predicted" in shown
    assert "dot_general(" in shown
    assert "return %" in shown
    assert run("show", folder / "fast.json", "--captured") == 0
    assert "one device of" in capsys.readouterr().out
    assert run("show", folder / "graph.json", "--format", "dot") == 0
    assert capsys.readouterr().out.startswith("digraph")
    assert run("show", folder / "fast.json", "--json", "-o", tmp_path / "plan.json") == 0
    assert json.loads((tmp_path / "plan.json").read_text())["name"] == "loss"


def test_the_command_runs_in_a_separate_process(folder: Path) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "unity", "diff", "fast.json", "lean.json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "what is different, by line" in done.stdout
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
