"""The difference of two plans, in every format and with a verdict on it."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from unity.base import atomic_files as atomic
from unity.base.errors import PlanError
from unity.diff import document
from unity.diff.comparison import PlanComparison
from unity.diff.document import Document
from unity.diff.formats import dot, html, markdown, text
from unity.diff.formats import json as json_data
from unity.diff.verdict import ChangeVerdict, GrowthLimits

FORMATS = ("text", "markdown", "json", "dot", "html")
FORMAT_OF_SUFFIX = {".txt": "text", ".md": "markdown", ".json": "json", ".dot": "dot", ".html": "html"}


class PlanDiff(PlanComparison):
    """The difference of two programs as they run. It prints as text, and is false if nothing differs."""

    def verdict(self, *, slower: float | None = None, larger: float | None = None, strict: bool = False) -> ChangeVerdict:
        """Return whether the change from the first plan to the second is within limits, and which lines cause it (docs: ci).

        Args:
            slower: the growth of a step's time that is admitted, as a part of the time before (0.05 is 5 %); None admits any.
            larger: the growth of the memory on each device that is admitted, likewise.
            strict: whether new warnings are refused.

        Raises:
            PlanError: one of the two is a graph, which has no costs.
        """
        return ChangeVerdict(self, GrowthLimits(slower, larger, strict))

    @cached_property
    def document(self) -> Document:
        """The difference as headings and tables, which text, Markdown and HTML lay out."""
        return document.document(self)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def text(self) -> str:
        """Return the difference as plain text."""
        return text.plain(self.document)

    def show(self, file: Any = None) -> None:
        """Print the difference, in colour on a terminal."""
        text.show(self.document, file)

    def markdown(self) -> str:
        """Return the difference as Markdown, for a pull request or a report."""
        return markdown.markdown(self.document)

    def html(self) -> str:
        """Return the difference as one self-contained HTML page (needs the extra `html`)."""
        return html.html(self.document)

    def dot(self) -> str:
        """Return both graphs as one picture in the DOT language: added nodes are green, removed ones red, changed ones yellow."""
        return dot.dot(self.shown[0].graph, self.shown[1].graph, self.partner)

    def to_json(self) -> dict[str, Any]:
        """Return the difference as data for other tools. `unity.diff.graph_diff_json.from_json` reads the value of `graph`."""
        return json_data.data(self)

    def formatted(self, form: str) -> str:
        """Return the difference in one of `FORMATS`, as the text of a file. Raises PlanError for any other."""
        if form not in FORMATS:
            raise PlanError(f"{form!r} is no format of a difference: expected one of {', '.join(FORMATS)}")
        writers = {"text": self.text, "markdown": self.markdown, "dot": self.dot, "html": self.html}
        written = json.dumps(self.to_json(), indent=1) if form == "json" else writers[form]()
        return written if written.endswith("\n") else written + "\n"

    def save(self, path: str | Path) -> None:
        """Write the difference to a file, in the format of the file's suffix: .txt, .md, .json, .dot or .html.

        An existing file is replaced as a whole or not at all.

        Raises:
            PlanError: the file has another suffix.
        """
        form = FORMAT_OF_SUFFIX.get(Path(path).suffix)
        if form is None:
            formats = ", ".join(FORMAT_OF_SUFFIX)
            raise PlanError(f"{path}: a diff is saved as one of {formats}; end the file's name so, or say the format")
        atomic.save(path, self.formatted(form))
