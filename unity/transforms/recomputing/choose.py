"""The choice of the layers that the backward pass recomputes: candidates, each priced by a search of its program.

When the backward pass reaches a layer, the residuals of all layers before it are live. So of equal layers the first ones are
recomputed: few residuals are then live while the inner values of a recomputed layer are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf, sqrt
from typing import TypeAlias

from unity.base.errors import InfeasibleError
from unity.pcg.capture.capture import Captured
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.jaxprs import REMATERIALIZED, SCANNED
from unity.search.request import Wish
from unity.search.session import Search
from unity.transforms.pipelining.choose import least_seconds
from unity.transforms.recomputing.layers import Places, Span, equations_in_layers, layers, together
from unity.transforms.recomputing.recomputing import Policy, Recomputing, Spans, recomputing, steps
from unity.transforms.transformation import TransformationCandidate

FRACTIONS = (0.25, 0.5, 0.75)  # of the layers: the numbers tried first, besides all of them and all but one
NONE = (inf, inf)  # the worth of no strategy

RecomputingCandidate: TypeAlias = TransformationCandidate[Recomputing]


@dataclass(frozen=True, eq=False)
class RecomputingChoice:
    """The best program with recomputed layers, if any fits, and the search of the one with the least bound on memory."""

    best: RecomputingCandidate | None = None
    leanest: Search | None = None


def best(captured: Captured, wish: Wish) -> RecomputingChoice:
    """Return the best program with recomputed layers that fits.

    The number of repeated layers is refined around the best of a few numbers. Checkpoints that save products are tried last.
    """
    programs, layered = _Programs(captured, wish), LayeredProgram(captured.body)
    count = layered.count
    worth = {k: programs.worth(layered.first(k)) for k in {*(round(part * count) for part in FRACTIONS), max(0, count - 1), count}}
    while min(worth.values()) < NONE:
        at, tried = min(worth, key=lambda k: worth[k]), sorted(worth)
        place = tried.index(at)
        around = tried[max(0, place - 1) : place + 2]
        between = {(low + high) // 2 for low, high in pairwise(around)} - worth.keys()
        if not between:
            break
        worth |= {k: programs.worth(layered.first(k)) for k in between}
    for spans in layered.others():
        programs.worth(spans)
    for spans in (layered.first(count), layered.first(count // 2)):
        programs.worth(spans, "products")
    return RecomputingChoice(programs.chosen, programs.leanest)


@dataclass(eq=False)
class _Programs:
    """The programs that were searched.

    Attributes:
        chosen: the best that fits.
        leanest: the search with the least bound on memory.
        known: the spans of all programs so far, with the policy of their checkpoints.
    """

    captured: Captured
    wish: Wish
    chosen: RecomputingCandidate | None = None
    leanest: Search | None = None
    known: list[tuple[Spans, Policy]] = field(default_factory=list)

    def worth(self, spans: Spans, saved: Policy = "nothing") -> tuple[float, float]:
        """Search the program that recomputes some spans, and return the worth of its best strategy, or `NONE` if none fits.

        It is not searched, and `NONE` returned, if that was done before or if it cannot be better than the best program so far.
        """
        if not spans or (spans, saved) in self.known:
            return NONE
        self.known.append((spans, saved))
        self.wish.say(f"recomputing {sum(map(len, spans.values()))} parts of the program")
        transformation = recomputing(self.captured, spans, saved, self.captured.bodies)
        search = self.wish.search(transformation.after)
        if self.leanest is None or search.least_memory.total < self.leanest.least_memory.total:
            self.leanest = search
        try:
            candidate = None if self.is_hopeless(search) else self.wish.choose(search)
        except InfeasibleError:  # the user's constraints leave an operator of it no choice
            return NONE
        if candidate is None:
            return NONE
        worth = self.wish.worth(candidate)
        if self.chosen is None or worth < self.wish.worth(self.chosen.candidate):
            self.chosen = RecomputingCandidate(transformation, search, candidate)
        return worth

    def is_hopeless(self, search: Search) -> bool:
        """Return whether the bounds on time and memory exclude that a program is better than the best so far."""
        if self.chosen is None:
            return False
        bound = replace(self.chosen.candidate, time=least_seconds(search), memory=search.least_memory.total)
        return self.wish.worth(bound) >= self.wish.worth(self.chosen.candidate)


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

    def first(self, count: int) -> Spans:
        """Return the first `count` repeated layers, and the steps of scans outside of layers."""
        return self.spans(self.chain.repeated[:count])

    def others(self) -> Iterator[Spans]:
        """Yield other choices that recompute all layers.

        These are pairs, groups of about the root of their number, layers and steps in halves, layers with the steps of scans in
        them, and layers together with the parts of the program beside them, as wholes and in halves.
        """
        repeated, every = self.chain.repeated, self.chain.every
        yield self.spans(together(repeated, 2))
        yield self.spans(together(repeated, round(sqrt(self.count))))
        yield self.spans(self.halves(repeated), 2)
        yield self.spans(repeated) | _of_steps(steps(self.body.equations), 1)
        yield self.spans(every)
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
