"""`unity rules`: data for other tools, a library of one's own rules, patterns, and others' rules as text. (More: test_library.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unity.cli import main
from unity.substitutions.importing import Imported, Verdict
from unity.substitutions.language.axioms import default_library
from unity.substitutions.language.library import load
from unity.substitutions.language.text import parse_rules, print_rule

MINE = (
    "factor  add(matmul(x, y), matmul(x, z)) = matmul(x, add(y, z))\n"
    "false   matmul(x, y) = matmul(y, x)\n"
    "# of one device and of many\n"
    "spread  matmul(x, y) = combine(-2, a, matmul(partition(-2, a, x), replicate(a, y)))\n"
)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.rules"
    path.write_text(MINE)
    return path


def test_proved_rules_become_a_library(mine: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "mine.json"
    assert main(["rules", "verify", str(mine), "-o", str(out), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["proved"], found["of"]) == (2, 3)
    assert {r["name"]: r["status"] for r in found["results"]} == {"factor": "proved", "false": "refuted", "spread": "proved"}
    library = load(out)
    assert [e.rule.name for e in library.entries] == ["factor", "spread"]
    assert all(e.instances > 0 for e in library.entries)
    assert library["factor"].axioms == ("matmul-of-sums",)
    assert main(["rules", "verify", str(out)]) == 0
    assert "2 of 2 rules proved" in capsys.readouterr().out
    assert main(["rules", "show", "factor", "--library", str(out)]) == 0
    assert "proved from matmul-of-sums" in capsys.readouterr().out


def test_rules_are_shown_by_pattern(capsys: pytest.CaptureFixture) -> None:
    wanted = [e for e in default_library().entries if e.rule.name.startswith("transpose")]
    assert main(["rules", "show", "transpose*", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [e.to_json() for e in wanted]
    name = wanted[0].rule.name
    assert main(["rules", "show", name[:-1]]) == 1
    assert name in capsys.readouterr().err


def test_a_rule_of_loops_is_shown_by_its_name(capsys: pytest.CaptureFixture) -> None:
    assert main(["rules", "show", "products-before-loop"]) == 0
    shown = capsys.readouterr().out
    assert "scan(c, y in dot(xs, w): step(c, y))" in shown
    assert "by induction" in shown
    assert main(["rules", "show", "*-before-loop", "--json"]) == 0
    names = {r["name"] for r in json.loads(capsys.readouterr().out)}
    assert names == {"look-ups-before-loop", "products-before-loop", "invariants-before-loop"}


def test_statistics_count_the_library(capsys: pytest.CaptureFixture) -> None:
    assert main(["rules", "stats", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parallel"] + found["algebraic"] == len(default_library())
    assert found["of loops"] == len(default_library().loops)
    assert sum(n for what, n in found.items() if what.startswith("found in")) == len(default_library())


def test_generate_prints_its_counts(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / "cache"))
    out = tmp_path / "made.json"
    command = ["rules", "generate", "--families", "constants", "--max-ops", "2", "--processes", "1", "--out", str(out)]
    assert main([*command, "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["rules"] == len(load(out))
    assert [f["family"] for f in found["families"]] == ["constants"]
    assert said.err == ""


def test_imported_rules_are_proved_and_written_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = parse_rules(MINE)
    verdicts = Verdict("proved"), Verdict("refuted", "output 0 differs"), Verdict("proved")
    theirs = [Imported(r.name, r, v) for r, v in zip(rules, verdicts, strict=True)]
    theirs.append(Imported("odd", None, Verdict("unsupported", "no word for it")))
    monkeypatch.setattr("unity.cli.commands.rules.import_taso", lambda path: theirs)
    out = tmp_path / "theirs.rules"
    assert main(["rules", "import", "taso", "any.pb", "-o", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["proved"], found["of"]) == (2, 4)
    assert found["results"][-1] == {"name": "odd", "rule": None, "status": "unsupported", "why": "no word for it"}
    assert [print_rule(r) for r in parse_rules(out.read_text())] == [print_rule(rules[0]), print_rule(rules[2])]


@pytest.mark.parametrize("name", ["none.rules", "none.ranks", "none.json"])
def test_a_missing_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture, name: str) -> None:
    assert main(["rules", "verify", str(tmp_path / name)]) == 1
    error = capsys.readouterr().err
    assert name in error
    page = "write-rules" if name == "none.json" else "command-line#in-scripts"
    assert f"No such file or directory (docs: {page})" in error
    assert "Errno" not in error


def test_a_document_that_is_no_library_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "plan.json").write_text('{"unity": "plan", "schema": 11}')
    assert main(["rules", "verify", str(tmp_path / "plan.json")]) == 1
    assert "plan.json is a plan, not a library of rules" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "page"), [("mine.rules", "write-rules"), ("mine.ranks", "rules#rules-for-every-rank")])
def test_a_file_that_is_no_text_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture, name: str, page: str) -> None:
    (tmp_path / name).write_bytes(b"\xff")
    assert main(["rules", "verify", str(tmp_path / name)]) == 1
    assert f"no text in UTF-8, by byte 0 (docs: {page})" in capsys.readouterr().err
