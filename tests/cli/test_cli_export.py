"""`unity export`: a file that does what the plan does, or none. (More: test_export.)"""

from __future__ import annotations

import json
from pathlib import Path

import cli_models
import jax
import jax.numpy as jnp
import pytest

import unity
from unity.cli import main


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cli_models.saved(tmp_path_factory.mktemp("export"), unity.Machine.grid(1, 8, "a100"))[0]


def test_the_file_computes_what_the_model_does(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "exported.py"
    assert main(["export", str(saved), "cli_models:small", "-o", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    assert main(["export", str(saved), "cli_models:small", "-o", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "loss", "machine": "a100-1x8", "devices": 8, "files": [str(path)]}
    names: dict = {"__name__": "exported"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert "import unity" not in path.read_text()
    fn, args, _ = cli_models.small()
    keys = iter(jax.random.split(jax.random.key(0), 3))
    args = jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape, a.dtype), args)
    placed = jax.device_put(args, names["in_shardings"])
    assert jnp.allclose(jax.jit(names["fn"])(*placed), fn(*args), rtol=1e-5)


def test_errors_write_no_file(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "exported.py"
    assert main(["export", str(saved), "cli_models:other", "-o", str(path)]) == 1
    assert "was made for other arguments" in capsys.readouterr().err
    assert not path.exists()
    assert main(["export", str(saved), "cli_models:small", "-o", str(tmp_path / "none" / "exported.py")]) == 1
    assert "No such file" in capsys.readouterr().err
