"""`plan.explain(path)`: what one thing is, what it costs, and what the whole plan would cost if it were otherwise."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import test_pipelines as pipelines
from ci_cases import fewer
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from small_functions import Function, functions

import unity
from unity.explain.alternatives import alternatives, types_of
from unity.explain.why import Costs, nodes_named, typed_nodes
from unity.pcg.types.parallel_type import show
from unity.search.cost.prediction import predict

FOUR = unity.Machine.grid(2, 2, "a100")  # every value is listed, and no two axes are interchangeable
BOTH = ("n0", "d0")
SPECS = [P(), P("n0"), P("d0"), P(BOTH), P(None, "n0"), P(None, "d0"), P(None, BOTH), P("n0", "d0"), P("d0", "n0")]  # all there are

pytestmark = pytest.mark.usefixtures("own_cache")


def planned(fn: Any, *args: Any, machine: unity.Machine = FOUR, **options: Any) -> unity.Plan:
    return unity.optimize(fn, *args, machine=machine, progress=False, search="captured", **options)


def loss(params: dict[str, Any], batch: dict[str, Any]) -> Any:
    x = batch["x"]
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return ((x @ params["out"] - batch["y"]) ** 2).mean()


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def arguments() -> tuple[Any, Any]:
    return {"layers": [f32(512, 512) for _ in range(3)], "out": f32(512, 64)}, {"x": f32(256, 512), "y": f32(256, 64)}


def plan_of(**options: Any) -> unity.Plan:
    return planned(loss, *arguments(), **options)


def said(plan: unity.Plan, path: str) -> str:
    file = io.StringIO()
    plan.explain(path, file=file)
    return file.getvalue()


@settings(max_examples=fewer(4))
@given(functions, st.data())
def test_alternatives_are_the_best_plans_with_other_types(f: Function, data: st.DataObject) -> None:
    """For every type of an argument at once: the exact search with that type pinned."""
    plan = planned(f.loss, f.params, f.batch)
    matrices = [k for k, n in enumerate(plan.program.pcg.inputs) if n.tensors[0].ndim == 2]
    k = data.draw(st.sampled_from(matrices))
    node, path = plan.program.serial.inputs[k], plan.program.serial.inputs[k].name
    same, others = alternatives(plan.program.family, node, plan.program.candidate, 1e12, len(SPECS))
    assert same is not None
    assert same.candidate.time == pytest.approx(plan.time, rel=1e-9)
    found = {show(a.types.results[0], FOUR.axes, 2): a.candidate.time for a in (same, *others)}
    every = [planned(f.loss, f.params, f.batch, constraints=[unity.pin(path, spec)]) for spec in SPECS]
    wanted = {show(p.program.pcg.inputs[k].types[0], FOUR.axes, 2): p.time for p in every}
    assert found == pytest.approx(wanted, rel=1e-9)
    times = [a.candidate.time for a in others]
    assert times == sorted(times)


def test_an_argument_in_words() -> None:
    plan = plan_of(constraints=[unity.pin("params['out']", P(None, "device"))])
    text = said(plan, "params['out']")
    for words in (
        "args[0]['out']", "dimension 1 (of 64) in 2 slices over device (2); replicated over node (2); 65.54 kB on each device",
        "(gradients)", "(optimizer slots)", "constrained by unity.pin(\"params['out']\", P(None, 'device'))",
        "other types of it that fit 85.9 GB, were it not constrained:", "→ │ [-, device]",
    ):  # fmt: skip
        assert words in text, words


def test_what_is_whole_is_called_so_and_differences_of_time_have_a_unit() -> None:
    text = said(plan_of(constraints=[unity.pin("params['out']", P())]), "params['out']")
    assert "[-, -]: whole on every device; 131.1 kB on each device" in text
    assert "+0.0 %" not in text
    assert any(gain in text for gain in (" µs", "as fast"))


def test_the_argument_table_says_which_layers_differ() -> None:
    pins = {f"params['layers'][{k}]": spec for k, spec in enumerate((P("device"), P(), P("device")))}
    plan, file = plan_of(constraints=[unity.pin(path, spec) for path, spec in pins.items()]), io.StringIO()
    plan.explain(file=file)
    assert "args[0]['layers'][0,2]" in file.getvalue().replace("{", "").replace("}", "")
    assert "args[0]['layers'][1]" in file.getvalue()


def test_the_header_has_the_peak_of_the_types_that_are_computed() -> None:
    machine, file = unity.Machine.preset("dgx-h100"), io.StringIO()
    assert "TFLOP/s float8_e4m3fn" in str(machine)
    plan_of(machine=machine).explain(file=file)
    assert "TFLOP/s float32)" in file.getvalue().splitlines()[0]
    equal = [dtype for dtype in machine.device.flops if dtype in ("float16", "bfloat16")]  # types with one peak, in any order
    assert f" {equal[0]})" in machine.described({"float16", "bfloat16"})
    assert f" {equal[0]})" in machine.described({"bfloat16", "float16"})


def test_layers_that_are_alike_are_said_once() -> None:
    plan = plan_of(constraints=[unity.pin("**['layers'][*]", P())])
    text = said(plan, "params['layers'][*]")
    assert "args[0]['layers'][0], the first of 3 that are alike" in text
    assert text.count("the best plans with") == 1


def test_operators_by_kind_line_label_and_scope() -> None:
    plan = plan_of()
    line = next(t.serial.source for t in typed_nodes(plan) if t.serial.kind == "dot_general" and "head" not in t.serial.scope)
    number = Path(line.partition(" (")[0]).name
    kinds = {t.serial.kind for t in nodes_named(plan, number)}
    assert "dot_general" in kinds
    assert {t.serial.kind for t in nodes_named(plan, f"dot_general at {number}")} == {"dot_general"}
    assert len(nodes_named(plan, "dot_general")) == 4
    assert nodes_named(plan, "head")
    assert "computing: " in said(plan, "dot_general")


def test_every_collective_and_all_computing_is_somebodys() -> None:
    plan = plan_of(constraints=[unity.pin("params['layers'][*]", P("node")), unity.pin("batch['x']", P("device"))])
    costs, every = Costs(plan), [t.parallel for t in typed_nodes(plan)]
    total = predict(plan.program.pcg, FOUR, plan.program.family.captured.differentiated)
    assert sum(map(costs.compute, every)) == pytest.approx(sum(t.forward + t.backward for t in total.operators))
    known = {id(t) for node in every for t in costs.collectives(node)}
    assert total.collectives
    assert known == {id(t) for t in costs.prediction.collectives}


def test_all_fit_the_limit() -> None:
    lean = plan_of(objective="memory").memory
    plan = plan_of(memory_limit=lean * 1.2)
    node = plan.program.serial.inputs[0]
    same, others = alternatives(plan.program.family, node, plan.program.candidate, lean * 1.2, 3)
    assert same is not None
    assert others
    assert all(a.candidate.memory <= lean * 1.2 for a in (same, *others))
    assert len({a.types for a in (same, *others)}) == len(others) + 1
    assert types_of(node, plan.program.candidate.assignment) == same.types


def test_interchangeable_axes_are_not_told_apart() -> None:
    plan = plan_of(machine=unity.Machine.grid(1, 4, "a100"))
    _, others = alternatives(plan.program.family, plan.program.serial.inputs[0], plan.program.candidate, 1e12, 9)
    kinds = [sorted((s.kind, s.dim) for s in a.types.results[0]) for a in others]
    assert len({tuple(k) for k in kinds}) == len(kinds)


def test_of_a_plan_that_was_loaded(tmp_path: Path) -> None:
    plan = plan_of(constraints=[unity.pin("params['out']", P())])
    plan.files.save(tmp_path / "plan.json")
    assert said(unity.load(tmp_path / "plan.json", loss, *arguments()), "params['out']") == said(plan, "params['out']")


def test_inside_of_a_pipeline() -> None:
    layers = {"gain": f32(8, 16), "up": f32(8, 16, 64), "down": f32(8, 64, 16)}
    params, ids = {"words": f32(24, 16), "out": f32(16, 24), "layers": layers}, jax.ShapeDtypeStruct((16, 4), "int32")
    machine = unity.Machine.grid(2, 4)
    plan = pipelines.planned(pipelines.loss, (params, ids, ids), machine, machine.axes[:1], 2)
    node = next(t.serial for t in nodes_named(plan, "dot_general"))
    same, others = alternatives(plan.program.family, node, plan.program.candidate, 1e12, 2)
    assert same is not None
    assert same.candidate.time == pytest.approx(plan.time, rel=1e-3)
    assert len(others) == 2
    assert all(a.candidate.time >= plan.time * (1 - 1e-3) for a in others)


def test_what_is_not_there() -> None:
    with pytest.raises(unity.PlanError, match=r"nothing in this plan is meant by 'dot_generl'.*dot_general"):
        said(plan_of(), "dot_generl")
    with pytest.raises(unity.PlanError, match=r"nearest are params\['out'\]"):
        said(plan_of(), "params['oud']")
