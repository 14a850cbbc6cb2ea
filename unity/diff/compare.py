"""Two programs as they run, compared: the third use of a parallel computation graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unity.diff.edits import Edit, edits
from unity.diff.graphs import Diff
from unity.diff.graphs.comparing import between
from unity.diff.graphs.matching import matching
from unity.diff.regions import Collectives, Cost, Region, collectives, regions
from unity.plan.summary import RuleUse, Summary

if TYPE_CHECKING:
    from unity.diff.document import Document

FORMATS = ("text", "markdown", "json", "dot", "html")


@dataclass(frozen=True, eq=False)
class PlanDiff:
    """What is different between two programs as they run. Printed, it is text; false if there is no difference.

    `before` and `after` are summaries: of the captured program and a plan, of two plans, or of two graphs (which have no costs).
    """

    before: Summary
    after: Summary

    @cached_property
    def partner(self) -> Mapping[int, int]:
        """Which node of the first graph is which of the second, by number."""
        return matching(self.before.graph, self.after.graph)

    @cached_property
    def graph(self) -> Diff:
        """The difference of the graphs, as a value that can be applied (`unity.diff.graphs.apply`)."""
        return between(self.before.graph, self.after.graph, self.partner)

    @cached_property
    def edits(self) -> tuple[Edit, ...]:
        """Every single difference of the graphs, in words."""
        return edits(self.before.graph, self.after.graph, self.partner)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """The differences by line of the user's, with costs before and after."""
        return regions(self.edits, self.before, self.after)

    @cached_property
    def collectives(self) -> tuple[Collectives, ...]:
        """Collectives of which there are more or fewer."""
        return collectives(self.before, self.after)

    @cached_property
    def rules(self) -> tuple[tuple[str, RuleUse], ...]:
        """Rules that led to the one program and not to the other, each marked `-` or `+`, in the order of their application."""
        pairs = (self.before.rules, self.after.rules), (self.before.applications, self.after.applications)
        gone = [("-", use) for one, other in pairs for use in one if use not in other]
        return (*gone, *(("+", use) for one, other in pairs for use in other if use not in one))

    def __bool__(self) -> bool:
        one, other = self.before, self.after
        figures = ((s.machine, s.devices, s.time, s.memory, s.work, s.talk, s.rules, s.applications) for s in (one, other))
        return bool(self.graph) or len(set(figures)) > 1

    @cached_property
    def document(self) -> Document:
        """All of it as headings and tables, which every format shows."""
        from unity.diff.document import document

        return document(self)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def text(self) -> str:
        """As plain text."""
        from unity.diff.formats.text import plain

        return plain(self.document)

    def show(self, file: Any = None) -> None:
        """Prints it, in colour if that is a terminal."""
        from unity.diff.formats.text import show

        show(self.document, file)

    def markdown(self) -> str:
        """As Markdown, for a pull request or a report."""
        from unity.diff.formats.markdown import markdown

        return markdown(self.document)

    def html(self) -> str:
        """As one HTML page that needs nothing else (the extra `html`)."""
        from unity.diff.formats.html import html

        return html(self.document)

    def dot(self) -> str:
        """Both graphs as one picture in Graphviz' language: added is green, removed red, changed yellow."""
        from unity.diff.formats.dot import dot

        return dot(self.before.graph, self.after.graph, self.partner)

    def to_json(self) -> dict[str, Any]:
        """As data for other tools; `graph` is what `unity.diff.graphs.data.from_json` reads."""
        from unity.diff.formats.json import data

        return data(self)

    def save(self, path: str | Path) -> None:
        """Writes it in the format that the file's name asks for: .txt, .md, .json, .dot or .html."""
        from unity.diff.files import save

        save(self, path)


def total(summary: Summary) -> tuple[float, float]:
    """Seconds that a step computes, and that it communicates."""
    return sum(w.seconds for w in summary.work), sum(t.seconds for t in summary.talk)


def costs(found: PlanDiff) -> dict[str, Cost]:
    """What the whole step takes, before and after."""
    (compute, talk), (compute_after, talk_after) = total(found.before), total(found.after)
    return {
        "one step": Cost(found.before.time, found.after.time),
        "computing": Cost(compute, compute_after),
        "communicating": Cost(talk, talk_after),
    }
