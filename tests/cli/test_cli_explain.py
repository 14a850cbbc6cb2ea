"""`unity explain`: what a saved plan decided, with its model and without."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path

import cli_models
import pytest

import unity
from unity.base.formatting import duration
from unity.cli import main
from unity.pcg.ir.graph_json import to_json


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, unity.Plan]:
    return cli_models.saved(tmp_path_factory.mktemp("explain"), unity.Machine.grid(1, 8, "a100"))


def test_explaining_without_the_model(saved: tuple[Path, unity.Plan], capsys: pytest.CaptureFixture) -> None:
    path, plan = saved
    assert main(["explain", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"loss on a100-1x8, 8 devices: {duration(plan.time)} a step" in said
    for part in (
        "where arguments are stored",
        "args[0]['a']",
        "what computes",
        "dot_general",
        "cli_models.py:",
        "what communicates",
    ):
        assert part in said
    assert "\x1b" not in said


def test_json_has_the_decisions_and_costs(saved: tuple[Path, unity.Plan], capsys: pytest.CaptureFixture) -> None:
    path, plan = saved
    assert main(["explain", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["time"], found["memory"]) == (plan.time, plan.memory)
    shardings = plan.in_shardings
    stored = {row["name"]: row["nbytes"] for row in found["arguments"]}
    weights = {k: s.shard_shape(cli_models.arguments()[0][k].shape) for k, s in shardings[0].items()}
    for name, shape in weights.items():
        assert stored[f"args[0]['{name}']"] == 4 * shape[0] * shape[1]
    operators = Counter(n.kind for n, _ in plan.program.pcg.walk())
    for row in found["work"]:
        assert row["count"] <= operators[row["kind"]]


def test_a_file_tells_what_is_not_divided_by_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    machine, path = unity.Machine.grid(1, 8, "a100"), tmp_path / "odd.json"
    options = {"machine": machine, "search": "captured", "progress": False}
    unity.optimize(cli_models.loss, *cli_models.arguments(1023), **options).files.save(path)
    assert main(["explain", str(path)]) == 0
    assert "args[0]['a']: no axis divides dimension 1 of size 1023" in capsys.readouterr().out
    assert main(["explain", str(path), "--json"]) == 0
    row, _ = (w for w in json.loads(capsys.readouterr().out)["warnings"] if w["topic"] == "dimension")  # of a and of b
    assert row["line"].startswith("cli_models.py:")
    assert row["line"].endswith(" (loss)")


def test_explaining_with_the_model_says_more(saved: tuple[Path, unity.Plan], capsys: pytest.CaptureFixture) -> None:
    path, plan = saved
    assert main(["explain", str(path), "cli_models:small"]) == 0
    assert "memory at its peak" in capsys.readouterr().out
    assert main(["explain", str(path), "cli_models:small", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(row["nbytes"] for row in found["held"]) == pytest.approx(plan.memory)
    assert found["time"] == plan.time
    assert main(["explain", str(path), "cli_models:other"]) == 1
    assert "was made for other arguments" in capsys.readouterr().err


def test_one_argument_operator_or_line_is_explained(saved: tuple[Path, unity.Plan], capsys: pytest.CaptureFixture) -> None:
    path, plan = saved
    said = io.StringIO()
    plan.explain("params['a']", file=said)
    assert main(["explain", str(path), "cli_models:small", "params['a']"]) == 0
    assert capsys.readouterr().out.split() == said.getvalue().split()
    assert main(["explain", str(path), "cli_models:small", "params['a']", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["name"] == "args[0]['a']"
    assert [c["time"] >= plan.time for c in found["choices"]] == [True] * len(found["choices"])
    assert [c["type"] in said.getvalue() for c in found["choices"]] == [True] * len(found["choices"])
    assert main(["explain", str(path), "cli_models:small", "params['c']"]) == 1
    assert "params['c']" in capsys.readouterr().err


def test_a_graph_has_no_costs(saved: tuple[Path, unity.Plan], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "graph.json").write_text(json.dumps(to_json(saved[1].program.pcg)))
    assert main(["explain", str(tmp_path / "graph.json")]) == 1
    assert "is a graph" in capsys.readouterr().err
