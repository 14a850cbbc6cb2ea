"""A plan's file that was edited is refused, whoever reads it, and the place is named; nothing else is ever raised."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ci_cases import fewer

import unity
from benchmarks.plan_edits import GRID, PLANS, W, X, edited, has_content, outcome, plain, text_of, torn
from unity.base.errors import PlanError, UnityError
from unity.cli import main
from unity.pcg.parallel.check import check
from unity.plan.files.document import SavedPlan
from unity.plan.files.plan_file import CHECKSUMS, sealed

EDITS = fewer(250)


@pytest.fixture(params=PLANS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Any, tuple[Any, ...]]:
    fn, args, options = PLANS[request.param]
    plan = unity.optimize(fn, *args, machine=GRID, progress=False, **options)
    plan.files.save(tmp_path / "plan.json")
    return tmp_path / "plan.json", fn, args


def read(path: Path, text: bytes, fn: Any, args: tuple[Any, ...]) -> unity.Plan:
    path.write_bytes(text)
    return unity.load(path, fn, *args)


def test_an_edited_file_is_refused_at_the_place_of_the_edit(saved: tuple[Path, Any, tuple[Any, ...]]) -> None:
    path, fn, args = saved
    data, draw = json.loads(path.read_text()), random.Random(0)
    for _ in range(EDITS):
        changed, what = edited(data, draw)
        places = {k for k in {**data, **changed} if repr(data.get(k, "no")) != repr(changed.get(k, "no"))}
        places |= set(data) if CHECKSUMS in places else set()  # then the part whose checksum was edited is named
        with pytest.raises(PlanError) as error:
            read(path, text_of(changed), fn, args)
        named = any(f"$.{place}" in str(error.value) for place in places) or re.search(r"no JSON.*byte \d+", str(error.value))
        assert "unity" in places or "schema" in places or named, what


def test_an_edited_text_is_refused_or_the_same_plan(saved: tuple[Path, Any, tuple[Any, ...]]) -> None:
    path, fn, args = saved
    text, draw, ends = path.read_bytes(), random.Random(3), Counter[bool]()
    data, planned = json.loads(text), unity.load(path, fn, *args)
    for _ in range(EDITS):
        changed, what = torn(text, draw)
        plan = outcome(path, changed, fn, args)
        assert (plan is not None) == has_content(changed, data), what
        assert plan is None or (plan.program.pcg.key, plan.time, plan.memory) == (
            planned.program.pcg.key,
            planned.time,
            planned.memory,
        )
        ends[plan is None] += 1
    assert min(ends[True], ends[False]) > EDITS / 10


def test_an_edited_file_that_has_right_checksums_is_a_plan_or_refused(saved: tuple[Path, Any, tuple[Any, ...]]) -> None:
    """Other programs may write files. Such a plan has their figures, but is well-typed."""
    path, fn, args = saved
    data, draw, ends = json.loads(path.read_text()), random.Random(1), Counter[str]()
    data.pop(CHECKSUMS)
    for _ in range(EDITS):
        changed, _ = edited({k: v for k, v in data.items() if k not in ("captured", "planned", "report")}, draw)
        try:
            plan = read(path, text_of(sealed(changed)), fn, args)
        except PlanError:
            ends["refused"] += 1
        else:
            check(plan.program.pcg)
            assert plan.time == changed["points"][0]["time"]
            ends["read"] += 1
    assert ends["refused"] > EDITS / 2


@pytest.mark.parametrize("command", ["explain {}", "diff {}", "diff {} whole.json", "report {} -o page.html", "explain {} --json"])
def test_commands_refuse_edited_files(command: str, saved: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path, *_ = saved
    monkeypatch.chdir(path.parent)
    (path.parent / "whole.json").write_text(path.read_text())
    data, draw = json.loads(path.read_text()), random.Random(2)
    for _ in range(fewer(10)):
        path.write_bytes(text_of(edited(data, draw)[0]))
        assert main(command.format(path).split()) in (1, 2)
        assert "(docs: " in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"unity": []}', "[" * 100_000, '{"unity": "plan", "schema": 1e999}', "\0"])
def test_what_is_no_plan_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError):
        read(tmp_path / "plan.json", text.encode(), plain, (W, X))
    monkeypatch.chdir(tmp_path)
    for command in ("explain", "diff", "report"):
        assert main([command, "plan.json"]) in (1, 2)


def test_edited_figures_are_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    unity.optimize(plain, W, X, machine=GRID, search="captured", progress=False).files.save(path)
    data = json.loads(path.read_text())
    data["points"][0]["time"] /= 2
    with pytest.raises(PlanError, match=r"was changed at \$\.points after unity saved it"):
        read(path, text_of(data), plain, (W, X))
    assert issubclass(PlanError, UnityError)
    read(path, text_of(sealed(data)), plain, (W, X))


def test_files_of_the_schema_before_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    unity.optimize(plain, W, X, machine=GRID, search="captured", progress=False).files.save(path)
    data = json.loads(path.read_text())
    with pytest.raises(PlanError, match=rf"has plan schema {data['schema'] - 1}, this version of unity reads {data['schema']}"):
        read(path, text_of(sealed({**data, "schema": data["schema"] - 1})), plain, (W, X))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("points", 0, "time"), "fast", r"\$\.points\[0\]\.time: expected float, got str"),
        (("points", 0, "time"), -1.0, r"\$\.points\[0\]\.time: expected float >= 0"),
        (("points", 0, "nodes", 1), 99, r"\$\.points\[0\]: it does not fit the graph"),
        (("rows", 0, 0), [], r"\$\.points\[0\]: it does not fit the graph: a node has fewer types than results"),
        (("rows", 0, 2), [9], r"\$\.points\[0\]: it does not fit the graph: an operand that is gathered again does not exist"),
        (("types", 0), "P0/0", r"\$\.types\[0\]: expected a text of another form"),
        (("types", 0), "U", r"\$\.types\[0\]: expected a state for each of the machine's 3 axes"),
        (("machine", "device", "memory"), "80 GB", r"\$\.machine\.device\.memory: expected int, got str"),
        (("machine", "device", "speed"), 1.0, r"\$\.machine\.device\.speed: no such field is known"),
        (("machine", "device", "bandwidth"), -1.0, r"\$\.machine\.device: device\.bandwidth must be a finite number"),
        (("planned", "graph", "contents", 0, "kind"), 3, r"\$\.planned\.graph\.contents\[0\]\.kind: expected str, got int"),
        (("parallelization", "nodes", 0), 99, r"\$\.parallelization\.nodes: there is no number 99"),
        (("report", "timeline", "seconds"), None, r"\$\.report\.timeline\.seconds: expected float, got null"),
    ],
)
def test_the_place_and_the_way_out_are_named(place: tuple[Any, ...], value: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    unity.optimize(plain, W, X, machine=GRID, search="captured", progress=False).files.save(path)
    data = json.loads(path.read_text())
    holder = data
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    with pytest.raises(PlanError, match=rf"plan\.json is damaged at {message}(.|\n)*plan again with unity\.optimize"):
        read(path, text_of(sealed(data)), plain, (W, X))


def test_no_declared_type_unites_a_bounded_number_and_a_tuple_of_fixed_length() -> None:
    """msgspec 0.22 confuses the bounds of the one with the length of the other, and reads past the end of an array."""
    bounds, stack, seen = ("gt", "ge", "lt", "le", "multiple_of"), [msgspec.inspect.type_info(SavedPlan)], set[int]()
    kinds = set[str]()
    while stack:
        kind = stack.pop()
        if id(kind) in seen:
            continue
        seen.add(id(kind))
        if isinstance(kind, msgspec.inspect.UnionType):
            bounded = any(getattr(t, bound, None) is not None for t in kind.types for bound in bounds)
            assert not (bounded and any(isinstance(t, msgspec.inspect.TupleType) for t in kind.types)), kind
        kinds.add(type(kind).__name__)
        for part in (kind, *getattr(kind, "fields", ())):
            inner = [getattr(part, name, None) for name in ("type", "item_type", "key_type", "value_type")]
            items = [getattr(part, name, ()) for name in ("types", "item_types")]
            stack += [t for t in (*inner, *(t for some in items for t in some)) if isinstance(t, msgspec.inspect.Type)]
    assert {"StructType", "DataclassType", "UnionType", "TupleType"} <= kinds
