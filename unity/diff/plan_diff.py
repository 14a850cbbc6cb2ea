"""The difference of two programs as they run: of two plans, or of a plan and the program that it was made for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from unity.base import atomic_files as atomic
from unity.base.errors import PlanError
from unity.diff import document, edits, regions
from unity.diff.document import Document
from unity.diff.edits import Edit
from unity.diff.formats import dot, html, markdown, text
from unity.diff.formats import json as json_data
from unity.diff.graph_diff import GraphDiff, diff_matched
from unity.diff.matching import matching
from unity.diff.regions import Collectives, RegionDiff
from unity.plan.summary import RuleUse, Summary

FORMATS = ("text", "markdown", "json", "dot", "html")
FORMAT_OF_SUFFIX = {".txt": "text", ".md": "markdown", ".json": "json", ".dot": "dot", ".html": "html"}


@dataclass(frozen=True, eq=False)
class PlanDiff:
    """The difference of two programs as they run. It prints as text, and is false if nothing differs.

    `before` and `after` are summaries: of the captured program and a plan, of two plans, or of two graphs (which have no costs).
    """

    before: Summary
    after: Summary

    @cached_property
    def partner(self) -> Mapping[int, int]:
        """The matched nodes: from indices in the first graph to indices in the second."""
        return matching(self.before.graph, self.after.graph)

    @cached_property
    def graph(self) -> GraphDiff:
        """The difference of the graphs, as a value that `unity.diff.apply` can apply."""
        return diff_matched(self.before.graph, self.after.graph, self.partner)

    @cached_property
    def edits(self) -> tuple[Edit, ...]:
        """Every single difference of the graphs, in words."""
        return edits.edits(self.before.graph, self.after.graph, self.partner)

    @cached_property
    def regions(self) -> tuple[RegionDiff, ...]:
        """The differences by source line, with costs before and after."""
        return regions.regions(self.edits, self.before, self.after)

    @cached_property
    def collectives(self) -> tuple[Collectives, ...]:
        """The collectives whose count or time differs."""
        return regions.collectives(self.before, self.after)

    @cached_property
    def rules(self) -> tuple[tuple[str, RuleUse], ...]:
        """Rules that led to one of the programs only, in the order of their application, marked `-` (before) or `+` (after)."""
        pairs = (self.before.rules, self.after.rules), (self.before.applications, self.after.applications)
        removed = [("-", use) for one, other in pairs for use in one if use not in other]
        return (*removed, *(("+", use) for one, other in pairs for use in other if use not in one))

    def __bool__(self) -> bool:
        sides = (self.before, self.after)
        figures = ((s.machine, s.devices, s.time, s.memory, s.work, s.talk, s.rules, s.applications) for s in sides)
        return bool(self.graph) or len(set(figures)) > 1

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
        return dot.dot(self.before.graph, self.after.graph, self.partner)

    def to_json(self) -> dict[str, Any]:
        """Return the difference as data for other tools. `unity.diff.graph_diff_json.from_json` reads the value of `graph`."""
        return json_data.data(self)

    def formatted(self, form: str) -> str:
        """Return the difference in one of `FORMATS`, as the text of a file."""
        writers = {"text": self.text, "markdown": self.markdown, "dot": self.dot, "html": self.html}
        written = writers[form]() if form in writers else json.dumps(self.to_json(), indent=1)
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
