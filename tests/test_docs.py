"""The code blocks of the tutorial and the how-tos run, in order, as one program each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["tutorial.md", "rewriting.md", "diff.md", "searches.md"])
def test_every_block_runs(page: str) -> None:
    names: dict[str, object] = {}
    found = blocks(page)
    assert found
    for block in found:
        exec(compile(block, page, "exec"), names)


def test_errors_link_to_pages_that_exist() -> None:
    """Every `(docs: page#section)` in an error message leads to a heading."""
    links = set()
    for file in (DOCS.parent / "unity").rglob("*.py"):
        links |= set(re.findall(r"\(docs: ([\w-]+)#([\w-]+)\)", file.read_text()))
    assert links
    for page, section in sorted(links):
        headings = re.findall(r"^#+ (.*)$", (DOCS / f"{page}.md").read_text(), re.MULTILINE)
        assert section in {re.sub(r"[^\w-]", "", h.lower().replace(" ", "-")) for h in headings}, (page, section)
