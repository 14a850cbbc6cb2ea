"""`unity completion`: scripts that complete commands, options and files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from unity.cli import COMMANDS, main

pytest.importorskip("shtab", reason="shtab is not installed: pip install 'unity-jax[completion]'")


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture) -> dict[str, Path]:
    found = {}
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        found[shell] = tmp_path / shell
        found[shell].write_text(capsys.readouterr().out)
    return found


def completed(script: Path, *words: str) -> set[str]:
    """What bash offers for the last word."""
    line = " ".join(words)
    lines = [
        f"source {script}",
        f"COMP_WORDS=({' '.join(w or chr(39) * 2 for w in words)}); COMP_CWORD={len(words) - 1}",
        f"COMP_LINE='{line}'; COMP_POINT={len(line)}",
        f"_shtab_unity unity '{words[-1]}' '{words[-2]}'",
        'printf "%s\\n" "${COMPREPLY[@]}"',
    ]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], cwd=script.parent, capture_output=True, text=True, check=True)
    return {word.strip() for word in done.stdout.splitlines()}


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(script: dict[str, Path]) -> None:
    bash = script["bash"]
    assert completed(bash, "unity", "") >= set(COMMANDS)
    assert completed(bash, "unity", "opt") == {"optimize"}
    assert completed(bash, "unity", "rules", "ver") == {"verify"}
    assert completed(bash, "unity", "optimize", "--mem") == {"--memory"}
    (bash.parent / "plan.json").write_text("{}")
    assert "plan.json" in completed(bash, "unity", "show", "plan")


def test_the_zsh_script_has_every_command_and_option(script: dict[str, Path]) -> None:
    text = script["zsh"].read_text()
    assert text.startswith("#compdef unity")
    for name in COMMANDS:
        assert f'"{name}:' in text or f"'{name}:" in text or f"{name})" in text
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", script["zsh"]], check=True)


def test_without_shtab_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'unity-jax[completion]'" in capsys.readouterr().err
