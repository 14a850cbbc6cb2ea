"""The command line as a whole: every command describes itself with examples that it takes, and exit statuses are as said."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from unity.base.errors import UnityError
from unity.cli import COMMANDS, main, parser
from unity.cli.commands import show
from unity.machine.machine import MachineError


def commands(top: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """All commands and those below them."""
    yield top
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from commands(below)


def examples(text: str) -> list[list[str]]:
    """The command lines in a text: lines that begin with `unity`, up to what a shell does with them."""
    lines = re.findall(r"^ *unity (.+)$", text, re.MULTILINE)
    parts = (part.strip() for line in lines for part in re.split(r"&& unity|>|\|", line)[:2])
    return [words for part in parts if (words := shlex.split(part, comments=True)) and words[0] in COMMANDS]


PARSERS = {p.prog: p for p in commands(parser())}


@pytest.mark.parametrize("prog", PARSERS)
def test_every_commands_examples_can_be_parsed(prog: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = PARSERS[prog]
    assert command.description
    assert command.epilog
    found = examples(command.epilog)
    words = prog.split()[1:]
    assert found
    for example in found:
        assert example[: len(words)] == words
        parser().parse_args(example)


def test_every_command_has_a_json_option() -> None:
    below = {prog: p for prog, p in PARSERS.items() if not any(isinstance(a, argparse._SubParsersAction) for a in p._actions)}
    assert len(below) > 15
    assert [prog for prog, p in below.items() if "--json" not in p.format_help()] == ["unity completion"]  # which prints a script


@pytest.mark.parametrize("prog", PARSERS)
def test_help_fits_a_terminal_and_describes_every_option(
    prog: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as exit_:
        main([*prog.split()[1:], "--help"])
    assert exit_.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120
    named = {"path", "format", "shell", "out", "operators", "families", "processes", "name", "library"}  # said by their names
    for action in PARSERS[prog]._actions:
        assert action.help or action.dest in named or isinstance(action, argparse._SubParsersAction), action


@pytest.mark.parametrize("page", sorted((Path(__file__).parents[2] / "docs").glob("*.md")), ids=lambda p: p.name)
def test_command_lines_in_the_documentation_can_be_parsed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.json").write_text("{}")
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for example in examples(block):
            if not any(word.endswith(".json") and word.startswith(("here", "cluster")) for word in example):  # read while parsing
                parser().parse_args(example)


@pytest.mark.parametrize(
    ("problem", "status", "said"),
    [
        (UnityError("it is wrong"), 1, "unity: it is wrong (docs: plan)\n"),
        (MachineError("no machine"), 1, "unity: no machine (docs: machines)\n"),
        (FileNotFoundError(2, "No such file", "plan.json"), 1, "unity: plan.json: No such file (docs: command-line#in-scripts)\n"),
        (KeyboardInterrupt(), 130, "unity: interrupted"),
    ],
)
def test_errors_have_an_exit_status_and_one_message(
    problem: BaseException, status: int, said: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(options: argparse.Namespace) -> int:
        raise problem

    monkeypatch.setattr(show, "run", wrong)
    assert main(["show", "plan.json"]) == status
    assert capsys.readouterr().err.startswith(said)


def test_from_a_model_to_a_checked_plan(tmp_path: Path) -> None:
    """Plan, explain, compare, simulate and check, each in a separate process."""
    (tmp_path / "mymodel.py").write_text(
        "import jax, jax.numpy as jnp\n\n"
        "def loss(w, x):\n    return jnp.mean((jnp.tanh(x @ w['a']) @ w['b']) ** 2)\n\n"
        "def example():\n    f = lambda *shape: jax.ShapeDtypeStruct(shape, 'float32')\n"
        "    return loss, ({'a': f(64, 256), 'b': f(256, 64)}, f(512, 64)), {'search': 'captured'}\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache"), "XLA_FLAGS": ""}

    def unity(line: str) -> str:
        command = [sys.executable, "-m", "unity", *shlex.split(line)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), (line, done.stderr)
        assert "\x1b" not in done.stdout
        return done.stdout

    found = json.loads(unity("optimize mymodel:example --machine a100-1x8 -o plan.json --json"))
    assert found["file"] == "plan.json"
    explained = json.loads(unity("explain plan.json --json"))
    assert explained["time"] == found["time"]
    assert "of the step" in unity("simulate plan.json mymodel:example --trace step.json")
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert "has the plan's collectives" in unity("check plan.json mymodel:example --devices 8")
