"""`unity simulate`: figures, trace and picture of a saved plan's step."""

from __future__ import annotations

import json
from pathlib import Path

import cli_models
import pytest

import unity
from unity.base.formatting import size
from unity.cli import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, unity.Plan]:
    return cli_models.saved(tmp_path_factory.mktemp("simulate"), unity.Machine.grid(2, 4, "a100"))


def test_the_output_agrees_with_the_simulation(
    saved: tuple[Path, unity.Plan], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path, plan = saved
    trace, picture = tmp_path / "step.json", tmp_path / "step.png"
    command = ["simulate", str(path), "cli_models:small"]
    assert main([*command, "--json", "--trace", str(trace), "--plot", str(picture)]) == 0
    found, simulated = json.loads(capsys.readouterr().out), plan.inspect.simulate()
    assert found["makespan"] == simulated.makespan
    assert (found["busy"], found["sent"]) == (dict(simulated.busy), dict(simulated.sent))
    memory = found["memory"]
    (device,) = simulated.memory
    assert (memory["device"], memory["peak"], memory["seconds"]) == (device, simulated.peak, simulated.memory[device].moment)
    assert sum(row["bytes"] for row in memory["held"]) == pytest.approx(simulated.peak)
    assert {row["why"] for row in memory["held"]} >= {"arguments", "optimizer slots"}
    lasts = [e["ts"] + e["dur"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert max(lasts) == pytest.approx(simulated.makespan * 1e6)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "8 x a100 (80 GiB, 156 TFLOP/s float32)" in said
    assert "simulated" in said
    for name in simulated.busy:
        assert name in said
    assert f"peak memory: {size(simulated.peak)} on {device}" in said
    assert "optimizer slots" in said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["cli_models:other"], "was made for other arguments"),
        (["cli_models:small", "--plot", "step.xyz"], "Format 'xyz' is not supported"),
        (["cli_models:small", "--trace", "none/step.json"], "none/step.json"),
    ],
)
def test_errors_are_one_message(
    saved: tuple[Path, unity.Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture,
    words: list[str], named: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", str(saved[0]), *words]) == 1
    assert named in capsys.readouterr().err
