"""The layers of a program: consecutive equations between places that few bytes cross, such as the repeated blocks of a model.

A *place* is a number of equations before it, in the order of `equations_in_layers`. A value crosses a place if it is computed
before and read after it. Where equations repeat, layers are the repeated parts; elsewhere they hold about as many bytes as those.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from unity.pcg.capture.heavy_operators import constants, light, reduces
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.jaxprs import SCANNED
from unity.search.joint.segments import shared

LONGEST = 2048  # the maximal number of equations of a repeated layer, unless rare ones show it
ALIKE = 16  # the number of earlier equal equations whose distance may be a layer's length
RARE = 16  # the number of distances that are tried because letters recur at them that are rare
PIECES = 8  # the number of layers of a program in which nothing repeats
SMALL = 0.25  # of a layer's bytes: a smaller part beside the layers is none
AROUND = 0.8  # of a part's bytes: how far from an even division a cut may lie

Span = tuple[int, int]  # consecutive equations, by the places before and after them


def equations_in_layers(body: Body) -> list[int]:
    """Return the equations of a program, by number, that may be in layers: all but those of constants and random keys."""
    apart = shared(body, constants(body))
    return [i for i in range(len(body.equations)) if i not in apart]


@dataclass(frozen=True, eq=False)
class Places:
    """The places of a program, with the bytes that decide where to cut it.

    Args:
        crossing: For each place, the bytes of the values that cross it.
        before: For each place, the bytes of all values computed before it.
        fused: For each place, whether the first equation that reads a value that crosses it is elementwise, and so might be fused
            with the one that computes the value.
    """

    crossing: Sequence[int]
    before: Sequence[int]
    fused: Sequence[bool]

    @classmethod
    def of(cls, body: Body, equations: Sequence[int]) -> Places:
        """Return the places between some equations of a program."""
        position = {i: k for k, i in enumerate(equations)}
        last = {a: position[i] for i in equations for a in body.equations[i].operands if isinstance(a, int)}
        changes, nbytes = [0] * (len(equations) + 2), []
        for k, i in enumerate(equations):
            nbytes.append(sum(body.tensors[v].nbytes for v in body.equations[i].results))
            for v in body.equations[i].results:
                if last.get(v, -1) > k:
                    changes[k + 1] += body.tensors[v].nbytes
                    changes[last[v] + 1] -= body.tensors[v].nbytes
        fused = _fused(body, equations)
        return cls(list(accumulate(changes[: len(equations) + 1])), [0, *accumulate(nbytes)], fused)

    def cost_of_cut(self, place: int) -> tuple[int, bool]:
        """Return what a cut at a place costs: first the bytes that cross it, then whether it separates what is fused."""
        return self.crossing[place], self.fused[place]

    def nbytes(self, span: Span) -> int:
        """Return the bytes of all values that a span computes."""
        return self.before[span[1]] - self.before[span[0]]

    def divided(self, span: Span, parts: int) -> list[Span]:
        """Divide a span into parts of about as many bytes each, at places near an even division that the fewest bytes cross."""
        start, stop = span
        size = self.nbytes(span) / parts
        ends = [start]
        for k in range(1, parts):
            goal = self.before[start] + k * size
            low = max(ends[-1] + 1, bisect_left(self.before, goal - AROUND * size))
            high = min(stop - 1, bisect_left(self.before, goal + AROUND * size))
            if low <= high:
                ends.append(min(range(low, high + 1), key=lambda p: (self.cost_of_cut(p), abs(self.before[p] - goal))))
        return list(pairwise([*ends, stop]))

    def near(self, span: Span, size: float) -> list[Span]:
        """Divide a span into parts of about `size` bytes; a much smaller one has none."""
        count = self.nbytes(span) / size
        return self.divided(span, max(1, round(count))) if count >= SMALL else []


def _fused(body: Body, equations: Sequence[int]) -> list[bool]:
    """Return for each place whether the first equation after it that reads a value computed before it is elementwise."""
    number = {v: k for k, i in enumerate(equations) for v in body.equations[i].results}
    own = [body.equations[i] for i in equations]
    earliest = [min((number.get(a, k) for a in e.operands if isinstance(a, int)), default=k) for k, e in enumerate(own)]
    elementwise = [light(body, e) and not reduces(body, e) for e in own]
    fused, open_places = [False] * (len(own) + 1), list[int]()  # places that no equation up to here reads across
    for k, flag in enumerate(elementwise):
        open_places.append(k)
        while open_places and earliest[k] < open_places[-1]:
            fused[open_places.pop()] = flag
    return fused


@dataclass(frozen=True)
class Layers:
    """The layers of a program, in order: the repeated ones, and the parts beside them.

    Args:
        repeated: The repeated layers, of all runs of them, such as those of an encoder and those of a decoder.
        every: These and the parts beside them, of about as many bytes. Left out are the last part of a program, with which the
            backward pass begins, and parts with a scan, whose steps are layers themselves.
    """

    repeated: tuple[Span, ...]
    every: tuple[Span, ...]


def layers(body: Body, equations: Sequence[int], places: Places) -> Layers:
    """Return the layers of a program."""
    end, letters = len(equations), [body.equations[i].signature for i in equations]

    def without_scans(spans: Sequence[Span]) -> list[Span]:
        return [span for span in spans if not any(body.equations[i].name in SCANNED for i in equations[slice(*span)])]

    longest = _run(letters, places, (0, end))
    if longest is None:
        return Layers((), tuple(without_scans(places.divided((0, end), min(PIECES, end))[:-1])) if end else ())
    size = _mean_nbytes(places, longest)
    runs = sorted([longest, *_runs_beside(letters, places, longest, (0, end), SMALL * size)])
    every, at = list[Span](), 0
    for k, run in enumerate(runs):
        neighbours = [_mean_nbytes(places, r) for r in runs[max(0, k - 1) : k + 1]]
        every += [*without_scans(places.near((at, run[0][0]), max(neighbours))), *run]
        at = run[-1][1]
    after = places.near((at, end), _mean_nbytes(places, runs[-1]))
    return Layers(tuple(span for run in runs for span in run), (*every, *without_scans(after[:-1])))


def _run(letters: Sequence[str], places: Places, within: Span) -> list[Span] | None:
    """Return the layers of the longest run of equal parts of a span, cut where the fewest bytes cross; None if nothing repeats."""
    start, period, times = repeated(letters[slice(*within)])
    start += within[0]
    if not places.nbytes((start, start + period)):  # nothing repeats, or only what is empty
        return None
    first = min(range(start, start + period), key=places.cost_of_cut)
    count = times if first == start else times - 1
    return [(first + k * period, first + (k + 1) * period) for k in range(count)]


def _runs_beside(letters: Sequence[str], places: Places, run: list[Span], within: Span, least: float) -> Iterator[list[Span]]:
    """Yield the layers of the runs before and after a run whose layers have at least some bytes, such as those of a decoder."""
    for beside in ((within[0], run[0][0]), (run[-1][1], within[1])):
        other = _run(letters, places, beside)
        if other is not None and _mean_nbytes(places, other) >= least:
            yield other
            yield from _runs_beside(letters, places, other, beside, least)


def _mean_nbytes(places: Places, run: Sequence[Span]) -> float:
    return places.nbytes((run[0][0], run[-1][1])) / len(run)


def repeated(letters: Sequence[str]) -> tuple[int, int, int]:
    """Return the longest run of equal parts of a sequence: where it starts, the length of a part, and how many there are.

    The number is 0 if nothing repeats. Of runs of one length, it is the one of the shortest parts.
    """
    numbers = {letter: k for k, letter in enumerate(dict.fromkeys(letters))}
    word = np.array([numbers[letter] for letter in letters], np.int64)
    best = (0, 0, 0)
    for period in _distances(letters):
        same = np.concatenate([[False], word[period:] == word[:-period], [False]])
        starts, stops = np.flatnonzero(same[1:] & ~same[:-1]), np.flatnonzero(~same[1:] & same[:-1])
        if len(starts):
            k = int(np.argmax(stops - starts))
            times = int(stops[k] - starts[k]) // period + 1
            if times > 1 and times * period > best[1] * best[2]:
                best = (int(starts[k]), period, times)
    return best


def _distances(letters: Sequence[str]) -> list[int]:
    """Return the distances at which equal parts may follow one another, ascending.

    At such a distance at least as many letters recur as a part has, or many of those that are rare: where a layer repeats smaller
    parts itself, as one of a hundred experts does, letters of these are equal far more often than layers are.
    """
    occurrences = Counter(letters)
    last: dict[str, deque[int]] = {}
    recurrences, rare = Counter[int](), Counter[int]()
    for i, letter in enumerate(letters):
        known = last.setdefault(letter, deque(maxlen=ALIKE))
        (rare if occurrences[letter] <= ALIKE else recurrences).update(i - j for j in known)
        known.append(i)
    recurrences += rare
    often = {p for p, count in recurrences.items() if count >= p and p <= LONGEST}
    return sorted(p for p in often.union(p for p, _ in rare.most_common(RARE)) if p > 1)


def together(spans: Sequence[Span], count: int) -> list[Span]:
    """Merge adjacent spans, `count` at a time."""
    merged, k = list[Span](), 0
    while k < len(spans):
        stop = k + 1
        while stop < min(k + count, len(spans)) and spans[stop][0] == spans[stop - 1][1]:
            stop += 1
        merged.append((spans[k][0], spans[stop - 1][1]))
        k = stop
    return merged
