"""`unity check`: a plan against its compiled program, and what is no answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cli_models
import jax
import pytest

import unity
from unity.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("check")
    for name, nodes in (("plan", 1), ("large", 2)):
        cli_models.saved(place, unity.Machine.grid(nodes, 8, "a100"), name)
    return place


def test_a_plan_agrees_with_its_program(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["check", str(folder / "plan.json"), "cli_models:small", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agrees"]
    total = found["collectives"][-1]
    assert total["kind"] == "all"
    assert total["predicted"] == total["compiled"] > 0
    assert main(["check", str(folder / "plan.json"), "cli_models:small", "--forward"]) == 0
    said = capsys.readouterr().out
    assert "has the plan's collectives" in said
    assert "derivation replays: 0 applications" in said


def test_other_collectives_give_exit_status_1(folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from unity.exec.compiled import check

    predicted = check.predicted_elements

    def wrong(*args: Any) -> Mapping[str, int]:
        return {kind: 2 * elements for kind, elements in predicted(*args).items()}

    monkeypatch.setattr(check, "predicted_elements", wrong)
    assert main(["check", str(folder / "plan.json"), "cli_models:small"]) == 1
    assert "collectives are others" in capsys.readouterr().out
    assert main(["check", str(folder / "plan.json"), "cli_models:small", "--tolerance", "2"]) == 0


def test_xlas_partitioner_deviates_at_lines(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fn, args, _ = cli_models.small()
    machine = unity.Machine.grid(1, 8, "a100")
    unity.optimize(fn, *args, machine=machine, search="fsdp", progress=False).files.save(tmp_path / "plan.json")
    command = ["check", str(tmp_path / "plan.json"), "cli_models:small"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["deviations"] == []
    assert main([*command, "--partitioned", "--json"]) == 1  # on CPUs it sums what the plan scatters
    deviations = json.loads(capsys.readouterr().out)["deviations"]
    code = fn.__code__
    line = f"{Path(code.co_filename).name}:{code.co_firstlineno + 1}"  # of both products
    elements = sum(w.size for w in args[0].values())
    found = {d["kind"]: (d["line"], d["predicted"], d["compiled"]) for d in deviations}
    assert found == {"reduce-scatter": (line, elements, 0), "all-reduce": (line, 1, elements + 1)}
    assert main([*command, "--partitioned"]) == 1
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "model", "named"),
    [
        ("none.json", "cli_models:small", "cannot be read"),
        ("plan.json", "cli_models:other", "was made for other arguments"),
        ("plan.json", "cli_models:nothing", "expected MODULE:FUNCTION"),
        ("large.json", "cli_models:small", "(docs: plan#devices)"),
        ("plan.json", "cli_models:HIDDEN", "cli_models:HIDDEN is an int; expected MODULE:FUNCTION"),
    ],
)
def test_errors_give_exit_status_2(folder: Path, capsys: pytest.CaptureFixture, name: str, model: str, named: str) -> None:
    assert main(["check", str(folder / name), model]) == 2
    assert named in capsys.readouterr().err


def test_devices_are_those_that_jax_has_started_with(folder: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["check", str(folder / "plan.json"), "cli_models:small", "--forward", "--devices"]
    assert jax.device_count() == 8
    assert main([*command, "8"]) == 0
    capsys.readouterr()
    assert main([*command, "4"]) == 2
    assert capsys.readouterr().err.startswith(
        "unity: --devices 4: JAX has already started, with 8 devices; run the command in a new"
    )
