"""Renumbering of source lines from one version of a source to the next.

An edit of a source moves the lines below it. Their new numbers follow from matched operators: a line is mapped to the line of most
of its operators' partners. A line without partners moves with the lines above it in its file. If it would pass the lines below it,
its code was removed. A renamed argument is treated like a line.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from msgspec import structs

from unity.diff.matching import matching
from unity.diff.skeleton import is_parallelization
from unity.pcg.ir.graph import PCG, Node
from unity.pcg.ir.user_lines import line_behind
from unity.plan.summary import LiveBytes, Summary, Talk, Work

NUMBERED = re.compile(r"([^:]*):(\d+)(.*)")  # file, number, function
BEFORE = " before"  # suffix of a line of removed code whose number is that of other code in the second version

AMOUNTS = {Work: ("count", "seconds"), Talk: ("count", "seconds"), LiveBytes: ("nbytes",)}  # fields that add up if rows are merged

R = TypeVar("R", Work, Talk, LiveBytes)


@dataclass(frozen=True)
class Renumbering:
    """A mapping of the lines of the first version to lines of the second.

    Attributes:
        known: the mapping of the lines that have matched operators.
        anchors: by file, the numbers of such lines before and after, ascending.
        later: the lines of the second version.
    """

    known: Mapping[str, str]
    anchors: Mapping[str, Sequence[tuple[int, int]]]
    later: frozenset[str]

    def __call__(self, line: str) -> str:
        """Return the line of the second version for a line of the first."""
        if line in self.known:
            return self.known[line]
        parts = NUMBERED.fullmatch(line)
        if parts is None or parts[1] not in self.anchors:
            return line
        number = _between(int(parts[2]), self.anchors[parts[1]])
        if number is not None:
            return f"{parts[1]}:{number}{parts[3]}"
        return line + BEFORE if line in self.later else line


SAME_LINES = Renumbering({}, {}, frozenset())  # the identity, for two plans of one version of a source


def _between(number: int, anchors: Sequence[tuple[int, int]]) -> int | None:
    """Return a line's new number, by the matched lines around it in its file; None if it would not be between them."""
    at = bisect(anchors, (number, 0))
    before, after = anchors[max(at - 1, 0)]
    moved = number + after - before
    return moved if at == len(anchors) or moved < anchors[at][1] else None


def renumbering(before: PCG, after: PCG, partner: Mapping[int, int]) -> Renumbering:
    """Return the line of the second graph for every line of the first.

    Args:
        before: the first graph.
        after: the second graph.
        partner: the matched nodes, as `matching` returns them.
    """
    votes: dict[str, Counter[str]] = {}
    for old, new in _pairs(before, after, partner):
        votes.setdefault(line_behind(old), Counter())[line_behind(new)] += 1
    known = {line: max(to, key=lambda other: (to[other], other == line)) for line, to in votes.items()}
    anchors: dict[str, list[tuple[int, int]]] = {}
    for one, other in known.items():
        old, new = NUMBERED.fullmatch(one), NUMBERED.fullmatch(other)
        if old and new and old[1] == new[1]:
            anchors.setdefault(old[1], []).append((int(old[2]), int(new[2])))
    later = frozenset(line_behind(node) for node, _ in after.walk())
    return Renumbering(known, {file: sorted(numbers) for file, numbers in anchors.items()}, later)


def _pairs(before: PCG, after: PCG, partner: Mapping[int, int]) -> Iterator[tuple[Node, Node]]:
    """Yield the matched operators and arguments of two graphs, nested ones included."""
    for i, j in partner.items():
        old, new = before.nodes[i], after.nodes[j]
        if not is_parallelization(old):
            yield old, new
        if old.inside is not None and new.inside is not None:
            yield from _pairs(old.inside, new.inside, matching(old.inside, new.inside))


def renumbered(summary: Summary, line: Renumbering) -> Summary:
    """Renumber the lines in a summary, and merge rows whose lines become equal. Its graph does not change."""
    every = (summary.rules, summary.applications)
    rules, applications = (tuple(structs.replace(u, lines=tuple(map(line, u.lines))) for u in uses) for uses in every)
    return replace(
        summary,
        work=_merged(structs.replace(w, line=line(w.line)) for w in summary.work),
        talk=_merged(structs.replace(t, line=line(t.line), use=line(t.use), value=line(t.value)) for t in summary.talk),
        live=_merged(structs.replace(b, line=line(b.line)) for b in summary.live),
        warnings=tuple(structs.replace(w, line=line(w.line)) for w in summary.warnings),
        rules=rules,
        applications=applications,
    )


def _merged(rows: Iterable[R]) -> tuple[R, ...]:
    """Merge rows that differ in their amounts alone, each at the place of its first occurrence."""
    sums: dict[R, dict[str, float]] = {}
    for row in rows:
        amounts = {name: getattr(row, name) for name in AMOUNTS[type(row)]}
        known = sums.setdefault(structs.replace(row, **dict.fromkeys(amounts, 0)), dict.fromkeys(amounts, 0))
        known.update((name, known[name] + amount) for name, amount in amounts.items())
    return tuple(structs.replace(row, **amounts) for row, amounts in sums.items())
