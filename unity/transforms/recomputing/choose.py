"""The choice of the layers that the backward pass recomputes: candidates, each priced by a search of its program.

When the backward pass reaches a layer, the residuals of all layers before it are live. So of equal layers the first ones are
recomputed: few residuals are then live while the inner values of a recomputed layer are.

The more layers are recomputed, the longer the fastest strategy takes and the less memory it needs. So the best number of layers is
the least whose fastest strategy fits, or a smaller one with a leaner strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, sqrt
from typing import TypeAlias

from unity.base.errors import InfeasibleError
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED, SCANNED
from unity.search.request import Wish
from unity.search.session import Candidate, Search
from unity.transforms.recomputing.layers import Places, Span, equations_in_layers, layers, together
from unity.transforms.recomputing.recomputing import Policy, Recomputing, Spans, recomputing, steps
from unity.transforms.transformation import TransformationCandidate

NONE = (inf, inf)  # the worth of no strategy

RecomputingCandidate: TypeAlias = TransformationCandidate[Recomputing]


@dataclass(frozen=True, eq=False)
class RecomputingWish(Wish):
    """The request for a program with recomputed layers.

    Args:
        limit: The memory of a device, in bytes.
    """

    limit: float = inf


@dataclass(frozen=True, eq=False)
class RecomputingChoice:
    """The best program with recomputed layers, if any fits, and the search of the one with the least bound on memory."""

    best: RecomputingCandidate | None = None
    leanest: Search | None = None


def best(captured: Captured, wish: RecomputingWish) -> RecomputingChoice:
    """Return the best program with recomputed layers that fits and is better than the plan to beat.

    If there is a plan to beat, the program fits without recomputation; then only single layers are recomputed, no groups or halves.
    """
    programs, layered = _Programs(captured, wish), LayeredProgram(captured.body)
    numbered = [_Numbered(layered.repeated, layered.count), _Numbered(layered.every, len(layered.chain.every))]
    for choices in (*numbered, replace(numbered[0], saved="products")):
        programs.refine(choices)
    for spans in layered.others() if wish.than is None else ():
        programs.worth(spans)
    return RecomputingChoice(programs.chosen, programs.leanest)


@dataclass(frozen=True)
class _Numbered:
    """Choices of layers by their number: the spans of the first `k` layers for each `k` up to `count`, and the policy inside."""

    spans: Callable[[int], Spans]
    count: int
    saved: Policy = "nothing"


@dataclass(eq=False)
class _Programs:
    """The programs that were searched.

    Attributes:
        chosen: the best that fits.
        leanest: the search with the least bound on memory.
        known: the programs, by spans and policy, with their searches.
        worths: what `worth` returned, by search.
    """

    captured: Captured
    wish: RecomputingWish
    chosen: RecomputingCandidate | None = None
    leanest: Search | None = None
    known: dict[Hashable, tuple[Recomputing, Search]] = field(default_factory=dict)
    worths: dict[Search, tuple[float, float]] = field(default_factory=dict)

    def refine(self, choices: _Numbered) -> None:
        """Search the programs that recompute the first layers, for the least number that suffices and better ones around it."""
        number = self.least_number(choices)
        numbers = {max(0, number - 1), min(number, choices.count)} | ({choices.count} if self.wish.than is None else set())
        worth = {0: NONE} | {k: self.worth(choices.spans(k), choices.saved) for k in sorted(numbers, reverse=True)}
        while min(worth.values()) < NONE:
            at, tried = min(worth, key=lambda k: worth[k]), sorted(worth)
            place = tried.index(at)
            around = tried[max(0, place - 1) : place + 2]
            between = {(low + high) // 2 for low, high in pairwise(around)} - worth.keys()
            if not between:
                break
            worth |= {k: self.worth(choices.spans(k), choices.saved) for k in between}

    def least_number(self, choices: _Numbered) -> int:
        """Return the least number of layers with which the fastest strategy fits or is too slow; `count` + 1 if there is none."""
        low, high = 0, choices.count + 1
        while low < high:
            middle = (low + high) // 2
            if self.suffices(choices.spans(middle), choices.saved):
                high = middle
            else:
                low = middle + 1
        return low

    def suffices(self, spans: Spans, saved: Policy) -> bool:
        """Return whether to recompute no more than some spans: the fastest strategy of the program fits, or it is too slow."""
        if not spans:
            return False
        _, search = self.program(spans, saved)
        if search.least_memory.total > self.wish.limit:
            return False
        try:
            return any(self.is_beaten(c.time, inf) or c.memory <= self.wish.limit for c in search.unrefined)
        except InfeasibleError:
            return False

    def program(self, spans: Spans, saved: Policy) -> tuple[Recomputing, Search]:
        """Return the program that recomputes some spans, and its search."""
        key = (frozenset(spans.items()), saved)
        if key not in self.known:
            self.wish.say(f"recomputing {sum(map(len, spans.values()))} parts of the program")
            transformation = recomputing(self.captured, spans, saved, self.captured.bodies)
            search = self.wish.search(transformation.after)
            self.known[key] = transformation, search
            if self.leanest is None or search.least_memory.total < self.leanest.least_memory.total:
                self.leanest = search
        return self.known[key]

    def worth(self, spans: Spans, saved: Policy = "nothing") -> tuple[float, float]:
        """Return the worth of the best strategy of the program that recomputes some spans: `NONE` if others were better."""
        if not spans:
            return NONE
        transformation, search = self.program(spans, saved)
        if search not in self.worths:
            candidate = self.better(search)
            if candidate is not None:
                self.chosen = RecomputingCandidate(transformation, search, candidate)
            self.worths[search] = NONE if candidate is None else self.wish.worth(candidate)
        return self.worths[search]

    def better(self, search: Search) -> Candidate | None:
        """Return the best strategy of a program, or None if none fits and is better than the best so far.

        A program is not searched if bounds exclude that.
        """
        limit, least = self.wish.limit, search.least_memory.total
        try:
            if least > limit or self.is_beaten(search.estimated_time(limit), least):
                return None
            candidate = self.wish.choose(search)
        except InfeasibleError:  # the user's constraints leave an operator of it no choice
            return None
        return None if candidate is None or self.is_beaten(candidate.time, candidate.memory) else candidate

    def is_beaten(self, time: float, memory: float) -> bool:
        """Return whether the best program so far, or the plan to beat, is at least as good as one with this time and memory."""
        best = self.chosen.candidate if self.chosen is not None else self.wish.than and self.wish.than[1]
        return best is not None and self.wish.worth(best) <= self.wish.worth(replace(best, time=time, memory=memory))


class LayeredProgram:
    """A program with its layers, and the steps of its scans: the spans of them that may be recomputed together."""

    def __init__(self, body: Body) -> None:
        self.body, self.equations = body, equations_in_layers(body)
        self.places = Places.of(body, self.equations)
        self.chain = layers(body, self.equations, self.places)
        inside = {i for span in self.chain.repeated for i in self.equations[slice(*span)]}
        self.scans = [e for i, e in enumerate(body.equations) if i not in inside and e.name in SCANNED]

    @property
    def count(self) -> int:
        """The number of repeated layers."""
        return len(self.chain.repeated)

    def repeated(self, count: int) -> Spans:
        """Return the first `count` repeated layers, and the steps of scans outside of layers."""
        return self.spans(self.chain.repeated[:count])

    def every(self, count: int) -> Spans:
        """Return the first `count` of the layers and the parts beside them, and the steps of scans outside of layers."""
        return self.spans(self.chain.every[:count])

    def others(self) -> Iterator[Spans]:
        """Yield other choices that recompute all layers.

        These are pairs, groups of about the root of their number, layers and steps in halves, layers with the steps of scans in
        them, and layers together with the parts of the program beside them in halves.
        """
        repeated, every = self.chain.repeated, self.chain.every
        yield self.spans(together(repeated, 2))
        yield self.spans(together(repeated, round(sqrt(self.count))))
        yield self.spans(self.halves(repeated), 2)
        yield self.spans(repeated) | _of_steps(steps(self.body.equations), 1)
        yield self.spans(self.halves(every), 2)

    def halves(self, spans: Sequence[Span]) -> list[Span]:
        """Divide each span into two."""
        return [half for span in spans for half in self.places.divided(span, 2)]

    def spans(self, own: Sequence[Span], parts: int = 1) -> dict[str, tuple[Span, ...]]:
        """Return spans of the outermost program, and the steps of scans outside of layers as a number of parts."""
        mine = _new(self.body, self.equations, own)
        return _of_steps(steps(self.scans), parts) | ({self.body.key: mine} if mine else {})


def _of_steps(bodies: Iterable[Body], parts: int) -> dict[str, tuple[Span, ...]]:
    """Return the steps of scans as a number of parts each."""
    spans = dict[str, tuple[Span, ...]]()
    for step in bodies:
        equations = equations_in_layers(step)
        divided = Places.of(step, equations).divided((0, len(equations)), parts) if equations else []
        spans |= {step.key: new} if (new := _new(step, equations, divided)) else {}
    return spans


def _new(body: Body, equations: Sequence[int], spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the spans that hold more than checkpoints of the user."""
    return tuple(span for span in spans if any(body.equations[i].name not in REMATERIALIZED for i in equations[slice(*span)]))
