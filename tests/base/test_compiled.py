"""Loops are compiled where that pays and Numba is there, and do the same where they are not."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from unity.base import compiled_loops as loops
from unity.base.compiled_loops import LOADING, compiled, interpreted, pays


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has asked for nothing yet."""
    monkeypatch.setattr(loops, "load", cache(loops.load.__wrapped__))
    monkeypatch.setattr(loops._TimeInNumPy, "seconds", 0.0)


def doubled(values: np.ndarray, factor: float) -> float:
    total = 0.0
    for k in range(len(values)):
        values[k] *= factor
        total += values[k]
    return total


@pytest.mark.parametrize("way", [compiled, interpreted])
def test_arrays_are_written_to(way) -> None:
    values = np.array([1.0, 2.5])
    assert way(doubled)(values, 2.0) == 7.0
    assert values.tolist() == [2.0, 5.0]


@pytest.mark.usefixtures("not_loaded")
def test_without_numba_loops_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it could not be imported
    values = np.array([1.0, 2.5])
    assert compiled(doubled)(values, 2.0) == 7.0
    assert values.tolist() == [2.0, 5.0]
    assert not any(pays(2 * LOADING) for _ in range(2))


@pytest.mark.usefixtures("not_loaded")
def test_numba_is_loaded_once_as_much_is_lost_without() -> None:
    pytest.importorskip("numba")
    assert [pays(LOADING / 3) for _ in range(5)] == [False, False, False, True, True]


@pytest.mark.usefixtures("not_loaded")
def test_where_numba_is_loaded_the_least_work_is_for_compiled_loops() -> None:
    pytest.importorskip("numba")
    assert not pays(LOADING / 100)
    compiled(doubled)(np.array([1.0]), 2.0)
    assert pays(LOADING / 100)


def test_what_was_kept_is_not_used_where_a_part_in_another_file_is_another_one(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    (tmp_path / "parts.py").write_text("def more(x):\n    return x + 1.0\n")
    (tmp_path / "loops.py").write_text(
        "from functools import partial\nfrom parts import more\nfrom unity.base.compiled_loops import compiled\n\n"
        "@partial(compiled, parts=(more,))\ndef loop(x):\n    return more(x)\n"
    )

    def found() -> float:
        """What the loop gives in a process of its own."""
        run = [sys.executable, "-c", "from loops import loop; print(loop(1.0))"]
        return float(subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True).stdout)

    assert found() == 2.0
    assert list((tmp_path / "__pycache__").glob("loops.loop*.nbi"))
    (tmp_path / "parts.py").write_text("def more(x):\n    return x + 20.0\n")
    assert found() == 21.0
