"""`unity optimize`: what it plans, saves and says, and how it refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import cli_models
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unity
from unity.base.formatting import size
from unity.cli import main
from unity.cli.arguments import budget, nbytes
from unity.cli.model import model_of

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_saved_plan_is_the_one_that_optimize_returns(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "plan.json"
    assert main(["optimize", "cli_models:small", "--machine", "a100-1x8", "-o", str(path)]) == 0
    said = capsys.readouterr()
    assert "a100-1x8: 8 x a100 (80 GiB, 156 TFLOP/s float32)" in said.out
    assert f"saved in {path}" in said.out
    assert said.err == ""
    fn, args, options = cli_models.small()
    wanted = unity.optimize(fn, *args, machine=unity.Machine.grid(1, 8, "a100"), progress=False, **options)
    found = unity.load(path, fn, *args)
    assert (found.time, found.memory, found.program.pcg.key) == (wanted.time, wanted.memory, wanted.program.pcg.key)


def test_json_has_the_plans_figures(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["optimize", "cli_models:small", "--machine", "a100-1x8", "--frontier", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["machine"], found["devices"], found["file"]) == ("loss", "a100-1x8", 8, None)
    times, memories = ([p[k] for p in found["frontier"]] for k in ("time", "memory"))
    assert times == sorted(times)
    assert memories == sorted(memories, reverse=True)
    assert found["time"] == times[0]


def test_a_mesh_can_be_requested(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "plan.json"
    words = ["optimize", "cli_models:small", "--machine", "a100-2x4"]
    assert main([*words, "--mesh", "data=2,tensor=4", "-o", str(path)]) == 0
    fn, args, _ = cli_models.small()
    assert unity.load(path, fn, *args).mesh_shape == {"data": 2, "tensor": 4}
    assert main([*words, "--mesh", "data=2,tensor=3"]) == 1
    assert "has 6 devices, and machine 'a100-2x4' has 8" in capsys.readouterr().err


def test_a_pipeline_can_be_requested(capsys: pytest.CaptureFixture) -> None:
    words = ["optimize", "cli_models:layered", "--machine", "v100-2x4"]
    assert main([*words, "--pipelines", "2x4"]) == 0
    assert "\n2 stages of 2 steps" in capsys.readouterr().out
    assert main([*words, "--pipelines", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pipeline"] is None
    assert main([*words, "--pipelines", "2x5"]) == 1
    assert "5 micro-batches are no multiple of 2 stages" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*words, "--pipelines", "2"])
    assert "such as 4x16" in capsys.readouterr().err


def test_a_schedule_and_branches_can_be_requested(capsys: pytest.CaptureFixture) -> None:
    words = ["optimize", "cli_models:layered", "--machine", "v100-2x4"]
    assert main([*words, "--pipelines", "2x4:gpipe"]) == 0
    assert "1F1B" not in capsys.readouterr().out
    assert main([*words, "--pipelines", "2x4:other"]) == 1
    assert "the schedule may be '1f1b' or 'gpipe'" in capsys.readouterr().err
    assert main([*words, "--branches", "2", "--pack"]) == 1
    assert "the program has no branches" in capsys.readouterr().err
    assert main([*words, "--branches", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["branches"] is None
    with pytest.raises(SystemExit):
        main([*words, "--branches", "many"])
    assert "a number of groups of devices" in capsys.readouterr().err


def test_the_command_line_overrides_the_models_options(capsys: pytest.CaptureFixture) -> None:
    def asked(*words: str) -> dict[str, Any]:
        assert main(["optimize", "cli_models:with_options", "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    plain = asked()
    assert plain["machine"] == "v100-1x4"
    assert asked("--machine", "dgx-a100")["devices"] == 8
    assert plain["memory"] < asked("--slots", "1.5")["memory"] < asked("--slots", "4")["memory"]
    with pytest.raises(SystemExit):
        asked("--slots", "-1")
    assert "such as 2 or 2.5, got -1" in capsys.readouterr().err
    assert asked("--forward")["time"] < plain["time"]
    assert asked("--objective", "memory")["memory"] <= plain["memory"]


@pytest.mark.parametrize("words", [("--forward",), ("--argnums", "1")])
def test_plans_by_other_options_than_the_models_are_read_with_it(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = str(tmp_path / "plan.json")
    assert main(["optimize", "cli_models:with_argnums", "--machine", "a100-1x8", "-o", path, *words]) == 0
    assert main(["explain", path, "cli_models:with_argnums", "--json"]) == 0, capsys.readouterr().err


def test_a_plan_that_does_not_fit_gives_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "plan.json"
    assert main(["optimize", "cli_models:small", "--machine", "a100-1x8", "--memory", "1kB", "-o", str(path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "infeasible" in said.err
    assert "the limit is 1 kB" in said.err
    assert not path.exists()


def test_an_output_that_cannot_be_written_is_refused_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unity.cli.commands.optimize.optimize", lambda *args, **options: pytest.fail("it was planned"))
    assert main(["optimize", "cli_models:small", "-o", str(tmp_path / "none" / "plan.json")]) == 1
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("which", "parts"),
    [
        ("cli_models:nothing", ["no attribute 'nothing'", "expected MODULE:FUNCTION"]),
        ("cli_models", ["expected MODULE:FUNCTION"]),
        ("cli_models:unknown_option", ["the option speed, which unity.optimize has not"]),
        ("cli_models:fails", ["cli_models:fails() raises KeyError: 'no data' (cli_models.py:", "in fails)"]),
        (
            "cli_models:does_not_fit",
            ["cli_models:does_not_fit: TypeError: dot_general", "This came from broken (", "while unity traced it"],
        ),
        ("cli_models:looks_at_values", ["looks at a value", "(docs: capture#values)"]),
        ("cli_broken:model", ["importing cli_broken raises ZeroDivisionError", "(cli_broken.py:2 in <module>)"]),
    ],
)
def test_an_error_of_the_model_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, which: str, parts: list[str]
) -> None:
    (tmp_path / "cli_broken.py").write_text("a = 1\nb = a / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["optimize", which, "--machine", "a100-1x8"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("unity: ")
    assert "Traceback" not in said.err
    for part in parts:
        assert part in said.err


def test_a_model_may_have_options_of_former_forms() -> None:
    with (
        pytest.warns(DeprecationWarning, match=r"budget=2\.0 is seconds=2\.0 now"),
        pytest.warns(DeprecationWarning, match=r"shardings='keep' is constraints=\(unity\.keep_shardings\(\),\) now"),
    ):
        options = model_of("cli_models:former_option").options
    assert options == {"seconds": 2.0, "constraints": (unity.keep_shardings(),)}


def test_contradicting_options_are_refused(capsys: pytest.CaptureFixture) -> None:
    assert main(["optimize", "cli_models:small", "--machine", "a100-1x8", "--measure"]) == 1
    assert "leave machine= out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--machine", "cray-1"], "no machine is named cray-1"),
        (["--machine", "dgx-h100-2x4"], "its nodes have 8 devices, not 4"),
        (["--machine", "none.json"], "No such file"),
        (["--mesh", "data=2,tensor"], "such as data=4,tensor=8, got data=2,tensor"),
        (["--mesh", "data=2,data=4"], "expected different names of axes"),
        (["--memory", "much"], "expected bytes"),
        (["--memory", "-3GB"], "expected"),
        (["--budget", "soon"], "expected a number of programs"),
        (["--search", "magic"], "invalid choice: 'magic'"),
        (["--argnums", "a"], "expected numbers of arguments"),
        (["--devices", "0"], "expected a whole number above zero, got 0"),
    ],
)
def test_malformed_command_lines_are_refused(capsys: pytest.CaptureFixture, words: list[str], named: str) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["optimize", "cli_models:small", *words])
    assert exit_.value.code == 2
    assert named in capsys.readouterr().err


@given(st.integers(1, 999), st.sampled_from(["B", "kB", "MB", "GB", ""]))
def test_sizes_are_parsed_with_their_units(number: int, unit: str) -> None:
    found = nbytes(f"{number}{unit}")
    assert nbytes(f"{number} {unit.lower()}") == found
    assert size(found).split()[0] == str(number)
    if unit.endswith("B") and len(unit) == 2:
        power = "kMG".index(unit[0]) + 1
        assert nbytes(f"{number}{unit[0]}iB") == number * 1024**power


@given(st.integers(0, 10**6))
def test_budgets_are_programs_or_seconds(number: int) -> None:
    assert budget(str(number)) == number
    assert isinstance(budget(str(number)), int)
    assert budget(f"{number}s") == float(number)
    assert isinstance(budget(f"{number}s"), float)
    with pytest.raises(argparse.ArgumentTypeError):
        budget(f"-{number}")
