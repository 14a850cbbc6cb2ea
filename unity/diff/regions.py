"""Edits and costs by source line.

The layers that one line builds are one region, and so are arguments whose names differ in numbers only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from unity.base.formatting import joined_lines
from unity.diff.edits import Edit, line_of
from unity.plan.summary import RuleUse, Summary, Talk, seconds_by_line, step_seconds

ARGUMENT = re.compile(r"(args\[\d+\])(.*)")


@dataclass(frozen=True)
class CostChange:
    """Seconds of one step, or another figure, before and after."""

    before: float
    after: float

    @property
    def same(self) -> bool:
        """Whether both are equal, up to rounding."""
        return abs(self.before - self.after) <= 1e-9 * max(abs(self.before), abs(self.after))


@dataclass(frozen=True)
class RegionDiff:
    """The differences at a source line: rules that rewrote it, its edits with counts, and its costs in seconds."""

    line: str
    rules: tuple[RuleUse, ...]
    edits: tuple[tuple[Edit, int], ...]
    computing: CostChange
    communicating: CostChange


@dataclass(frozen=True)
class Collectives:
    """Equal collectives: one of them, their counts before and after, and their seconds.

    The count and the seconds of `alike` are those after, or those before if none are left.
    """

    alike: Talk
    counts: tuple[int, int]
    seconds: CostChange


def step_costs(before: Summary, after: Summary) -> dict[str, CostChange]:
    """Return the seconds of a whole step, before and after."""
    (compute, talk), (compute_after, talk_after) = step_seconds(before), step_seconds(after)
    return {
        "one step": CostChange(before.time, after.time),
        "computing": CostChange(compute, compute_after),
        "communicating": CostChange(talk, talk_after),
    }


def regions(edits: Iterable[Edit], before: Summary, after: Summary, line_after: Callable[[str], str]) -> tuple[RegionDiff, ...]:
    """Return the lines that have edits or other costs, in the order of the second program.

    Args:
        edits: the differences of the graphs.
        before: the first program. Except in its graph, its lines are named as in the second.
        after: the second program.
        line_after: the line of the second program for a line of the first.
    """
    edits_by_line: dict[str, Counter[Edit]] = {}
    for edit in edits:
        edits_by_line.setdefault(edit.line, Counter())[edit] += 1
    computing = seconds_by_line(before.work), seconds_by_line(after.work)
    communicating = seconds_by_line(before.talk), seconds_by_line(after.talk)
    for line in (*computing[0], *computing[1], *communicating[0], *communicating[1]):
        edits_by_line.setdefault(line, Counter())
    order = {line: k for k, line in enumerate(_lines_in_order(before, after, line_after))}
    new_rules = [use for use in after.rules if use not in before.rules]
    every = (
        RegionDiff(
            line,
            tuple(use for use in new_rules if line in use.lines),
            tuple(edits.items()),
            _cost_change(computing, line),
            _cost_change(communicating, line),
        )
        for line, edits in edits_by_line.items()
    )
    differing = (r for r in every if r.edits or not (r.computing.same and r.communicating.same))
    return _folded_regions(sorted(differing, key=lambda r: order.get(r.line, len(order))))


def _folded_regions(regions: Iterable[RegionDiff]) -> tuple[RegionDiff, ...]:
    """Join the regions of arguments whose names differ in numbers only and that have equal edits, at the place of the first."""
    groups: dict[Hashable, list[RegionDiff]] = {}
    for r in regions:
        edits = frozenset((replace(edit, line=""), count) for edit, count in r.edits)
        groups.setdefault((line_pattern(r.line), r.rules, edits), []).append(r)
    return tuple(group[0] if len(group) == 1 else _joined_region(group) for group in groups.values())


def _joined_region(group: Sequence[RegionDiff]) -> RegionDiff:
    line = joined_lines([r.line for r in group])
    edits = tuple((replace(edit, line=line), count * len(group)) for edit, count in group[0].edits)
    return RegionDiff(line, group[0].rules, edits, _sum(r.computing for r in group), _sum(r.communicating for r in group))


def _sum(costs: Iterable[CostChange]) -> CostChange:
    before, after = zip(*((c.before, c.after) for c in costs), strict=True)
    return CostChange(sum(before), sum(after))


def _cost_change(seconds: tuple[dict[str, float], dict[str, float]], line: str) -> CostChange:
    return CostChange(seconds[0].get(line, 0.0), seconds[1].get(line, 0.0))


def _lines_in_order(before: Summary, after: Summary, line_after: Callable[[str], str]) -> dict[str, None]:
    """Return the lines in the order of the second program, then those of the first alone."""
    lines = [[line_of(node) for node, _ in side.graph.walk()] for side in (after, before)]
    return dict.fromkeys((*lines[0], *map(line_after, lines[1])))


def collectives(before: Summary, after: Summary) -> tuple[Collectives, ...]:
    """Return the collectives whose count or time differs, the largest difference of time first."""
    sides = [{(t.line, t.use, t.value, t.kind, t.over, t.why, t.nbytes): t for t in side.talk} for side in (before, after)]
    differing = []
    for key in dict.fromkeys((*sides[1], *sides[0])):
        one, other = (side.get(key) for side in sides)
        counts = one.count if one else 0, other.count if other else 0
        seconds = CostChange(one.seconds if one else 0.0, other.seconds if other else 0.0)
        alike = other or one
        if alike is not None and (counts[0] != counts[1] or not seconds.same):
            differing.append(Collectives(alike, counts, seconds))
    return tuple(sorted(_folded_collectives(differing), key=lambda c: -abs(c.seconds.after - c.seconds.before)))


def _folded_collectives(every: Iterable[Collectives]) -> Iterator[Collectives]:
    """Join collectives with equal counts for arguments whose names differ in numbers only."""
    groups: dict[Hashable, list[Collectives]] = {}
    for c in every:
        t = c.alike
        groups.setdefault((line_pattern(t.line), t.use, t.kind, t.over, t.why, t.nbytes, c.counts), []).append(c)
    for group in groups.values():
        before, after = (sum(c.counts[k] for c in group) for k in (0, 1))
        seconds = _sum(c.seconds for c in group)
        line = group[0].alike.line if len(group) == 1 else joined_lines([c.alike.line for c in group])
        count, total = (after, seconds.after) if after else (before, seconds.before)
        yield Collectives(structs.replace(group[0].alike, line=line, count=count, seconds=total), (before, after), seconds)


def line_pattern(line: str) -> str:
    """Return an argument's path with `#` for every number but the argument's position, and any other line as it is."""
    argument = ARGUMENT.fullmatch(line)
    return argument[1] + re.sub(r"\d+", "#", argument[2]) if argument else line
