"""A plan's file that was edited is refused, whoever reads it, and the place is named; nothing else is ever raised."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from edited_files import edited
from jax import lax

import unity
from unity.base.errors import PlanError, UnityError
from unity.cli import main
from unity.plan.plan_file import CHECKSUMS, sealed

GRID = unity.Machine.grid(2, 4, "a100")
EDITS = 400


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def plain(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def layered(w: Any, x: Any) -> Any:
    return jnp.mean(lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, w)[0] ** 2)


def shared(w: Any, x: Any) -> Any:
    """Its products are joined by rules."""
    return jnp.mean((x @ w["a"]) * jnp.tanh(x @ w["b"]) + x @ w["c"])


W, X = f(32, 32), f(64, 32)
PLANS: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "plain": (plain, (W, X), {"search": "captured"}),
    "pipeline": (layered, (f(4, 32, 32), X), {"pipelines": (2, 4), "search": "captured"}),
    "rewritten": (shared, ({"a": W, "b": W, "c": W}, X), {"budget": 8, "pack": True}),
    "constrained": (plain, (W, X), {"search": "captured", "constraints": unity.pin("x", jax.sharding.PartitionSpec("node"))}),
    "by rules": (plain, (W, X), {"search": "unity-rules", "budget": 20}),
}


@pytest.fixture(params=PLANS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any, tuple[Any, ...]]:
    fn, args, options = PLANS[request.param]
    plan = unity.optimize(fn, *args, machine=GRID, progress=False, **options)
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json", fn, args


def read(path: Path, text: str, fn: Any, args: tuple[Any, ...]) -> unity.Plan:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return unity.load(path, fn, *args)


def test_an_edited_file_is_refused_at_the_place_of_the_edit(saved: tuple[Path, Any, tuple[Any, ...]]) -> None:
    path, fn, args = saved
    data, draw = json.loads(path.read_text()), random.Random(0)
    for _ in range(EDITS):
        changed, what = edited(data, draw)
        places = {k for k in {**data, **changed} if repr(data.get(k, "no")) != repr(changed.get(k, "no"))}
        places |= set(data) if CHECKSUMS in places else set()  # then the part whose checksum was edited is named
        with pytest.raises(PlanError) as error:
            read(path, json.dumps(changed), fn, args)
        assert "unity" in places or "schema" in places or any(f"$.{place}" in str(error.value) for place in places), what


def test_an_edited_file_that_has_right_checksums_is_a_plan_or_refused(saved: tuple[Path, Any, tuple[Any, ...]]) -> None:
    """So may files be that other programs write. What such a plan says is then theirs."""
    path, fn, args = saved
    data, draw, ends = json.loads(path.read_text()), random.Random(1), Counter[str]()
    data.pop(CHECKSUMS)
    for _ in range(EDITS):
        changed, _ = edited({k: v for k, v in data.items() if k not in ("captured", "planned", "report")}, draw)
        try:
            plan = read(path, json.dumps(sealed(changed)), fn, args)
        except PlanError:
            ends["refused"] += 1
        else:
            assert plan.time == changed["points"][0]["time"]
            ends["read"] += 1
    assert ends["refused"] > EDITS / 2


@pytest.mark.parametrize("command", ["explain {}", "diff {}", "diff {} whole.json", "report {} -o page.html", "explain {} --json"])
def test_commands_refuse_edited_files(command: str, saved: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path, *_ = saved
    monkeypatch.chdir(path.parent)
    (path.parent / "whole.json").write_text(path.read_text())
    data, draw = json.loads(path.read_text()), random.Random(2)
    for _ in range(10):
        path.write_text(json.dumps(edited(data, draw)[0]), encoding="utf-8", errors="surrogatepass")
        assert main(command.format(path).split()) in (1, 2)
        assert "(docs: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"unity": []}', "[" * 100_000, '{"unity": "plan", "schema": 1e999}', "\0"])
def test_what_is_no_plan_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError):
        read(tmp_path / "plan.json", text, plain, (W, X))
    monkeypatch.chdir(tmp_path)
    for command in ("explain", "diff", "report"):
        assert main([command, "plan.json"]) in (1, 2)


def test_edited_figures_are_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    unity.optimize(plain, W, X, machine=GRID, search="captured", progress=False).save(path)
    data = json.loads(path.read_text())
    data["points"][0]["time"] /= 2
    with pytest.raises(PlanError, match=r"was changed at \$\.points after unity saved it"):
        read(path, json.dumps(data), plain, (W, X))
    assert issubclass(PlanError, UnityError)
    read(path, json.dumps(sealed(data)), plain, (W, X))
