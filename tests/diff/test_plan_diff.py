"""`plan.inspect.diff()`: what a plan changed, said in every format, from the plan itself and from its file."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from ci_cases import fewer
from hypothesis import given, settings
from layered_model import EIGHT, arguments, f, line_of, loss, scanned
from test_graph import small_graphs
from test_joint import LAYERS as LAYERED
from test_joint import layers
from test_nested import CASES

import unity
from unity.base.formatting import joined_lines
from unity.diff import FORMATS, PlanDiff, apply
from unity.diff.formats.markdown import escaped
from unity.diff.graph_diff_json import from_json
from unity.diff.regions import line_pattern
from unity.pcg.ir.compact_json import fold, unfold
from unity.pcg.ir.graph import PARALLELIZATION, PCG
from unity.pcg.ir.graph_json import from_json as read_graph
from unity.pcg.ir.graph_json import to_json as graph_json
from unity.plan.files.plan_file import read, sealed, summaries
from unity.plan.summary import Summary
from unity.search.cost.prediction import predict

pytestmark = pytest.mark.usefixtures("own_cache")


LAYERS = 3


@cache
def planned(machine: unity.Machine = EIGHT, **options: Any) -> unity.Plan:
    return unity.optimize(loss, *arguments(LAYERS), machine=machine, progress=False, **options)


@cache
def own_diff() -> PlanDiff:
    return planned().inspect.diff()


# --- a plan against its program ---


def test_rules_are_the_derivations_with_their_source_lines() -> None:
    plan, found = planned(), own_diff()
    assert plan.program.rewriting
    steps = [(step.rule, step.backward) for step in plan.program.check_derivation()]
    said = [use.rule for mark, use in found.rules for _ in range(use.times) if mark == "+"]
    assert sorted(said) == sorted(f"{rule}{' (backward)' if backward else ''}" for rule, backward in steps)
    where = line_of('params["a"] @ params["b"]')
    assert all(any(line.startswith(where) for line in use.lines) for _, use in found.rules)
    assert where in str(found)


@pytest.mark.parametrize(("fn", "args"), [(layers, LAYERED), *CASES.values()], ids=["layers", *CASES])
def test_every_rule_of_a_derivation_is_at_its_source_line(fn: Any, args: Any) -> None:
    """Also in equal layers and in the nested programs of scans and remats, which are rewritten once."""
    plan = unity.optimize(fn, *args, machine=EIGHT, progress=False)
    found = plan.inspect.diff()
    steps = Counter(f"{step.rule}{' (backward)' if step.backward else ''}" for step in plan.program.check_derivation())
    said: Counter[str] = Counter()
    for _, use in found.rules:
        said[use.rule] += use.times
        regions = [r for r in found.regions if r.line in use.lines]
        assert regions
        assert all(use in r.rules for r in regions)
        assert any(edit.topic in ("operator", "move") for r in regions for edit, _ in r.edits)
    assert said == steps


def test_layers_of_one_source_line_are_one_region() -> None:
    (region,) = [r for r in own_diff().regions if r.line.startswith(line_of('layer["up"]'))]
    counts = {edit.kind: times for edit, times in region.edits if edit.mark == "~"}
    assert counts == {"dot_general": 2 * LAYERS, "gelu": LAYERS, "add": LAYERS}


def test_arguments_that_differ_in_numbers_only_are_one_region() -> None:
    def numbered(params: dict[str, Any], x: Any) -> Any:
        for k in range(4):
            x = jnp.tanh(x @ params[f"dense{k}"]["w"])
        return jnp.mean(x**2)

    params = {f"dense{k}": {"w": f(256, 256)} for k in range(4)}
    found = unity.optimize(numbered, params, f(4096, 256), machine=EIGHT, search="captured", progress=False).inspect.diff()
    (region,) = [r for r in found.regions if r.line.startswith("args[0]")]
    assert region.line == "args[0]['dense{0-3}']['w']"
    assert {edit.kind: often for edit, often in region.edits} == {"replicate": 4}
    (one,) = [c for c in found.collectives if c.alike.line.startswith("args[0]")]
    assert (one.alike.line, one.counts) == (region.line, (0, 4))
    assert one.seconds.after == pytest.approx(region.communicating.after)


def test_argument_paths_are_joined_by_their_numbers() -> None:
    assert line_pattern("args[1]['w10']['x'][2]") == "args[1]['w#']['x'][#]"
    assert line_pattern("model.py:12 (f1)") == "model.py:12 (f1)"
    assert joined_lines(["args[0]['w1']", "args[0]['w2']", "args[0]['w3']", "args[0]['w7']"]) == "args[0]['w{1-3,7}']"
    assert joined_lines(["args[0]['w1']['b2']", "args[0]['w2']['b3']"]) == "args[0]['w*']['b*']"
    assert joined_lines([f"args[0]['w{i}'][{k}]" for i in (1, 2) for k in (0, 5)]) == "args[0]['w{1-2}'][{0,5}]"


def test_costs_compare_one_device_with_the_plan() -> None:
    plan, found = planned(), own_diff()
    assert found.before.devices == 1
    assert found.before.time > plan.time
    assert found.after.time == plan.time
    prediction = predict(plan.program.pcg, plan.inspect.machine, plan.program.family.differentiated)
    assert sum(r.computing.after for r in found.regions) == pytest.approx(sum(t.forward + t.backward for t in prediction.operators))
    assert sum(r.communicating.after for r in found.regions) == pytest.approx(sum(t.seconds for t in prediction.collectives))
    assert sum(r.communicating.before for r in found.regions) == 0
    single = unity.optimize(loss, *arguments(LAYERS), machine=unity.Machine.grid(1, 1, "v100"), search="captured", progress=False)
    assert found.before.time == pytest.approx(single.time)


def test_collectives_are_the_ones_that_the_plan_adds() -> None:
    plan, found = planned(), own_diff()
    counts: dict[str, int] = {}
    for t in predict(plan.program.pcg, plan.inspect.machine, plan.program.family.differentiated).collectives:
        counts[t.collective.kind] = counts.get(t.collective.kind, 0) + t.collective.count
    said: dict[str, int] = {}
    for c in found.collectives:
        assert c.counts[0] == 0
        said[c.alike.kind] = said.get(c.alike.kind, 0) + c.counts[1]
    assert said == counts


def test_the_difference_of_the_graphs_can_be_applied() -> None:
    plan, found = planned(), own_diff()
    assert apply(found.graph, plan.program.original).key == plan.program.pcg.key
    assert apply(from_json(json.loads(json.dumps(found.to_json()))["graph"]), plan.program.original).key == plan.program.pcg.key
    assert {e.kind for e in found.edits if e.topic == "change"} <= PARALLELIZATION


def test_a_plan_for_one_device_has_no_collectives() -> None:
    plan = unity.optimize(loss, *arguments(LAYERS), machine=unity.Machine.grid(1, 1, "v100"), search="captured", progress=False)
    found = plan.inspect.diff()
    assert not found.edits
    assert not found.collectives
    assert not found.regions
    assert found.after.time == pytest.approx(found.before.time)


def test_differences_inside_a_scan_are_at_their_own_lines() -> None:
    plan = unity.optimize(scanned, {"layers": f(4, 512, 512)}, f(1024, 512), machine=EIGHT, search="captured", progress=False)
    (region,) = [r for r in plan.inspect.diff().regions if r.line.startswith(line_of("jnp.tanh(x @ layer)"))]
    assert any(edit.kind == "dot_general" for edit, _ in region.edits)
    assert region.computing.after < region.computing.before


def test_parallelization_by_rules_lists_every_rule() -> None:
    plan = planned(unity.Machine.grid(1, 2, "v100"), search="unity-rules", budget=300)
    uses = [use for _, use in plan.inspect.diff().rules]
    assert sum(use.times for use in uses) == len(plan.program.applications)
    assert {use.says for use in uses} == {a.rule for a in plan.program.applications}


# --- two plans ---


def test_a_plan_does_not_differ_from_itself() -> None:
    found = planned().inspect.diff(planned())
    assert not found
    assert "no difference" in str(found)
    assert repr(found) == str(found), "what a prompt shows"
    assert "no difference" in found.html()


def test_plans_with_two_memory_limits_differ() -> None:
    fast, lean = planned(), planned().frontier[-1]
    found = fast.inspect.diff(lean)
    assert found
    assert found.after.memory < found.before.memory
    assert not found.rules
    one, other = (
        {c.alike.kind: c.counts for c in found.collectives},
        {c.alike.kind: c.counts for c in lean.inspect.diff(fast).collectives},
    )
    assert one.keys() == other.keys()


def test_plans_for_two_machines_differ() -> None:
    found = planned().inspect.diff(planned(unity.Machine.grid(2, 4, "v100")))
    assert found
    assert re.search(r"mesh +device of 8 +node of 2 × device of 4", str(found))
    assert [a.name for a in found.graph.before.axes] == ["d0", "d1", "d2"]


def test_plans_of_two_programs_differ() -> None:
    def other(params: dict[str, Any], x: Any) -> Any:
        return loss(params, jnp.tanh(x))

    captured = planned(search="captured")
    plan = unity.optimize(other, *arguments(LAYERS), machine=EIGHT, search="captured", progress=False)
    added = [e for e in captured.inspect.diff(plan).edits if e.mark == "+" and e.topic == "operator"]
    assert [e.kind for e in added] == ["tanh"]
    assert not [e for e in captured.inspect.diff(plan).edits if e.mark == "-" and e.topic == "operator"]


# --- formats ---


@settings(max_examples=fewer(20))
@given(small_graphs(), small_graphs())
def test_any_two_graphs_have_a_diff_in_every_format(one: PCG, other: PCG) -> None:
    found = PlanDiff(*(Summary(name, "", 0, 0.0, 0.0, graph, (), ()) for name, graph in (("a", one), ("b", other))))
    for form in FORMATS:
        assert found.formatted(form)
    assert bool(found) >= bool(found.edits)


def test_text_is_plain_outside_a_terminal() -> None:
    file = io.StringIO()
    own_diff().show(file)
    assert "\x1b" not in file.getvalue()
    assert "\x1b" not in str(own_diff())
    for word in ("one step", "memory on each device", "dot_general", "whole → ", "collectives"):
        assert word in str(own_diff()), word


def test_a_terminal_gets_colours_and_text_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = io.StringIO()
    own_diff().show(file)
    assert "\x1b[32m" in file.getvalue()
    assert "\x1b" not in str(own_diff())


def test_markdown_tables_have_as_many_cells_as_columns() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", own_diff().markdown(), re.MULTILINE)
    assert tables
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1


@pytest.mark.parametrize("text", ["a|b", "<b>", "*x*", "_y_", "[l](m)", "`c`", "a\nb", "\\"])
def test_nothing_in_a_cell_is_markdown(text: str) -> None:
    assert re.sub(r"\\(.)", r"\1", escaped(text)) == text.replace("\n", " ")
    assert not re.search(r"(?<!\\)(?:\\\\)*[`*_\[\]<>|]", escaped(text))


class _Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.text, self.links = list[str](), list[str](), list[str]()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_self_contained_and_escapes_names() -> None:
    plan = planned()
    evil = "<script>alert('x')</script> & \"quotes\""
    found = own_diff()
    page = _Page(PlanDiff(renamed(found.before, evil), renamed(found.after, evil)).html())
    assert "script" not in page.tags
    assert "link" not in page.tags
    assert page.links == []
    assert any(evil in text for text in page.text)
    assert page.tags.count("table") == len(found.document.tables)
    assert plan.__name__ in found.html()


def renamed(s: Summary, name: str) -> Summary:
    fields = {k: getattr(s, k) for k in ("machine", "devices", "time", "memory", "graph", "work", "talk", "rules", "applications")}
    return Summary(name, **fields)


def test_dot_has_every_node_of_both_graphs() -> None:
    found = own_diff()
    text = found.dot()
    nodes = re.findall(r"^ *(n\w+) \[label=", text, re.MULTILINE)
    kept = len(found.before.graph.nodes) - len(found.graph.removed)
    every = kept + len(found.graph.removed) + len(found.graph.added) + len(found.after.graph.outputs)
    named = set(nodes)
    assert len(nodes) == len(named) == every
    assert all({a, b} <= named for a, b in re.findall(r"^ *(n\w+) -> (n\w+)", text, re.MULTILINE))


def test_the_suffix_selects_the_format(tmp_path: Path) -> None:
    for name, start in (("d.txt", "loss"), ("d.md", "# loss"), ("d.html", "<!DOCTYPE"), ("d.dot", "digraph"), ("d.json", "{")):
        own_diff().save(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(start)
    with pytest.raises(unity.PlanError, match=r"\.html"):
        own_diff().save(tmp_path / "d.pdf")


def test_without_jinja2_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(unity.UnityError, match=r"unity-jax\[html\]"):
        own_diff().html()


# --- data ---


def test_a_plan_as_data_for_other_tools() -> None:
    plan = planned()
    data = json.loads(json.dumps(plan.inspect.to_json()))
    assert read_graph(data["graph"]).key == plan.program.pcg.key
    assert data["time"] == plan.time
    assert {name for names in data["mesh_axes"].values() for name in names} == {"d0", "d1", "d2"}
    assert sum(row["seconds"] for row in (*data["work"], *data["talk"])) == pytest.approx(plan.time)


def test_the_diff_of_a_file_equals_the_plans(tmp_path: Path) -> None:
    plan = planned()
    plan.files.save(tmp_path / "plan.json")
    captured, saved = summaries("plan.json", read(tmp_path / "plan.json"))
    assert saved.graph.key == plan.program.pcg.key
    assert captured.graph.key == plan.program.original.key
    assert str(PlanDiff(captured, saved)) == str(own_diff())
    assert not PlanDiff(saved, plan.inspect.diff().after)


def test_damaged_summaries_are_refused(tmp_path: Path) -> None:
    planned().files.save(tmp_path / "plan.json")
    path = tmp_path / "plan.json"
    data = json.loads(path.read_text())
    for part, new in (("work", 3), ("graph", {}), ("schema", 99), ("rules", [{"rule": "x"}])):
        path.write_text(json.dumps(sealed({**data, "planned": {**data["planned"], part: new}})))
        with pytest.raises(unity.PlanError, match=rf"plan\.json is damaged at \$\.planned\.{part}"):
            summaries(path, read(path))
    path.write_text(json.dumps(sealed({k: v for k, v in data.items() if k != "captured"})))
    with pytest.raises(unity.PlanError, match=r"damaged at \$\.captured: it is missing"):
        read(path)


def test_compact_graphs_are_equal_and_smaller() -> None:
    for graph in (planned().program.pcg, planned().program.original):
        data = fold(graph)
        assert graph_json(unfold(json.loads(json.dumps(data)))) == graph_json(graph)
        assert len(json.dumps(data)) < len(json.dumps(graph_json(graph)))
