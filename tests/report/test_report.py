"""The report: what is drawn and where, what is said, and that the page needs nothing but itself. (See test_report_browser, too.)"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from html import unescape
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ci_cases import by_hand, fewer
from hypothesis import given, settings
from layered_model import EIGHT, arguments, f, loss, scanned, towers, towers_arguments
from test_graph import small_graphs
from test_joint import LAYERS as LAYERED
from test_joint import layers

import unity
from unity.base.documents import encoded, parsed, typed
from unity.base.errors import PlanError, UnityError
from unity.cli import main
from unity.explain.brief import gap_in_words
from unity.pcg.capture.capture import capture
from unity.pcg.capture.repetition import repeated
from unity.pcg.ir.compact_json import FoldedGraphs, fold, folded_all, unfolded_all
from unity.pcg.ir.graph import PCG
from unity.plan.argument_kinds import argument_kinds
from unity.plan.files.plan_file import sealed
from unity.report import Source, content, of_file, of_plan, page
from unity.report.arguments import slices
from unity.report.drawing import OUTSIDE, drawing_of
from unity.report.layout import lay_out
from unity.report.level_layout import ItemRank, LevelEdge, LevelItem, closest_positions, level_layout
from unity.report.page import data
from unity.report.steps import ComparedStep, all_steps, compared

pytestmark = pytest.mark.usefixtures("own_cache")


LAYERS = 4


def example() -> Any:
    return loss, arguments(LAYERS)


@cache
def planned() -> unity.Plan:
    plan = unity.optimize(loss, *arguments(LAYERS), machine=EIGHT, progress=False)
    assert len(plan.frontier) > 10  # so all of it is shown
    return plan


@cache
def planned_scan() -> unity.Plan:
    return unity.optimize(scanned, {"layers": f(4, 256, 256)}, f(1024, 256), machine=EIGHT, progress=False)


@cache
def own_content() -> dict[str, Any]:
    return content(of_plan(planned()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "plan.json"
    planned().files.save(path)
    return path


@pytest.fixture
def file(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(saved, tmp_path / "plan.json"))


def without_its_report(file: Path) -> Path:
    """Return the file as versions of unity wrote it that kept no report."""
    whole = json.loads(file.read_text())
    del whole["report"]
    file.write_text(json.dumps(sealed(whole)))
    return file


def steps_of(source: Source) -> list[ComparedStep]:
    between = None if source.figures is None else source.figures.steps
    return list(compared(all_steps(source.captured, source.planned, between)))


# --- positions ---


@st.composite
def levels(draw: st.DrawFn) -> tuple[list[LevelItem], list[LevelEdge]]:
    count = draw(st.integers(1, 14))
    rank = st.sampled_from([ItemRank.ANY, ItemRank.ANY, ItemRank.ANY, ItemRank.LATE])
    items = [LevelItem(draw(st.integers(2, 90)), draw(st.integers(0, 40)), draw(rank)) for _ in range(count)]
    pairs = draw(st.sets(st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)), max_size=24))
    return items, [LevelEdge(a, b) for a, b in sorted(pairs) if a < b]


@given(levels())
def test_items_of_a_level_do_not_overlap_and_edges_point_down(level: tuple[list[LevelItem], list[LevelEdge]]) -> None:
    items, links = level
    found = level_layout(items, links)
    for (x, y), item in zip(found.corners, items, strict=True):
        assert -1e-6 <= x <= found.width - item.width + 1e-6
        assert -1e-6 <= y <= found.height - item.height + 1e-6
    for (i, (x, y)), (j, (u, v)) in combinations(enumerate(found.corners), 2):
        apart = x + items[i].width <= u + 1e-6 or u + items[j].width <= x + 1e-6
        assert apart or y + items[i].height <= v + 1e-6 or v + items[j].height <= y + 1e-6
    for link in links:
        route = found.routes[link]
        (x, y), (u, v) = found.corners[link.source], found.corners[link.target]
        assert route[0] == pytest.approx((x + items[link.source].width / 2, y + items[link.source].height))
        assert route[-1] == pytest.approx((u + items[link.target].width / 2, v))
        heights = [y for _, y in route]
        assert heights == sorted(heights)
        assert heights[0] < heights[-1]


numbers = st.integers(-50, 50).map(float)


@given(st.lists(st.tuples(numbers, st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=7), st.randoms())
def test_positions_are_the_closest_at_minimum_distances(desired: list[tuple[float, int, int]], random: Any) -> None:
    want, weights, gaps = [w for w, _, _ in desired], [float(w) for _, w, _ in desired], [0.0, *(float(g) for *_, g in desired[1:])]

    def cost(at: list[float]) -> float:
        return sum(w * (x - y) ** 2 for w, x, y in zip(weights, at, want, strict=True))

    found = closest_positions(want, weights, gaps)
    assert all(b - a >= gap - 1e-9 for a, b, gap in zip(found, found[1:], gaps[1:], strict=False))
    for _ in range(20):  # no step inside of what is allowed makes it better: it is convex, so a short one would
        other = sorted(x - o + random.uniform(-5, 5) for x, o in zip(found, np.cumsum(gaps), strict=True))
        near = [x + 0.1 * (y + o - x) for x, y, o in zip(found, other, np.cumsum(gaps), strict=True)]
        assert cost(near) >= cost(found) - 1e-6


# --- what is drawn ---


def reads(graph: PCG) -> Counter[tuple[int, int]]:
    return Counter({(id(v.node), id(n)): 1 for n in graph.nodes for v in n.operands})


@given(small_graphs())
def test_every_operator_and_edge_of_a_graph_is_drawn(graph: PCG) -> None:
    drawing = drawing_of(graph, fold=False)
    drawn = [leaf.node for leaf in drawing.leaves]
    there = (id(n) for n, _ in graph.walk() if n.inside is None and shown(n, graph))
    assert Counter(id(n) for n in drawn if n is not None) == Counter(there)
    if all(n.inside is None for n in graph.nodes):
        edges = {(id(drawn[a]), id(drawn[b])) for a, b in drawing.edges if drawn[b] is not None}
        assert edges == set(reads(graph))


def shown(node: Any, graph: PCG) -> bool:
    """Return whether a node is drawn. Inputs of nested graphs are drawn as the values that they are."""
    return node.kind != "input" or any(node is n for n in graph.inputs)


@pytest.mark.parametrize("of", ["original", "pcg"])
def test_repeated_layers_are_drawn_once(of: str) -> None:
    graph = getattr(planned().program, of)
    assert repeated(graph)
    drawing = drawing_of(graph, fold=True)
    operators = [leaf for leaf in drawing.leaves if leaf.node is not None]
    assert len(operators) < len(graph.nodes)
    assert sum(leaf.times for leaf in operators) == len(graph.nodes)
    assert len(drawing.boxes) == 1 + len(repeated(graph))
    for leaf in operators:  # an argument that only a layer reads is in its box
        if leaf.node is not None and leaf.node.kind == "input" and leaf.times > 1:
            assert leaf.box != OUTSIDE
    assert drawing.carried


def test_equal_arguments_of_one_operator_are_drawn_once() -> None:
    def stacked(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.einsum("bi,kij->bkj", x, jnp.stack([p["w"] for p in params["layers"]])) * params["scale"])

    params = {"layers": [{"w": f(8, 8)} for _ in range(5)], "scale": f(8)}
    graph = capture(stacked, params, f(4, 8)).graph
    drawing = drawing_of(graph, fold=True)
    inputs = [leaf for leaf in drawing.leaves if leaf.node is not None and leaf.node.kind == "input"]
    assert sorted(leaf.times for leaf in inputs) == [1, 1, 5]
    (many,) = [k for k, leaf in enumerate(drawing.leaves) if leaf.times == 5]
    assert sum(drawing.places[id(n)] == many for n in graph.inputs) == 5
    assert sum(source == many for source, _ in drawing.edges) == 1
    assert sum(leaf.node is not None and leaf.node.kind == "input" for leaf in drawing_of(graph, fold=False).leaves) == 7


def test_a_scan_is_a_box_with_an_edge_for_its_carry() -> None:
    drawing = drawing_of(planned_scan().program.pcg, fold=True)
    (scan,) = [k for k, box in enumerate(drawing.boxes) if box.title == "scan, 4 steps"]
    assert {box for _, box in drawing.carried} == {scan}
    inside = {leaf.node.kind for leaf in drawing.leaves if leaf.node is not None and leaf.box == scan}
    assert inside == {"dot_general", "elementwise"}


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("plan", [planned, planned_scan])
def test_leaves_are_inside_their_boxes_and_edges_are_routed(plan: Any, fold: bool) -> None:
    drawing = drawing_of(plan().program.pcg, fold)
    found = lay_out(drawing, lambda k: (80.0, 30.0))
    for leaf, (x, y) in zip(drawing.leaves, found.corners, strict=True):
        box = found.frames[leaf.box]
        assert box.x - 1 <= x <= box.x + box.width - 79
        assert box.y - 1 <= y <= box.y + box.height - 29
    for k, box in enumerate(drawing.boxes[1:], 1):
        inner, outer = found.frames[k], found.frames[box.parent]
        assert outer.x - 1 <= inner.x <= outer.x + outer.width - inner.width + 1
        assert outer.y - 1 <= inner.y <= outer.y + outer.height - inner.height + 1
    for source, target in drawing.edges:
        ways = [r.points for r in found.routes if r.source == source and target in r.targets]
        x, y = found.corners[source]
        assert any(w[0] == pytest.approx((x + 40, y + 30)) for w in ways)
        x, y = found.corners[target]
        assert any(w[-1] == pytest.approx((x + 40, y)) for w in ways)
        ends = {(round(p[0]), round(p[1])) for w in ways for p in (w[0], w[-1])}
        inner = Counter((round(p[0]), round(p[1])) for w in ways for p in (w[0], w[-1]))
        assert sum(n == 1 for n in inner.values()) == 2, ends  # the pieces hang together: two ends are loose


# --- the steps ---


@cache
def planned_layers() -> unity.Plan:
    return unity.optimize(layers, *LAYERED, machine=EIGHT, progress=False)


@pytest.mark.parametrize("of", [planned, *by_hand(planned_layers)])
def test_steps_lead_from_the_captured_program_to_the_plan(of: Any) -> None:
    plan = of()
    steps = steps_of(of_plan(plan))
    assert steps[0].step.graph.key == plan.program.original.key
    assert steps[-1].step.graph.key == plan.program.pcg.key
    assert plan.program.rewriting
    assert [u.rule for s in steps[1:-1] for u in s.step.uses] == [use.rule for use in plan.program.rewriting.uses]
    assert sum(u.times for s in steps[1:-1] for u in s.step.uses) == len(plan.program.check_derivation())
    assert steps[-2].step.graph.key == plan.program.serial.key
    for one, other in pairwise(steps):
        assert one.step.graph.key != other.step.graph.key
        assert other.difference
        assert len(set(other.keys.values())) == len(other.keys)
    assert all(set(s.keys) == {id(n) for n, _ in s.step.graph.walk()} for s in steps)
    kept = set(steps[0].keys.values()) & set(steps[-1].keys.values())
    assert len(kept) > 0.8 * len(steps[0].keys)
    assert all(s.marked for s in steps[1:-1])


def test_a_rewriting_without_rules_has_no_steps() -> None:
    rewriting = planned_layers().program.rewriting
    assert rewriting
    assert list(replace(rewriting, ways={}).graphs(16)) == []


@pytest.mark.parametrize("of", [planned, planned_layers])
def test_the_steps_of_a_file_equal_the_plans(of: Any, tmp_path: Path) -> None:
    of().files.save(tmp_path / "plan.json")
    for live, filed in zip(steps_of(of_plan(of())), steps_of(of_file(tmp_path / "plan.json")), strict=True):
        assert (live.step.title, live.step.says, live.step.uses) == (filed.step.title, filed.step.says, filed.step.uses)
        assert live.step.graph.key == filed.step.graph.key
        assert live.difference == filed.difference
        marked = [[id(n) in s.marked for n, _ in s.step.graph.walk()] for s in (live, filed)]
        assert marked[0] == marked[1]


@given(st.lists(small_graphs(), max_size=2))
@settings(max_examples=fewer(12))
def test_graphs_survive_being_folded_together(graphs: list[PCG]) -> None:
    found = folded_all([*graphs, *graphs])
    assert [g.key for g in unfolded_all(typed(parsed(encoded(found)), FoldedGraphs))] == [g.key for g in graphs] * 2
    assert len(found.contents) <= sum(len(fold(g)["contents"]) for g in graphs)


def test_a_file_without_steps_shows_the_rules_at_their_lines(file: Path) -> None:
    source = of_file(without_its_report(file))
    steps = steps_of(source)
    assert [s.step.title for s in steps] == ["As captured", *(u.rule for u in source.planned.rules), "Rewritten", "Parallelized"]
    assert steps[-2].step.graph.key == planned().program.serial.key
    for step, use in zip(steps[1:], source.planned.rules, strict=False):
        sources = {n.source for n, _ in step.step.graph.walk() if id(n) in step.marked}
        assert sources
        assert all(any(line.split(" ")[0] in where for line in use.lines) for where in sources)


def test_a_pipeline_is_a_step(tmp_path: Path) -> None:
    model = {"layers": f(4, 256, 256)}, f(1024, 256)
    plan = unity.optimize(scanned, *model, machine=EIGHT, progress=False, pipeline=unity.PipelineShape(2, 4))
    live = content(of_plan(plan))
    assert [frame["title"] for frame in live["frames"]][-2:] == ["In stages", "Parallelized"]
    plan.files.save(tmp_path / "plan.json")
    filed = content(of_file(tmp_path / "plan.json"))
    assert [frame["title"] for frame in filed["frames"]][-2:] == ["In stages", "Parallelized"]
    bare = content(of_file(without_its_report(tmp_path / "plan.json")))
    assert [frame["title"] for frame in bare["frames"]][-2:] == ["Rewritten", "Parallelized"]
    for found in (live, filed, bare):
        titles = {found["shared"][box[4]] for box in found["pictures"][-1]["boxes"]}
        assert "pipeline, 2 stages, 4 micro-batches" in titles


def test_branches_are_a_step(tmp_path: Path) -> None:
    plan = unity.optimize(towers, *towers_arguments(), machine=EIGHT, progress=False, search="captured", branch_groups=2)
    plan.files.save(tmp_path / "plan.json")
    for source in (of_plan(plan), of_file(tmp_path / "plan.json")):
        found = content(source)
        assert [frame["title"] for frame in found["frames"]][-2:] == ["On groups of devices", "Parallelized"]
        assert "at the same time" in found["frames"][-2]["says"]
        assert "branches" in {found["shared"][box[4]] for box in found["pictures"][-1]["boxes"]}


# --- who holds what ---


@pytest.mark.parametrize("plan", [planned, planned_scan])
def test_slices_agree_with_the_shardings(plan: Any) -> None:
    graph = plan().program.pcg
    shardings = jax.tree.leaves(plan().in_shardings)
    assert len(shardings) == len(graph.inputs)
    for node, sharding in zip(graph.inputs, shardings, strict=True):
        shape = node.tensors[0].shape
        held = sharding.devices_indices_map(shape)
        piece = sharding.shard_shape(shape)
        wanted = [tuple((cut.start or 0) // n for cut, n in zip(held[d], piece, strict=True)) for d in jax.devices()[:8]]
        assert slices(node.types[0], graph.axes, len(shape)) == wanted


def test_equal_arguments_are_one_row() -> None:
    rows = {a["name"]: a for a in own_content()["arguments"]}
    assert rows["args[0]['layers'][*]['up']"]["count"] == sum(
        k.count for k in argument_kinds(planned().program.pcg) if k.name == "args[0]['layers'][*]['up']"
    )
    assert sum(a["count"] for a in own_content()["arguments"]) == 2 * LAYERS + 3
    assert sum(a["here"][0] for a in own_content()["arguments"]) < sum(a["whole"][0] for a in own_content()["arguments"])


# --- the document ---


def test_descriptions_of_operators_add_up_to_the_plans_figures() -> None:
    found = own_content()
    rows = found["collectives"]
    summary = of_plan(planned()).planned
    assert sum(r[1] for r in rows) == sum(t.count for t in summary.talk)
    assert [r[4][0] for r in rows] == sorted((t.seconds for t in summary.talk), reverse=True)
    assert sum(r[2][0] + r[3][0] for r in found["lines"]) == pytest.approx(planned().time)
    memory = found["memory"]
    assert sum(p[1] for p in memory["parts"]) - sum(p[1] for p in memory["less"]) == pytest.approx(planned().memory)
    assert sum(r[3][0] for r in memory["rows"]) == pytest.approx(planned().memory)
    for row in found["timeline"]["rows"]:
        assert all(0 <= start <= start + length <= 1e5 + 1 for start, length, _ in row["bars"])


def test_pictures_refer_to_existing_texts_and_leaves() -> None:
    found = own_content()
    for picture in (*found["pictures"], found["whole"]):
        count = len(picture["nodes"])
        assert all(0 <= number < len(found["shared"]) for n in picture["nodes"] for number in (n[4], n[5], n[9]))
        assert all(0 <= k < count for source, targets, _ in picture["edges"] for k in (source, *targets))
        assert len({n[8] for n in picture["nodes"]}) == count
    assert len(found["whole"]["nodes"]) == len(planned().program.pcg.nodes) + 1
    described = [dict(found["shared"][n[9]]) for n in found["pictures"][-1]["nodes"]]
    products = [d for d in described if d.get("computes") == "dot_general"]
    assert products
    assert all({"result", "held as", "line", "forward", "backward"} <= d.keys() for d in products)
    assert any("rewritten by" in d for d in products)


def test_points_of_the_frontier_list_their_differences() -> None:
    points = own_content()["frontier"]["points"]
    assert [(p["time"], p["memory"]) for p in points] == [(p.time, p.memory) for p in planned().frontier]
    assert [bool(p["differs"]) for p in points] == [not p["chosen"] for p in points]
    assert sum(p["chosen"] for p in points) == 1


def test_the_report_says_how_far_the_plan_is_at_most_from_the_best(tmp_path: Path) -> None:
    assert own_content()["gap"] == gap_in_words(planned())
    planned().files.report(tmp_path / "report.html")
    assert gap_in_words(planned())[1:] + ".</p>" in (tmp_path / "report.html").read_text()


def test_the_report_of_a_file_equals_the_plans(file: Path) -> None:
    assert data(content(of_file(file))) == data(own_content())


def test_a_file_without_its_report_shows_what_its_summary_has(file: Path) -> None:
    live, filed = own_content(), content(of_file(without_its_report(file)))

    def points(found: dict[str, Any]) -> list[Any]:
        return [{**p, "differs": [found["shared"][t] for t in p["differs"]]} for p in found["frontier"]["points"]]

    for part in ("collectives", "lines", "arguments", "figures", "legend", "mesh", "rules"):
        assert live[part] == filed[part]
    assert points(live) == points(filed)
    assert [n[:4] for n in live["pictures"][-1]["nodes"]] == [n[:4] for n in filed["pictures"][-1]["nodes"]]
    assert "unity.load" in filed["timeline"]["missing"]
    assert filed["memory"]["whole"] == live["memory"]["whole"]


# --- the page ---


class Tags(HTMLParser):
    """A parser that checks that all tags are closed, and collects links."""

    VOID = frozenset({"meta", "link", "input", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open += [] if tag in self.VOID else [tag]
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "action", "data")]
        self.ids += [v or "" for k, v in attrs if k == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_self_contained() -> None:
    text = page(own_content())
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert tags.links
    assert all(link.startswith(("#", "data:,")) for link in tags.links)
    assert all(link[1:] in tags.ids for link in tags.links if link.startswith("#"))
    assert len(set(tags.ids)) == len(tags.ids)
    assert set(re.findall(r"https?://[^\"'\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\(|eval\(|innerHTML", text)
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert inside is not None
    assert json.loads(inside[1]) == json.loads(json.dumps(own_content()))


def test_no_data_end_the_script_element() -> None:
    hostile = {"name": "</script><script>alert(1)</script><!--", "line": "a\u2028b"}
    assert "<" not in data(hostile)
    assert json.loads(data(hostile)) == hostile


def test_reports_of_files_and_plans_are_written(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    planned().files.report(tmp_path / "live.html")
    assert (tmp_path / "live.html").read_text() == page(own_content())
    assert main(["report", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "plan.html")
    assert (tmp_path / "plan.html").read_text() == page(content(of_file(file)))
    assert main(["report", str(file), "test_report:example", "-o", str(tmp_path / "again.html")]) == 0
    again, live = ((tmp_path / name).read_text() for name in ("again.html", "live.html"))
    assert "forward" in again
    assert len(again) == pytest.approx(len(live), rel=0.01)
    capsys.readouterr()
    assert main(["report", str(file), "-o", str(tmp_path / "none" / "page.html")]) == 1
    assert "cannot be written: No such file" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.part"))


def test_other_files_are_refused(file: Path, tmp_path: Path) -> None:
    whole = json.loads(file.read_text())
    for change, message in (
        ({"unity": "graph"}, "is a graph, not a plan"),
        ({"schema": 4}, "plan schema 4"),
        ({"planned": None}, r"damaged at \$\.planned: expected object, got null"),
        ({"machine": {}}, "damaged"),
        ({"points": [{"time": 1.0, "memory": 1.0, "nodes": [], "outputs": []}]}, "damaged"),
        ({"report": {}}, r"damaged at \$\.report\.steps: it is missing"),
        (
            {"report": {**whole["report"], "costs": {"rows": [], "nodes": []}}},
            r"damaged at \$\.report\.costs\.nodes: expected the number",
        ),
        ({"report": {**whole["report"], "steps": {"told": [], "graphs": {}}}}, r"damaged at \$\.report\.steps\.graphs"),
    ):
        path = tmp_path / "other.json"
        path.write_text(json.dumps(sealed({**whole, **change})))
        with pytest.raises(PlanError, match=message) as problem:
            of_file(path)
        assert "other.json" in str(problem.value)


def test_without_jinja2_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UnityError, match=r"unity-jax\[html\]"):
        planned().files.report(tmp_path / "page.html")
    assert not list(tmp_path.glob("page*"))
    assert "layers" in planned()._repr_html_()  # which needs none


def test_a_notebook_shows_a_summary_of_a_plan() -> None:
    text = planned()._repr_html_()
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert unescape(text) == f"<pre>{planned()}</pre>"
    assert "on v100-1x8" in text
    assert "args[0][&#x27;layers&#x27;][*]" in text


def test_a_plan_for_one_device_without_rules_has_a_report() -> None:
    one = unity.Machine.grid(1, 1, "v100")
    plan = unity.optimize(lambda x: jnp.sum(x**2), f(8), machine=one, search="captured", progress=False)
    found = content(of_plan(plan))
    assert [frame["title"] for frame in found["frames"]] == ["As captured", "Parallelized"]
    assert not found["collectives"]
    assert found["arguments"][0]["devices"] == [0]
    tags = Tags()
    tags.feed(page(found))
    assert not tags.open
