"""The difference of two programs as they run: of two plans, or of a plan and the program that it was made for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from unity.base import atomic_files as atomic
from unity.base.errors import PlanError
from unity.diff import document, edits, regions
from unity.diff.document import Document
from unity.diff.edits import REMOVED, Edit
from unity.diff.formats import dot, html, markdown, text
from unity.diff.formats import json as json_data
from unity.diff.graph_diff import GraphDiff, diff_matched
from unity.diff.lines import SAME_LINES, Renumbering, renumbered, renumbering
from unity.diff.matching import matching
from unity.diff.regions import Collectives, RegionDiff
from unity.diff.verdict import ChangeVerdict, GrowthLimits
from unity.plan.summary import RuleUse, Summary

FORMATS = ("text", "markdown", "json", "dot", "html")
FORMAT_OF_SUFFIX = {".txt": "text", ".md": "markdown", ".json": "json", ".dot": "dot", ".html": "html"}


@dataclass(frozen=True, eq=False)
class PlanDiff:
    """The difference of two programs as they run. It prints as text, and is false if nothing differs.

    Attributes:
        before: the summary of the captured program, of a plan, or of a graph (which has no costs).
        after: the summary of the plan, or of another plan or graph.
        same_source: whether both are of one version of the source. Of two versions, a line that moved is named as in the second.
    """

    before: Summary
    after: Summary
    same_source: bool = field(default=False, kw_only=True)

    @cached_property
    def partner(self) -> Mapping[int, int]:
        """The matched nodes: from indices in the first graph to indices in the second."""
        return matching(self.before.graph, self.after.graph)

    @cached_property
    def graph(self) -> GraphDiff:
        """The difference of the graphs, as a value that `unity.diff.apply` can apply."""
        return diff_matched(self.before.graph, self.after.graph, self.partner)

    @cached_property
    def line(self) -> Renumbering:
        """The line of the second program for every line of the first."""
        return SAME_LINES if self.same_source else renumbering(self.before.graph, self.after.graph, self.partner)

    @cached_property
    def renumbered(self) -> Summary:
        """The summary of the first program, with its lines named as in the second."""
        return renumbered(self.before, self.line)

    @cached_property
    def edits(self) -> tuple[Edit, ...]:
        """Every single difference of the graphs, in words."""
        every = edits.edits(self.before.graph, self.after.graph, self.partner)
        return tuple(replace(e, line=self.line(e.line)) if e.mark == REMOVED else e for e in every)

    @cached_property
    def regions(self) -> tuple[RegionDiff, ...]:
        """The differences by source line, with costs before and after."""
        return regions.regions(self.edits, self.renumbered, self.after, self.line)

    @cached_property
    def collectives(self) -> tuple[Collectives, ...]:
        """The collectives whose count or time differs."""
        return regions.collectives(self.renumbered, self.after)

    @cached_property
    def rules(self) -> tuple[tuple[str, RuleUse], ...]:
        """Rules that led to one of the programs only, in the order of their application, marked `-` (before) or `+` (after)."""
        before, after = self.renumbered, self.after
        pairs = (before.rules, after.rules), (before.applications, after.applications)
        removed = [("-", use) for one, other in pairs for use in one if use not in other]
        return (*removed, *(("+", use) for one, other in pairs for use in other if use not in one))

    def __bool__(self) -> bool:
        figures = {
            (s.machine, s.devices, s.time, s.memory, frozenset(s.work), frozenset(s.talk), s.rules, s.applications)
            for s in (self.renumbered, self.after)
        }
        return bool(self.graph) or len(figures) > 1

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
