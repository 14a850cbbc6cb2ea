"""The comparison of two programs as they run: two plans, or a plan and the program that it was made for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from unity.diff import edits, regions
from unity.diff.edits import REMOVED, Edit
from unity.diff.graph_diff import GraphDiff, diff_matched
from unity.diff.lines import SAME_LINES, Renumbering, renumbered, renumbering
from unity.diff.matching import matching
from unity.diff.program_difference import FirstDifference, first_difference
from unity.diff.regions import Collectives, RegionDiff
from unity.pcg.ir.graph import PCG
from unity.pcg.parallel.axis_names import AxisNames
from unity.plan.summary import RuleUse, Summary


@dataclass(frozen=True, eq=False)
class PlanComparison:
    """Two programs as they run, and all their differences. It is false if nothing differs.

    Attributes:
        before: the summary of the captured program, of a plan, or of a graph (which has no costs).
        after: the summary of the plan, or of another plan or graph.
        same_source: whether both are of one version of the source. Of two versions, a line that moved is named as in the second.
        captured: the programs that the two plans are for, before any rule changed them; None if they are not known.
    """

    before: Summary
    after: Summary
    same_source: bool = field(default=False, kw_only=True)
    captured: tuple[PCG, PCG] | None = field(default=None, kw_only=True)

    @cached_property
    def partner(self) -> Mapping[int, int]:
        """The matched nodes: from indices in the first graph to indices in the second."""
        return matching(self.before.graph, self.after.graph)

    @cached_property
    def graph(self) -> GraphDiff:
        """The difference of the graphs, as a value that `unity.diff.apply` can apply."""
        return diff_matched(self.before.graph, self.after.graph, self.partner)

    @cached_property
    def first(self) -> FirstDifference | None:
        """The first difference of the captured programs, None if they do not differ or are not known."""
        return first_difference(*self.captured) if self.captured and self.captured[0].key != self.captured[1].key else None

    @cached_property
    def names(self) -> tuple[AxisNames, AxisNames]:
        """The names of the mesh axes of both, which are those of the same devices wherever the machines have the same axes."""
        return self.before.names.refined(self.after.names), self.after.names.refined(self.before.names)

    @cached_property
    def shown(self) -> tuple[Summary, Summary]:
        """Both summaries with these names."""
        return self.before.in_user_names(self.names[0]), self.after.in_user_names(self.names[1])

    @cached_property
    def line(self) -> Renumbering:
        """The line of the second program for every line of the first."""
        return SAME_LINES if self.same_source else renumbering(self.before.graph, self.after.graph, self.partner)

    @cached_property
    def renumbered(self) -> Summary:
        """The summary of the first program as shown, with its lines named as in the second."""
        return renumbered(self.shown[0], self.line)

    @cached_property
    def edits(self) -> tuple[Edit, ...]:
        """Every single difference of the graphs, in words."""
        every = edits.edits(self.before.graph, self.after.graph, self.partner, self.names)
        return tuple(replace(e, line=self.line(e.line)) if e.mark == REMOVED else e for e in every)

    @cached_property
    def regions(self) -> tuple[RegionDiff, ...]:
        """The differences by source line, with costs before and after."""
        return regions.regions(self.edits, self.renumbered, self.shown[1], self.line)

    @cached_property
    def collectives(self) -> tuple[Collectives, ...]:
        """The collectives whose count or time differs."""
        return regions.collectives(self.renumbered, self.shown[1])

    @cached_property
    def rules(self) -> tuple[tuple[str, RuleUse], ...]:
        """The rules that led to only one of the programs, in the order of their application, marked `-` (before) or `+` (after)."""
        before, after = self.renumbered, self.shown[1]
        pairs = (before.rules, after.rules), (before.applications, after.applications)
        removed = [("-", use) for one, other in pairs for use in one if use not in other]
        return (*removed, *(("+", use) for one, other in pairs for use in other if use not in one))

    def __bool__(self) -> bool:
        figures = {
            (s.machine, s.devices, s.time, s.memory, frozenset(s.work), frozenset(s.talk), s.rules, s.applications)
            for s in (self.renumbered, self.shown[1])
        }
        return bool(self.graph) or len(figures) > 1
