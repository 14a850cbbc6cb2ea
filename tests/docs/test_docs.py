"""The documentation is true: code blocks run, changed scripts compute what they did before, links and the site hold together.

A page's ```python blocks are one program, run in order. A ```diff block is a whole script, before and after. Blocks without a
language are command lines or outlines; test_cli_help reads the former.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from ci_cases import one_in

import unity
from unity.machine.machine import Machine
from unity.pcg.operators.table import TABLE
from unity.verify.semantics.primitives.core import MEANINGS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
SCRIPT = re.compile(r"^```diff\n(.*?)^```", re.DOTALL | re.MULTILINE)
MOST = 5  # lines of a script that unity takes
pytestmark = pytest.mark.filterwarnings("error:.*plan#former-names:DeprecationWarning")


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def scripts() -> dict[str, str]:
    """Changed scripts by page and number."""
    texts = {page: SCRIPT.findall((DOCS / page).read_text()) for page in PAGES}
    return {f"{page} {k}": text for page, found in texts.items() for k, text in enumerate(found, 1)}


@contextmanager
def imported_from(folder: Path) -> Iterator[None]:
    """What is imported from a folder is forgotten."""
    yield
    for name, module in list(sys.modules.items()):
        if folder in Path(getattr(module, "__file__", None) or "/").parents:
            del sys.modules[name]


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pages write where they like and register what they like; they wait for neither measuring nor long searches."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Machine, "local", classmethod(lambda cls, devices=None: unity.Machine.grid(1, 8, "a100")))
    monkeypatch.setattr("unity.transforms.rewriting.PROGRAMS", 40)  # enough to rewrite, where a page says that something is
    monkeypatch.syspath_prepend(tmp_path)
    with patch.dict(TABLE), patch.dict(MEANINGS), imported_from(tmp_path):
        yield


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_every_block_runs(page: str) -> None:
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks(page):
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("name", one_in(2, scripts()))
def test_a_changed_script_computes_what_it_did(name: str) -> None:
    lines = scripts()[name].splitlines()
    before, after = ("\n".join(line[1:] for line in lines if not line.startswith(sign)) for sign in "+-")
    assert sum(line.startswith("+") for line in lines) <= MOST
    found = []
    for script in (before, after):
        names: dict[str, object] = {"__name__": "script"}
        exec(compile(script, name, "exec"), names)
        found.append(names["losses"])
    assert "unity" not in before
    assert len(set(map(float, found[0]))) > 1  # it learns, so the gradients matter
    np.testing.assert_allclose(*found, rtol=2e-4)


def sections(page: str) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", (DOCS / f"{page}.md").read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings}


def test_errors_link_to_pages_that_exist() -> None:
    """Every `page#section` in a message, in one piece or put together, leads to a heading."""
    links = set()
    for file in (ROOT / "unity").rglob("*.py"):
        text = file.read_text()
        links |= set(re.findall(r"docs: ([\w-]+)#([\w-]+)", text)) | set(re.findall(r"['\"]([a-z-]+)#([a-z-]+)['\"]", text))
    assert len(links) > 10
    missing = [(page, s) for page, s in sorted(links) if not (DOCS / f"{page}.md").exists() or s not in sections(page)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    folder = (DOCS / page).parent
    for target, anchor in re.findall(r"\]\((?!https?:)([\w./-]*)(?:#([\w-]+))?\)", (DOCS / page).read_text()):
        path = (folder / target).resolve() if target else DOCS / page
        assert path.is_file(), target
        if anchor:
            assert anchor in sections(str(path.relative_to(DOCS).with_suffix(""))), (target, anchor)


def located(name: str) -> Any:
    """A module, or what is in one. (`unity.optimize` is a function and a module.)"""
    parts = name.split(".")
    for k in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:k]))
        except ModuleNotFoundError:
            continue
        for part in parts[k:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"there is no {name}")


def referred() -> set[str]:
    """What the reference describes, by its full name."""
    found = set()
    for path in (DOCS / "reference").glob("*.md"):
        for name, members in re.findall(r"^::: ([\w.]+)(?:\n +options:\n +members: \[(.*?)\])?", path.read_text(), re.MULTILINE):
            found |= {f"{name}.{member.strip()}" for member in members.split(",")} if members else {name}
    return found


def test_the_reference_describes_what_is_there() -> None:
    assert len(referred()) > 20
    for name in sorted(referred()):
        assert (inspect.getdoc(located(name)) or "").strip(), name


def test_everything_public_is_in_the_reference() -> None:
    described = [located(name) for name in referred()]
    within = [vars(thing).values() for thing in described if inspect.ismodule(thing)]
    for name in unity.__all__:
        assert any(getattr(unity, name) is thing for thing in [*described, *(x for found in within for x in found)]), name


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert sorted(re.findall(r"([\w/-]+\.md)", navigation)) == PAGES


@pytest.mark.skipif(
    shutil.which("mkdocs", path=str(Path(sys.executable).parent)) is None, reason="needs pip install 'unity-jax[docs]'"
)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "mkdocs"), "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        assert (tmp_path / "site" / page.removesuffix(".md").removesuffix("index") / "index.html").exists()
