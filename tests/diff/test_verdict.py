"""A verdict on a change: how much slower and larger it is, at which lines, and whether limits admit that."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.core import ShapedArray
from jax.extend.core import Primitive

import unity
from unity.base.formatting import duration, size
from unity.diff import PlanDiff
from unity.diff.verdict import FORMATS
from unity.plan.summary import Summary, summary_of
from unity.plan.warnings import warnings_of
from unity.search.cost.prediction import predict
from unity.search.memory.backend import backend_of
from unity.search.memory.memory import predict_memory

pytestmark = pytest.mark.usefixtures("own_cache")

EIGHT = unity.Machine.grid(1, 8, "a100")
MODEL = """\
def embed(table, ids):
    return table[ids]

def loss(params, ids):
    h = embed(params["embedding"], ids)
    h = jnp.tanh(h @ params["up"]) @ params["down"]
    return (h @ params["embedding"].T).mean()
"""
COMMENTED = "# what it does\n\n" + MODEL.replace("    h = jnp", "    # a layer\n    h = jnp")
DEEPER = COMMENTED.replace("    return (h", "    h = jnp.sin(h @ h.mT @ h)\n    return (h")
unknown = Primitive("mystery")
unknown.def_abstract_eval(lambda x: ShapedArray(x.shape, x.dtype))


def f(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def arguments(vocabulary: int = 4096) -> tuple[Any, ...]:
    return {"embedding": f(vocabulary, 256), "up": f(256, 1024), "down": f(1024, 256)}, f(64, 32, dtype="int32")


@cache
def planned(text: str = MODEL, vocabulary: int = 4096, search: str = "captured") -> unity.Plan:
    names: dict[str, Any] = {"jnp": jnp, "jax": jax, "unknown": unknown}
    exec(compile(text, "/models/model.py", "exec"), names)
    return unity.optimize(names["loss"], *arguments(vocabulary), machine=EIGHT, search=search, budget=0, progress=False)


def line_of(code: str, text: str = MODEL) -> str:
    """The line of a model with some code, as it is shown to users."""
    lines = text.split("\n")
    number = next(k for k, line in enumerate(lines, 1) if code in line)
    function = next(re.findall(r"def (\w+)", line)[0] for line in reversed(lines[:number]) if line.startswith("def "))
    return f"model.py:{number} ({function})"


CHANGES = [
    (planned, lambda: planned(DEEPER)),
    (lambda: planned(DEEPER), planned),
    (planned, lambda: planned(vocabulary=4095)),
    (lambda: planned(search="data-parallel"), lambda: planned(search="fsdp")),
]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=["more", "less", "indivisible", "sharded"])
def test_the_causes_add_up_to_the_change(before: Any, after: Any) -> None:
    one, other = before(), after()
    verdict = one.inspect.diff(other).verdict()
    steps = [predict(p.program.pcg, EIGHT, p.program.family.differentiated).time for p in (one, other)]
    assert sum(c.amount for c in verdict.time_causes) == pytest.approx(steps[1] - steps[0], rel=1e-6)
    assert verdict.time.growth == pytest.approx(other.time / one.time - 1)
    training = one.program.family.search.training
    peaks = [
        predict_memory(p.program.pcg, p.program.family.differentiated, training, backend_of(EIGHT)).total for p in (one, other)
    ]
    assert sum(c.amount for c in verdict.memory_causes) == pytest.approx(peaks[1] - peaks[0], rel=1e-6)
    assert verdict.memory.growth == pytest.approx(other.memory / one.memory - 1)
    assert verdict.time_causes


def test_limits_refuse_what_is_more_than_they_say() -> None:
    diff = planned().inspect.diff(planned(DEEPER))
    slower, larger = (getattr(planned(DEEPER), name) / getattr(planned(), name) - 1 for name in ("time", "memory"))
    assert slower > 0.01
    assert larger > 0.01
    assert diff.verdict().accepted
    assert diff.verdict(slower=slower * 1.001, larger=larger * 1.001).accepted
    assert not diff.verdict(slower=slower * 0.999).accepted
    assert not diff.verdict(larger=larger * 0.999).accepted
    assert planned(DEEPER).inspect.diff(planned()).verdict(slower=0, larger=0).accepted
    assert planned().inspect.diff(planned()).verdict(slower=0, larger=0, strict=True).accepted


def test_moved_lines_are_no_change() -> None:
    diff = planned().inspect.diff(planned(COMMENTED))
    assert not diff
    assert not diff.verdict().time_causes
    assert not diff.verdict().memory_causes
    assert diff.verdict().sentence == "this change makes a step as fast as before and as large as before"


def test_the_verdict_names_the_change_of_the_source_before_its_effects() -> None:
    wider = MODEL.replace("    h = jnp.tanh(h @", "    h = jnp.tanh(h.astype(jnp.float64) @")
    with jax.enable_x64(True):
        verdict = planned().inspect.diff(planned(wider)).verdict()
    line = line_of("astype", wider)
    assert verdict.sentence.endswith(f"First difference: {line} now computes convert_element_type (float32 → float64[64,32,256])")
    assert verdict.to_json()["first_difference"]["line"] == line
    for one, other in ((planned(), planned(COMMENTED)), (planned(), planned(search="fsdp"))):  # one program
        assert "First difference" not in one.inspect.diff(other).verdict().sentence
    shorter = planned().inspect.diff(planned(vocabulary=4000)).verdict().sentence
    assert shorter.endswith("First difference: args[0]['embedding'] float32[4096,256] → float32[4000,256]")


def test_figures_of_a_difference_are_in_percent() -> None:
    rows = planned().inspect.diff(planned(DEEPER)).document.tables[0].rows
    assert {row.cells[0]: row.cells[3] for row in rows}["one step"] == "+18.5%"


def test_a_new_statement_is_the_cause_at_its_own_line() -> None:
    verdict = planned().inspect.diff(planned(DEEPER)).verdict(slower=0.01)
    new = line_of("h.mT", DEEPER)
    assert verdict.time_causes[0].line == new
    assert "now computes" in verdict.time_causes[0].text
    assert f"First difference: {new} now computes dot_general" in verdict.sentence
    assert {c.line for c in verdict.time_causes if "now computes" in c.text} == {new}
    assert f"First difference: {new} no longer computes" in planned(DEEPER).inspect.diff(planned()).verdict().sentence


def test_operators_that_a_rule_made_are_named_after_the_rule() -> None:
    def loss(params, x):
        return jnp.mean((x @ params["a"] @ params["b"]) ** 2)

    args, machine = ({"a": f(512, 4096), "b": f(4096, 8)}, f(4096, 512)), unity.Machine.grid(1, 8, "v100")
    captured, rewritten = (unity.optimize(loss, *args, machine=machine, search=s, progress=False) for s in ("captured", "unity"))
    sides = (captured, rewritten, "now"), (rewritten, captured, "no longer")
    for before, after, word in sides:
        cause = before.inspect.diff(after).verdict().time_causes[0]
        assert cause.text.startswith(f"{word} rewritten by regroup-products; dot_general")


def test_weights_that_are_gathered_now_are_named_where_they_are_used() -> None:
    one, other = planned(search="data-parallel"), planned(search="fsdp")
    verdict = one.inspect.diff(other).verdict()
    # one gather serves both uses of the embedding, and is at the first
    uses = (("embedding", "table[ids]"), ("up", "jnp.tanh"), ("down", "jnp.tanh"))
    causes = {(c.line, c.text): c.amount for c in verdict.time_causes}
    for name, code in uses:
        leaf, line = arguments()[0][name], line_of(code)
        what, nbytes = f"args[0]['{name}']", size(4 * leaf.size)
        assert causes[line, f"now gathers {what} (all-gather of {nbytes} over all 8 devices)"] > 0
        assert causes[line, f"now adds up and scatters the gradient of {what} (reduce-scatter of {nbytes} over all 8 devices)"] > 0
        assert causes[line, f"no longer adds up the gradient of {what} (all-reduce of {nbytes})"] < 0
    assert "now gathers" in verdict.sentence


def test_weights_of_a_scan_are_named_where_a_step_uses_them() -> None:
    text = (
        "def body(h, w):\n    return jnp.tanh(h @ w), None\n\n"
        'def loss(params, x):\n    return (jax.lax.scan(body, x, params["layers"])[0] ** 2).mean()\n'
    )
    names: dict[str, Any] = {"jnp": jnp, "jax": jax}
    exec(compile(text, "/models/model.py", "exec"), names)
    args = {"layers": f(4, 256, 256)}, f(2048, 256)
    plans = [
        unity.optimize(names["loss"], *args, machine=EIGHT, search=search, budget=0, progress=False)
        for search in ("data-parallel", "fsdp")
    ]
    gathered = f"now gathers every step of args[0]['layers'] (all-gather of {size(4 * 4 * 256 * 256)} over all 8 devices)"
    causes = {c.text: c.line for c in plans[0].inspect.diff(plans[1]).verdict().time_causes}
    assert causes[gathered] == "model.py:2 (body)"


def test_every_format_says_the_same_figures() -> None:
    verdict = planned().inspect.diff(planned(DEEPER)).verdict(slower=0.01, larger=5.0)
    data = json.loads(verdict.formatted("json"))
    assert data == verdict.to_json()
    assert (data["accepted"], data["time"]["exceeded"], data["memory"]["exceeded"]) == (False, True, False)
    assert (data["time"]["before"], data["time"]["after"]) == (planned().time, planned(DEEPER).time)
    assert data["time"]["limit"] == 0.01
    for form in FORMATS:
        if form != "json":
            shown = verdict.formatted(form)
            for figure in (duration(planned().time), duration(planned(DEEPER).time), size(planned(DEEPER).memory), "exceeded"):
                assert figure in shown
    with pytest.raises(unity.PlanError, match="'dot' is no format of a verdict: expected one of text, markdown, json, html"):
        verdict.formatted("dot")
    markdown = verdict.formatted("markdown")
    assert markdown.startswith(f"# loss on {EIGHT.name}: this change makes a step ")
    assert "## refused" in markdown


def test_graphs_have_no_costs_to_judge() -> None:
    graph = Summary("graph", "", 0, 0.0, 0.0, planned().program.original, (), ())
    with pytest.raises(unity.PlanError, match="graphs have no costs"):
        PlanDiff(graph, summary_of(planned().program)).verdict(slower=0.05)


# --- warnings ---

MYSTERIOUS = COMMENTED.replace("    # a layer", "    h = unknown.bind(jax.lax.stop_gradient(h))")
SORTED = COMMENTED.replace("    # a layer", "    h = jnp.sort(h.reshape(-1)).reshape(h.shape)")
PRINTED = COMMENTED.replace("    # a layer", '    jax.debug.print("{}", h)')


@pytest.mark.parametrize(
    ("text", "vocabulary", "topic", "code", "says"),
    [
        (MYSTERIOUS, 4096, "unknown", "unknown.bind", "no entry for mystery in the operator table"),
        (SORTED, 4096, "whole", "jnp.sort", "none of its dimensions can be divided"),
        (PRINTED, 4096, "dropped", "jax.debug.print", "jax.debug.print is dropped from the plan"),
        (MODEL, 4095, "dimension", "table[ids]", "no axis divides dimension 0 of size 4095; the nearest size"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*dropped from the plan")
def test_a_new_warning_is_at_its_line_and_refused_if_strict(text: str, vocabulary: int, topic: str, code: str, says: str) -> None:
    plan = planned(text, vocabulary)
    found = [w for w in warnings_of(plan.program) if w.topic == topic]
    assert any(w.line == line_of(code, text) and says in w.text for w in found)
    verdict = planned().inspect.diff(plan).verdict(strict=True)
    assert not verdict.accepted
    assert set(found) <= set(verdict.new_warnings)
    assert planned().inspect.diff(plan).verdict().accepted
    assert says in str(verdict)


@pytest.mark.filterwarnings("ignore:.*dropped from the plan")
def test_a_warning_that_moved_is_not_new() -> None:
    for text in (MYSTERIOUS, SORTED, PRINTED):
        moved = "# moved\n\n\n" + text
        assert warnings_of(planned(text).program)
        assert not planned(text).inspect.diff(planned(moved)).verdict(strict=True).new_warnings


def test_a_model_that_is_divided_has_no_warnings() -> None:
    assert warnings_of(planned().program) == ()
