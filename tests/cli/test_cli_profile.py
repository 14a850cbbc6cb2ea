"""`unity profile`: what it measures and keeps, and how it refuses what it cannot measure."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import unity
from unity.cli import main
from unity.exec.measure.local_machine import where
from unity.exec.measure.operators import Timing
from unity.machine.machine import Machine
from unity.machine.profiles.store import Store
from unity.plan.files import cache
from unity.search.cost.profile_lookup import MEASURED

SMALL = """
import jax, jax.numpy as jnp

def loss(w, x):
    return (jnp.tanh(x @ w["a"]) @ w["b"]).sum()

def small():
    f = lambda *shape: jax.ShapeDtypeStruct(shape, "float32")
    return loss, ({"a": f(16, 8), "b": f(8, 4)}, f(8, 16))

def with_options():
    return (*small(), {"search": "captured", "training": False})

def spoiled():
    return loss

def wrong_options():
    return (*small(), 3)

number = 3
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A module to name on the command line, and a database and a cache of its own; nothing is really measured."""
    (tmp_path / "profiled_model.py").write_text(SMALL)
    monkeypatch.syspath_prepend(str(tmp_path))
    store = Store(tmp_path / "profiles.sqlite3")
    monkeypatch.setattr(Store, "usual", staticmethod(lambda: store))
    monkeypatch.setattr(cache, "_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(Machine, "local", classmethod(lambda cls, devices=None: _machine(store)))
    monkeypatch.setattr("unity.exec.measure.plan_profile.measure", lambda program: Timing(1e-4, 2e-4, 0.1))
    yield store
    sys.modules.pop("profiled_model", None)


def _machine(store: Store) -> Machine:
    from unity.machine.hardware import Device, Level

    device = Device("cpu", {"float32": 1e10}, 2**30, 1e9, 1.0, 1e-6)
    return Machine("local", device, (Level("device", len(jax.devices()), 1e9, 1e-6),)).with_profile(
        store.profile(where(jax.devices()))
    )


def test_operators_are_measured_once_and_stored(place: Store, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    saved = tmp_path / "machine.json"
    assert main(["profile", "profiled_model:small", "--all", "--save", str(saved)]) == 0
    found = place.profile(where(jax.devices()))
    assert found is not None
    assert Machine.load(saved).profile == found
    first = capsys.readouterr().out
    assert f"{len(found)} operators measured" in " ".join(first.split())
    assert main(["profile", "profiled_model:small", "--all"]) == 0
    assert "0 operators measured" in " ".join(capsys.readouterr().out.split())
    assert place.profile(where(jax.devices())) == found


def test_plans_are_predicted_by_the_measurements(place: Store) -> None:
    from profiled_model import small  # pyright: ignore[reportMissingImports]

    assert main(["profile", "profiled_model:small", "--all"]) == 0
    loss, args = small()
    plan = unity.optimize(loss, *args, progress=False)
    plain = unity.optimize(loss, *args, machine=plan.inspect.machine.with_profile(None), progress=False)
    assert plan.time != plain.time
    text, without = io.StringIO(), io.StringIO()
    plan.explain(file=text)
    plain.explain(file=without)
    assert MEASURED in text.getvalue()
    assert MEASURED not in without.getvalue()
    assert unity.optimize(loss, *args, progress=False).time == plan.time  # from the cache


def test_a_saved_plan_has_the_measurements_that_it_uses(place: Store, tmp_path: Path) -> None:
    from profiled_model import small  # pyright: ignore[reportMissingImports]

    assert main(["profile", "profiled_model:small"]) == 0
    loss, args = small()
    plan = unity.optimize(loss, *args, progress=False)
    plan.files.save(tmp_path / "plan.json")
    again = unity.load(tmp_path / "plan.json", loss, *args)
    assert again.inspect.machine == plan.inspect.machine
    assert again.inspect.machine.profile is not None


def test_the_models_options_apply(place: Store) -> None:
    assert main(["profile", "profiled_model:with_options"]) == 0
    found = place.profile(where(jax.devices()))
    assert found is not None
    assert not any(any(m.differentiated) for m in found.measurements)


def test_an_interrupted_run_keeps_its_measurements(place: Store, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    measured = []

    def interrupted(program: Any) -> Timing:
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(program)
        return Timing(1e-4, 2e-4, 0.1)

    monkeypatch.setattr("unity.exec.measure.plan_profile.measure", interrupted)
    assert main(["profile", "profiled_model:small"]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert len(place.profile(where(jax.devices())) or ()) == 3


@pytest.mark.parametrize(
    ("which", "named"),
    [
        ("profiled_model", "expected MODULE:FUNCTION"),
        (":small", "expected MODULE:FUNCTION"),
        ("no_such_module:small", "No module named 'no_such_module'"),
        ("profiled_model:no_such", "no attribute 'no_such'"),
        ("profiled_model:number", "is an int"),
        ("profiled_model:spoiled", "gives a function"),
        ("profiled_model:wrong_options", "options that are an int"),
    ],
)
def test_a_function_that_returns_no_model_is_refused(place: Store, capsys: pytest.CaptureFixture, which: str, named: str) -> None:
    assert main(["profile", which]) == 1
    assert named in capsys.readouterr().err
    assert place.profile(where(jax.devices())) is None


def test_missing_devices_are_an_error(place: Store, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> list:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", none)
    assert main(["profile", "profiled_model:small"]) == 1
    assert "no devices to measure on: Unable to initialize backend 'cuda'" in capsys.readouterr().err


def test_devices_of_several_kinds_are_refused(place: Store, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from unity.machine.hardware import MachineError

    def refused(cls: Any, devices: Any = None) -> Machine:
        raise MachineError("a machine has devices of one kind, got a, b")

    monkeypatch.setattr(Machine, "local", classmethod(refused))
    assert main(["profile", "profiled_model:small"]) == 1
    assert "got a, b" in capsys.readouterr().err


def test_an_impossible_number_of_devices_is_refused(place: Store, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["profile", "profiled_model:small", "--devices", "0"])
    assert exit_.value.code == 2
    assert "--devices" in capsys.readouterr().err


def test_the_command_runs_in_a_separate_process(tmp_path: Path) -> None:
    """With real figures: one virtual device, a model of one product; the module is found where the command is run.

    One device has no collectives, whose measuring takes a minute (test_profile_measure has it).
    """
    (tmp_path / "tiny_model.py").write_text(
        "import jax\n\ndef tiny():\n    f = lambda *s: jax.ShapeDtypeStruct(s, 'float32')\n"
        "    return (lambda w, x: (x @ w).sum()), (f(4, 4), f(4, 4)), {'search': 'captured'}\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "cache"), "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "unity", "profile", "tiny_model:tiny", "--devices", "1", "--save", "machine.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    machine = Machine.load(tmp_path / "machine.json")
    assert machine.devices == 1
    assert machine.profile is not None
    assert machine.profile.where.devices == 1
    assert jnp.isfinite(sum(m.forward + m.backward for m in machine.profile.measurements))
