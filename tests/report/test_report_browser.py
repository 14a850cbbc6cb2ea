"""The report in a real browser (the extra `browser`): it complains of nothing, fetches nothing, and can be used by keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from layered_model import EIGHT, arguments, f, loss

import unity
from unity.pcg.capture.capture import capture
from unity.pcg.parallel.parallelize import on_one_device
from unity.plan.summary import Summary
from unity.report import Source, content, of_file, page, save
from unity.search.session import Candidate

api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'unity-jax[browser]'")

# Besides playwright's own, `playwright install chromium`.
INSTALLED = ("chromium", "chromium-browser", "google-chrome", "/usr/lib/chromium/chromium")
READY = "html[data-ready=yes]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, INSTALLED)), None)
        try:
            found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except api.Error as problem:
            pytest.skip(f"no Chromium can be started ({str(problem).splitlines()[0]}): playwright install chromium")
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The report of a plan, and of the plan's file."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        plan = unity.optimize(loss, *arguments(5), machine=EIGHT, progress=False)
        plan.files.save(folder / "plan.json")  # with some points of the frontier
        assert len(plan.frontier) > 2
        plan.files.report(folder / "plan.html")
    save(content(of_file(folder / "plan.json")), folder / "file.html")
    return {"plan": folder / "plan.html", "file": folder / "file.html"}


class Opened:
    """An opened page, and its errors."""

    def __init__(self, browser: Any, path: Path, scheme: str = "light") -> None:
        context = browser.new_context(viewport={"width": 1300, "height": 900}, color_scheme=scheme, reduced_motion="reduce")
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.fetched: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.fetched.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(READY, state="attached")

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("of", ["plan", "file"])
def test_the_page_has_no_errors_and_no_requests(browser: Any, pages: dict[str, Path], of: str, scheme: str) -> None:
    opened = Opened(browser, pages[of], scheme)
    for press in ("#unfold", "#steps button >> nth=0", "th button >> nth=0", "#legend button >> nth=1", "#points circle >> nth=0"):
        opened.page.locator(press).first.click()
    assert not opened.complaints
    assert [url for url in opened.fetched if not url.startswith("data:")] == [pages[of].as_uri()]
    ink, paper = (opened.page.evaluate(f"getComputedStyle(document.body).{what}") for what in ("color", "backgroundColor"))
    brightness = [sum(map(int, rgb[4:-1].split(","))) for rgb in (ink, paper)]
    assert (brightness[0] < brightness[1]) == (scheme == "light")


@pytest.mark.parametrize("of", ["plan", "file"])
def test_the_slider_goes_from_the_captured_program_to_the_plan(browser: Any, pages: dict[str, Path], of: str) -> None:
    opened = Opened(browser, pages[of])
    assert opened.text(".step h3") == "Parallelized"
    assert opened.count(".node.sends")
    opened.page.locator("#slider").focus()
    opened.page.keyboard.press("Home")
    assert opened.text(".step h3") == "As captured"
    assert not opened.count(".node.sends")
    opened.page.keyboard.press("ArrowRight")
    assert opened.text(".step h3") == "regroup-products"
    assert opened.count(".node.new")
    assert "layered_model.py" in opened.text(".step .rule >> nth=0")
    opened.page.keyboard.press("End")
    few = opened.count(".node")
    opened.page.locator("#unfold").check()
    assert opened.count(".node") > few


def test_operators_have_descriptions_and_keys_follow_edges(browser: Any, pages: dict[str, Path]) -> None:
    opened = Opened(browser, pages["plan"])
    node = opened.page.locator(".node.operator", has_text="gelu").first
    node.click()
    said = opened.text("#about")
    assert all(word in said for word in ("gelu", "forward", "backward", "held as", "layered_model.py"))
    opened.page.locator(".canvas").focus()
    opened.page.keyboard.press("ArrowUp")
    assert opened.text("#about h3 >> nth=0") == "dot_general"
    assert opened.count(".edge.near")
    opened.page.keyboard.press("ArrowDown")
    assert opened.text("#about h3 >> nth=0") == "gelu"
    opened.page.keyboard.press("Escape")
    assert not opened.count(".node.chosen")
    opened.page.get_by_label("Find").fill("layers.")
    lit = opened.page.locator(".node.lit").all_inner_texts()
    assert 0 < len(lit) < opened.count(".node")


def test_dragging_and_zooming_move_the_graph(browser: Any, pages: dict[str, Path]) -> None:
    opened = Opened(browser, pages["plan"])
    box = opened.page.locator(".canvas").bounding_box()
    place = lambda: opened.page.locator(".node").first.bounding_box()  # noqa: E731
    before = place()
    opened.page.mouse.move(box["x"] + 40, box["y"] + 200)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + 140, box["y"] + 260, steps=4)
    opened.page.mouse.up()
    after = place()
    assert (round(after["x"] - before["x"]), round(after["y"] - before["y"])) == (100, 60)
    assert not opened.count(".node.chosen")
    opened.page.get_by_label("Zoom in").first.click()
    assert place()["width"] > before["width"]


def test_a_partial_frontier_is_not_numbered(browser: Any, pages: dict[str, Path]) -> None:
    opened = Opened(browser, pages["file"])
    opened.page.locator("#points circle").last.click()
    assert "plan.frontier[" not in opened.text("#point")
    assert "plan.frontier searches for all" in opened.text("#points")
    assert not opened.complaints


def test_points_rows_and_arguments_can_be_selected(browser: Any, pages: dict[str, Path]) -> None:
    opened = Opened(browser, pages["plan"])
    assert "This plan" in opened.text("#point")
    opened.page.locator("#points circle").last.focus()
    opened.page.keyboard.press("Enter")
    assert "plan.frontier[" in opened.text("#point")
    assert "Otherwise than in this plan" in opened.text("#point")
    bytes_of = lambda: [float(t.split()[0]) for t in opened.page.locator("#talk tbody td:nth-child(2)").all_inner_texts()]  # noqa: E731
    head = opened.page.locator("#talk th").nth(1)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert bytes_of() == sorted(bytes_of(), reverse=True)
    head.locator("button").click()
    assert bytes_of() == sorted(bytes_of())
    row = opened.page.locator("#held tbody tr", has_text="args[1]")
    row.focus()
    opened.page.keyboard.press("Enter")
    assert opened.text("#devices h3") == "args[1]"
    opened.page.locator("#devices .grid >> nth=0").locator("rect").first.hover()
    held = opened.page.evaluate("document.querySelectorAll('#devices .grid')[1].querySelectorAll('.lit').length")
    whole = opened.page.evaluate("document.querySelectorAll('#devices .grid')[1].querySelectorAll('rect').length")
    assert whole == 8
    assert 0 < held < whole


@cache
def large() -> Source:
    """Return a plan with 1,000 operators whose layers all differ, so that none are folded."""

    def deep(x: Any) -> Any:
        for k in range(500):
            x = jnp.tanh(x) @ jnp.full((8, 8), float(k))
        return jnp.sum(x)

    captured = capture(deep, f(8, 8))
    graph = on_one_device(captured.graph)
    one, machine = Summary("deep", "one", 1, 1.0, 1.0, captured.graph, (), ()), unity.Machine.grid(1, 1, "v100")
    return Source(one, Summary("deep", "one", 1, 1.0, 1.0, graph, (), ()), machine, graph, Candidate(1.0, 1.0, empty()), (), True)


def empty() -> Any:
    from unity.pcg.parallel.parallelize import Assignment

    return Assignment((), {}, {}, {})


def test_a_graph_with_a_thousand_operators_is_drawn_completely(browser: Any, tmp_path: Path) -> None:
    assert len(large().serial) >= 1000
    text = page(content(large()))
    assert len(text.encode()) < 3e6
    (tmp_path / "large.html").write_text(text)
    opened = Opened(browser, tmp_path / "large.html")
    assert opened.count(".node") >= 1000
    assert not opened.complaints
