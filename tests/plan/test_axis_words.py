"""Every text about a plan names mesh axes as its specifications do: the machine's levels, their parts, or the user's axes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ci_cases import by_hand
from hypothesis import assume, given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from layered_model import scanned

import unity
from unity.__main__ import main
from unity.pcg.ir import graph_json
from unity.pcg.parallel.axis_names import AxisNames
from unity.pcg.types.parallel_type import UNUSED, State, digits, joined_digits, partitioned
from unity.plan.files.plan_file import sealed
from unity.report import content, of_plan
from unity.report.content import of_file

pytestmark = pytest.mark.usefixtures("own_cache")

TREE = unity.Machine.grid(2, 8, "a100")
UNEVEN = unity.Machine.preset("summit-2x6")


def f(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def loss(params: Any, x: Any) -> Any:
    for layer in params["layers"]:
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return jnp.mean((x @ params["out"]) ** 2)


def towers(params: Any, batch: Any) -> Any:
    one = jax.nn.relu(batch["left"] @ params["first"]) @ params["second"]
    other = jnp.tanh(jax.nn.relu(batch["right"] @ params["third"]) @ params["fourth"]) @ params["fifth"]
    return ((one * other).sum(-1) ** 2).mean()


SIZES = {"first": (24, 32), "second": (32, 16), "third": (40, 16), "fourth": (16, 48), "fifth": (48, 16)}
TOWERS = {name: f(*size) for name, size in SIZES.items()}, {"left": f(16, 24), "right": f(16, 40)}
WEIGHTS = {"layers": [{"up": f(384, 1536), "down": f(1536, 384)} for _ in range(2)], "out": f(384, 96)}
PARTS = {"node": 2, "device_a": 2, "device_b": 4}
IN_PARTS = unity.pin("args[0]['layers'][0]['up']", P("device_a", "device_b"), mesh=PARTS)
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "whole levels": (loss, (WEIGHTS, f(1536, 384)), {"machine": TREE}),
    "parts of a level": (loss, (WEIGHTS, f(1536, 384)), {"machine": TREE, "constraints": [IN_PARTS]}),
    "an uneven machine": (loss, (WEIGHTS, f(1536, 384)), {"machine": UNEVEN}),
    "a mesh of the user's": (loss, (WEIGHTS, f(1536, 384)), {"machine": TREE, "mesh": AbstractMesh((4, 4), ("data", "model"))}),
    "a pipeline": (scanned, ({"layers": f(4, 256, 256)}, f(512, 256)), {"machine": TREE, "pipeline": unity.PipelineShape(4, 8)}),
    "branches": (towers, TOWERS, {"machine": unity.Machine.grid(1, 4, "v100"), "branch_groups": 2}),
    "by substitution": (loss, (WEIGHTS, f(1536, 384)), {"machine": unity.Machine.grid(1, 4, "v100"), "search": "unity-rules"}),
}


SHOWN = (
    *("parts of a level", "a mesh of the user's", "a pipeline", "branches"),
    *by_hand("whole levels", "an uneven machine", "by substitution"),
)


def planned(name: str, folder: Path) -> unity.Plan:
    fn, args, options = CASES[name]
    every: dict[str, Any] = {"search": "captured", "progress": False, **options}
    plan = unity.optimize(fn, *args, **every)
    plan.files.save(folder / "plan.json")
    return plan


def visible(text: str) -> str:
    """Return a text as it is, the labels of a picture in DOT, or an HTML page without its marks."""
    if text.startswith("digraph"):
        return "\n".join(re.findall(r'label="([^"]*)"', text))
    return re.sub(r"<[^>]*>", " ", text.partition("<body")[2]) if "<body" in text else text


def texts(plan: unity.Plan, path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[str, str]]:
    """Yield the texts that users see of a plan and its file, by what prints them."""
    yield "print", str(plan)
    for how, about in (("", None), ("an argument", plan.program.pcg.inputs[0].name), ("an operator", "dot_general")):
        if about is None or plan.program.pipelining is None:
            text = io.StringIO()
            plan.explain(about, file=text)
            yield f"explain {how}", text.getvalue()
    yield "specs", str((plan.in_specs, plan.out_specs, plan.mesh_shape, plan.inspect.abstract_mesh))
    difference = plan.inspect.diff()
    for form in ("text", "markdown", "dot", "html"):
        yield f"diff as {form}", visible(difference.formatted(form))
    yield "verdict", difference.verdict().formatted("text")
    for how, source in (("report", of_plan(plan)), ("report of the file", of_file(path))):
        yield how, json.dumps(content(source), ensure_ascii=False)
    for words in (["explain"], ["explain", "--json"], ["show"], ["show", "--format", "dot"], ["diff"]):
        main([words[0], str(path), *words[1:]])
        yield f"unity {' '.join(words)}", visible(capsys.readouterr().out)
    yield "simulate", str(plan.inspect.simulate())
    plan.files.export(path.with_name("exported.py"))
    yield "export", path.with_name("exported.py").read_text()


@pytest.mark.parametrize(
    "name",
    [
        "parts of a level",
        "a mesh of the user's",
        "a pipeline",
        "branches",
        *by_hand("whole levels", "an uneven machine", "by substitution"),
    ],
)
def test_no_text_names_axes_of_the_search(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(name, tmp_path)
    seen = dict(texts(plan, tmp_path / "plan.json", capsys))
    axes = "|".join(axis.name for axis in CASES[name][2]["machine"].axes)  # of the search: d0, n1
    inner = {how: re.findall(rf"\b(?:{axes})\b", text) for how, text in seen.items()}
    assert not {how: sorted(set(names)) for how, names in inner.items() if names}
    assert plan.program.applications or len(plan.inspect.machine.axes) > 1


def test_all_texts_of_a_plan_have_the_names_of_its_specifications(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("parts of a level", tmp_path)
    assert plan.in_specs[0]["layers"][0]["up"][0] == "device_a"
    assert [axis.name for axis in plan.program.axis_names.shown] == ["node", *list(plan.mesh_shape)[1:]]
    seen = dict(texts(plan, tmp_path / "plan.json", capsys))
    for how in ("explain an argument", "unity explain", "unity show", "diff as text", "report", "report of the file", "unity diff"):
        assert "device_a" in seen[how], how
    assert re.search(
        r"mesh axes: device_a \(\d\)(, device_[b-z] \(\d\))* and device_[b-z] \(\d\) are parts of device \(8\)", seen["explain "]
    )


def test_the_graph_that_show_writes_for_other_tools_is_that_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned("parts of a level", tmp_path)
    main(["show", str(tmp_path / "plan.json"), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert graph_json.from_json(data["graph"]).key == plan.program.pcg.key
    axes = [axis.name for axis in plan.program.pcg.axes]
    assert [name for names in data["mesh_axes"].values() for name in names] == axes
    assert list(data["mesh_axes"]) == [axis.name for axis in plan.program.axis_names.shown] != axes
    assert data == json.loads(json.dumps(plan.inspect.to_json()))


def test_axes_of_the_user_have_their_names_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen = dict(texts(planned("a mesh of the user's", tmp_path), tmp_path / "plan.json", capsys))
    for how, text in seen.items():
        assert how == "simulate" or "data" in text or "model" in text or "all 16 devices" in text, how
        assert not re.search(r"\bdevice_[a-z]\b|\bnode·", text), how


def test_a_difference_of_two_plans_names_the_same_devices_alike() -> None:
    fn, args, _ = CASES["whole levels"]
    plans = [
        unity.optimize(fn, *args, progress=False, search="captured", machine=TREE, constraints=constraints)
        for constraints in ([unity.pin("args[0]['out']", P("device"))], [IN_PARTS])
    ]
    difference = plans[0].inspect.diff(plans[1])
    before, after = difference.names
    assert before.shown == after.shown
    assert f"dim 0 over {before.listed([1])}, dim 1 over {before.listed([2, 3])}" in str(difference)
    assert "dim 0 over device → " in str(difference)  # all parts of a level are the level
    wider = unity.optimize(fn, *args, progress=False, search="captured", machine=unity.Machine.grid(4, 8, "a100"))
    same = unity.optimize(fn, *args, progress=False, search="captured", machine=TREE)
    assert "node of 2" in str(same.inspect.diff(wider))


def test_errors_about_an_edited_file_name_no_axes_of_the_search(tmp_path: Path) -> None:
    def fn(w: Any, x: Any) -> Any:
        return jnp.mean((jax.nn.gelu(x @ w["up"]) @ w["down"]) ** 2)

    args, file = ({"up": f(64, 256), "down": f(256, 64)}, f(128, 64)), tmp_path / "plan.json"
    machine = unity.Machine.grid(2, 4, "a100")
    unity.optimize(fn, *args, machine=machine, search="fsdp", progress=False).files.save(file)
    data, errors = json.loads(file.read_text()), []
    for k, row in product(range(len(data["points"][0]["nodes"])), range(len(data["rows"]))):
        points = [{**point, "nodes": [row if i == k else n for i, n in enumerate(point["nodes"])]} for point in data["points"]]
        file.write_text(json.dumps(sealed({**data, "points": points})))
        try:
            unity.load(file, fn, *args)
        except unity.PlanError as error:
            errors.append(str(error))
    assert any('along axis "node"' in error for error in errors)
    assert not [error for error in errors if re.search(rf"\b({'|'.join(axis.name for axis in machine.axes)})\b", error)]


def test_the_legend_of_explain_names_an_axis_of_the_plan(tmp_path: Path) -> None:
    text = io.StringIO()
    planned("a mesh of the user's", tmp_path).explain(file=text)
    assert "dimension 1 is sliced over model" in text.getvalue()
    assert "sliced over device" not in text.getvalue()


def test_a_part_is_named_only_where_types_need_it() -> None:
    axes = unity.Machine.grid(4, 12, "a100").axes  # of sizes 2, 2; 3, 2, 2
    levels, split = ("node", "device"), (UNUSED, UNUSED, partitioned(0), UNUSED, UNUSED)
    assert [(a.name, a.size) for a in AxisNames(axes, levels).shown] == [("node", 4), ("device", 12)]
    names = AxisNames(axes, levels).telling_apart([split])
    assert [(a.name, a.size) for a in names.shown] == [("node", 4), ("device_a", 3), ("device_b", 4)]
    assert names.show(split, 1) == "[device_a]"
    assert names.show((partitioned(0),) * 5, 2) == "[node·device, -]"
    assert names.in_words([0, 1, 2]) == "node (4) × device_a (3 of device's 12)"
    assert names.in_words(range(5)) == "all 48 devices"
    assert names.in_words([3]) == "2 of device_b's 4"
    assert AxisNames(axes, levels).refined(names) == names


def test_slices_that_nest_directly_are_of_one_axis() -> None:
    axes = unity.Machine.grid(1, 8, "a100").axes
    absolute = partitioned(0), partitioned(0, 2), partitioned(0, 4)
    assert joined_digits(absolute, axes) == (partitioned(0),) * 3
    assert joined_digits((partitioned(0, 3), partitioned(0, 6), partitioned(0)), axes) == (
        *(partitioned(0, 3),) * 2,
        partitioned(0),
    )
    names = AxisNames(axes, ("node", "device")).telling_apart([absolute])
    assert names.show(absolute, 1) == "[device]"


@given(st.lists(st.sampled_from([UNUSED, *(partitioned(d, k) for d in (0, 1) for k in (1, 2, 3, 4, 6))]), min_size=4, max_size=4))
def test_joined_digits_slice_as_before(states: list[State]) -> None:
    axes = unity.Machine.grid(4, 4, "a100").axes
    own = [digit for digit in digits(tuple(states), axes) if digit is not None]
    assume(not any(one.overlaps(other) for one, other in combinations(own, 2)))
    assert digits(joined_digits(tuple(states), axes), axes) == digits(tuple(states), axes)
    names = AxisNames(axes, ("node", "device")).telling_apart([tuple(states)])
    merged = zip(digits(names.run_type(tuple(states)), names.shown), names.shown, names.groups, strict=True)
    whole = digits(tuple(states), axes)
    for digit, axis, group in merged:
        first = whole[group[0]]
        assert digit == (None if first is None else replace(first, size=axis.size))
