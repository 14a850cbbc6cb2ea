"""`unity diff` with limits, and the workflow of the documentation, run as it is written."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from unity.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "ci.md").read_text()
MODEL = """\
import jax
import jax.numpy as jnp

def loss(w, x):
    h = jnp.tanh(x @ w["a"])
    return ((h @ w["b"]) ** 2).mean()

def example():
    f = jax.ShapeDtypeStruct
    return loss, ({"a": f((64, 256), "float32"), "b": f((256, 64), "float32")}, f((512, 64), "float32")), {"search": "captured"}
"""
LARGER = "import functools\n" + MODEL.replace('w["a"])', 'w["a"])\n    h = jnp.sin(h @ h.T @ h)')


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def runs_of_the_workflow() -> list[list[str]]:
    """The lines of each step's command."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    single = r"run: (?!\|)(.*)"
    block = r"run: \|\n((?: {10}.*\n)+)"
    return [(m[1] or m[2]).strip().splitlines() for m in re.finditer(f"{single}|{block}", text)]


def run_workflow(place: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run the steps of the workflow, but for `pip install` and for what talks to GitHub. Return the status of every `unity`."""
    statuses = []
    for step in runs_of_the_workflow():
        monkeypatch.chdir(place)
        for line in step:
            words = shlex.split(line.replace("${{ github.event.pull_request.base.sha }}", base))
            if words[0] == "unity":
                sys.modules.pop("mymodel", None)  # each command is a process
                statuses.append(main(words[1:]))
            elif words[0] == "cd":
                monkeypatch.chdir(words[1])
            elif words[0] == "git":
                git(place, *words[1:])
            else:
                assert words[0] in ("pip", "cat", "gh")
    return statuses


@pytest.mark.parametrize(("change", "status"), [(LARGER, 1), ("# moved\n\n" + MODEL, 0)])
def test_the_workflow_of_the_documentation_judges_a_pull_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, status: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend("")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the two versions may have one size and one time
    place = tmp_path / "repository"
    place.mkdir()
    git(place, "init", "-q")
    for text in (MODEL, change):
        (place / "mymodel.py").write_text(text)
        git(place, "add", "mymodel.py")
        git(place, "commit", "-q", "-m", "a version")
    assert run_workflow(place, git(place, "rev-parse", "HEAD~1"), monkeypatch) == [0, 0, status]
    verdict = (place / "verdict.md").read_text()
    assert ("## refused" in verdict) == bool(status)
    assert ("mymodel.py:7 (loss) now computes" in verdict) == bool(status)
    # the other formats, limits and statuses
    monkeypatch.chdir(place)
    judge = ["diff", "base.json", "change.json", "-o", "out.json"]
    assert main([*judge, "--slower", "100000%", "--larger", "100000%"]) == 0
    assert main([*judge, "--slower", "0%", "--strict"]) == status
    data = json.loads(Path("out.json").read_text())
    plans = [json.loads(Path(name).read_text())["planned"] for name in ("base.json", "change.json")]
    assert [data["time"][k] for k in ("before", "after")] == [plan["time"] for plan in plans]
    assert data["time"]["growth"] == pytest.approx(plans[1]["time"] / plans[0]["time"] - 1)
    assert data["accepted"] is not bool(status)
    sys.modules.pop("mymodel", None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("diff none.json none.json --slower 5%", "cannot be read"),
        ("diff none.json --slower 5%", "name both"),
        ("diff none.json none.json --slower 5% --format dot", "choose one of text, markdown, json, html"),
    ],
)
def test_errors_give_exit_status_2(words: str, message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", ["5", "0.05", "-5%", "five", "5 %"])
def test_limits_are_in_percent(text: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["diff", "a.json", "b.json", f"--slower={text}"])
    assert exit_.value.code == 2
    assert "such as 5%" in capsys.readouterr().err
