"""The architecture page shows what the walkthrough prints."""

import re

import pytest
import walkthrough
from test_docs import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
SHOWN = re.findall(r"<!-- walkthrough: (\w+) -->\n```\n(.*?)\n```", PAGE, re.DOTALL)


def test_page_shows_every_form_of_the_search() -> None:
    assert [form for form, _ in SHOWN] == ["graph", "problem", "assignment", "parallel"]


@pytest.mark.parametrize(("form", "block"), SHOWN, ids=[form for form, _ in SHOWN])
def test_page_shows_what_is_printed(form: str, block: str) -> None:
    assert str(walkthrough.FORMS[form]()) == block


@pytest.mark.parametrize("form", walkthrough.FORMS)
def test_every_form_is_printed(form: str) -> None:
    assert str(walkthrough.FORMS[form]())


def test_local_program_communicates_what_the_parallel_graph_does() -> None:
    local, parallel = (str(walkthrough.FORMS[form]()) for form in ("local", "parallel"))
    assert local.count("lax.psum(") == parallel.count("= reduce(") == 1
