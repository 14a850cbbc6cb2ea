"""`unity machine`: the presets, one machine, and the one that is here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import unity
from unity.cli import main
from unity.machine.machine import Machine
from unity.machine.presets import CLUSTERS, DEVICES, LINKS


def test_every_preset_is_listed(capsys: pytest.CaptureFixture) -> None:
    assert main(["machine", "list"]) == 0
    said = capsys.readouterr().out
    for name in (*CLUSTERS, *DEVICES, *LINKS):
        assert f" {name} " in said
    assert main(["machine", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: Machine.from_json(m) for name, m in found["clusters"].items()} == {n: Machine.preset(n) for n in CLUSTERS}
    assert set(found["devices"]) == set(DEVICES)


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("dgx-h100", Machine.preset("dgx-h100")),
        ("summit-4x6", Machine.preset("summit-4x6")),
        ("v100-32gb-2x4", Machine.grid(2, 4, "v100-32gb")),
    ],
)
def test_a_machine_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture, name: str, machine: Machine) -> None:
    path = tmp_path / "machine.json"
    assert main(["machine", "show", name, "-o", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"{machine.devices} x {machine.device.name}" in said
    assert f"mesh: {' × '.join(f'{level.name} of {level.size}' for level in machine.levels if level.size > 1)}" in said
    assert Machine.load(path) == machine
    assert main(["machine", "show", str(path), "--json"]) == 0
    assert Machine.from_json(json.loads(capsys.readouterr().out)) == machine


def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "machine.json").write_text('{"schema": 1}')
    with pytest.raises(SystemExit) as exit_:
        main(["machine", "show", str(tmp_path / "machine.json")])
    assert exit_.value.code == 2
    assert "machine.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"unity": "plan", "schema": 11}', "it is a plan, not a machine"),
        ('{"schema": 1, "made": {}, "rules": []}', "it is a library of rules, not a machine"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_of_another_kind_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture, text: str | None, named: str) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit):
        main(["machine", "show", str(path)])
    error = capsys.readouterr().err
    assert named in error
    assert error.count("other.json") == 1
    assert "Errno" not in error


def test_the_local_machine(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    here = unity.Machine.grid(1, 8, "a100")
    monkeypatch.setattr(Machine, "local", classmethod(lambda cls, devices=None: here))
    assert main(["machine", "local", "-o", str(tmp_path / "here.json")]) == 0
    assert "8 x a100" in capsys.readouterr().out
    assert Machine.load(tmp_path / "here.json") == here


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["machine", "show", "dgx-h100", "-o", str(tmp_path / "none" / "machine.json")]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_one_virtual_device_is_measured(tmp_path: Path) -> None:
    """A real measurement, which is quick, since one device has no collectives."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "unity", "machine", "local", "--devices", "1", "--json"]
    for announced in (["unity: measuring this machine's devices (once, for a minute or two)"], []):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert Machine.from_json(json.loads(done.stdout)).devices == 1
        assert done.stderr.splitlines() == announced
