"""Edits and costs, gathered by the line of the user's that they belong to. Layers made by one line are one region."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from unity.diff.edits import Edit, place
from unity.diff.folding import pattern, together
from unity.plan.summary import RuleUse, Summary, Talk


@dataclass(frozen=True)
class Cost:
    """Seconds of one step: before and after."""

    before: float
    after: float

    @property
    def same(self) -> bool:
        """Whether nothing changed, but for rounding."""
        return abs(self.before - self.after) <= 1e-9 * max(self.before, self.after)


@dataclass(frozen=True)
class Region:
    """A line of the user's: the rules that rewrote it, what is otherwise there, each with how often, and what computing and
    communicating take.
    """

    line: str
    rules: tuple[RuleUse, ...]
    edits: tuple[tuple[Edit, int], ...]
    computing: Cost
    communicating: Cost


@dataclass(frozen=True)
class Collectives:
    """Collectives that are alike, before and after: how many of them, and their seconds."""

    alike: Talk  # its count and seconds are those after, or before if there are none after
    counts: tuple[int, int]
    seconds: Cost


def regions(edits: Iterable[Edit], before: Summary, after: Summary) -> tuple[Region, ...]:
    """Everything that is otherwise, by line, in the order of the program after; lines where nothing is otherwise are left out."""
    found: dict[str, Counter[Edit]] = {}
    for edit in edits:
        found.setdefault(edit.line, Counter())[edit] += 1
    computing = _by_line(before.work), _by_line(after.work)
    communicating = _by_line(before.talk), _by_line(after.talk)
    for line in (*computing[0], *computing[1], *communicating[0], *communicating[1]):
        found.setdefault(line, Counter())
    order = {line: k for k, line in enumerate(_order(before, after))}
    rules = [use for use in after.rules if use not in before.rules]
    made = (
        Region(
            line,
            tuple(use for use in rules if line in use.lines),
            tuple(edits.items()),
            _cost(computing, line),
            _cost(communicating, line),
        )
        for line, edits in found.items()
    )
    kept = (r for r in made if r.edits or not (r.computing.same and r.communicating.same))
    return _folded(sorted(kept, key=lambda r: order.get(r.line, len(order))))


def _folded(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Arguments that differ in a number, and are otherwise in the same way, as one region where the first of them is."""
    alike: dict[Hashable, list[Region]] = {}
    for r in regions:
        edits = frozenset((replace(edit, line=""), often) for edit, often in r.edits)
        alike.setdefault((pattern(r.line), r.rules, edits), []).append(r)
    return tuple(same[0] if len(same) == 1 else _one(same) for same in alike.values())


def _one(same: Sequence[Region]) -> Region:
    line = together([r.line for r in same])
    edits = tuple((replace(edit, line=line), often * len(same)) for edit, often in same[0].edits)
    return Region(line, same[0].rules, edits, _sum(r.computing for r in same), _sum(r.communicating for r in same))


def _sum(costs: Iterable[Cost]) -> Cost:
    before, after = zip(*((c.before, c.after) for c in costs), strict=True)
    return Cost(sum(before), sum(after))


def _by_line(rows: Sequence) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        found[row.line] = found.get(row.line, 0.0) + row.seconds
    return found


def _cost(pair: tuple[dict[str, float], dict[str, float]], line: str) -> Cost:
    return Cost(pair[0].get(line, 0.0), pair[1].get(line, 0.0))


def _order(before: Summary, after: Summary) -> dict[str, None]:
    """Lines in the order of the programs."""
    return dict.fromkeys(place(node) for side in (after, before) for node, _ in side.graph.walk())


def collectives(before: Summary, after: Summary) -> tuple[Collectives, ...]:
    """Collectives of which there are more or fewer, the most expensive difference first."""
    sides = [{(t.line, t.kind, t.over, t.why, t.nbytes): t for t in side.talk} for side in (before, after)]
    found = []
    for key in dict.fromkeys((*sides[1], *sides[0])):
        one, other = (side.get(key) for side in sides)
        counts = one.count if one else 0, other.count if other else 0
        seconds = Cost(one.seconds if one else 0.0, other.seconds if other else 0.0)
        alike = other or one
        if alike is not None and (counts[0] != counts[1] or not seconds.same):
            found.append(Collectives(alike, counts, seconds))
    return tuple(sorted(_folded_collectives(found), key=lambda c: -abs(c.seconds.after - c.seconds.before)))


def _folded_collectives(found: Iterable[Collectives]) -> Iterator[Collectives]:
    """Those for arguments that differ in a number, and of which there are equally many, as one."""
    alike: dict[Hashable, list[Collectives]] = {}
    for c in found:
        t = c.alike
        alike.setdefault((pattern(t.line), t.kind, t.over, t.why, t.nbytes, c.counts), []).append(c)
    for same in alike.values():
        before, after = (sum(c.counts[k] for c in same) for k in (0, 1))
        seconds = _sum(c.seconds for c in same)
        line = same[0].alike.line if len(same) == 1 else together([c.alike.line for c in same])
        count, total = (after, seconds.after) if after else (before, seconds.before)
        yield Collectives(replace(same[0].alike, line=line, count=count, seconds=total), (before, after), seconds)
