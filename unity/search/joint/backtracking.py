"""Level 2: best-first search over the rewritings of a program, with backtracking (Unity, section 5.1; TASO, algorithm 2).

Of all programs that were found and not looked at yet, the cheapest is taken next and rewritten in every way. What costs more than
alpha times the cheapest known is dropped; so steps that make things worse before they get better are taken, if they are small.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from unity.pcg.ir.program import Body
from unity.substitutions.rewriting.forms import settled
from unity.substitutions.rewriting.occurrences import Occurrence, Pattern, occurrences
from unity.substitutions.rewriting.reading import Reading
from unity.substitutions.rewriting.recording import step_of
from unity.substitutions.rewriting.rewriting import content_key, rewritten
from unity.verify.derivations.canonical_form import canonical_forms

ALPHA = 1.05


@dataclass(frozen=True, eq=False)
class Way:
    """A step: the program it is taken in, which occurrence of a pattern it is there, by number, and the program after it."""

    before: Body
    occurrence: Occurrence
    number: int
    after: Body


@dataclass(frozen=True, eq=False)
class Found:
    """A program, its price, and the way to it: the program before, and what was rewritten in that."""

    body: Body
    price: float
    before: Found | None = None
    taken: Way | None = None

    @property
    def path(self) -> tuple[Way, ...]:
        """Every step from the first program."""
        return () if self.before is None or self.taken is None else (*self.before.path, self.taken)


Price = Callable[[Body, float], float]
"""What a program costs; if that is certainly more than the number, it may be infinite."""


def backtrack(body: Body, patterns: Sequence[Pattern], price: Price, alpha: float = ALPHA) -> Iterator[Found]:
    """Every program that is reached, as it is reached, the given one first. Ends when none within alpha is left.

    The order depends on nothing but the arguments, so a longer search finds what a shorter one did, and more.
    """
    given, name = settled(body)
    first = Found(given, price(given, math.inf))
    seen, known = {name}, {content_key(given)}
    best, count = first.price, 0
    waiting = [(first.price, count, first)]
    yield first
    while waiting:
        cost, _, found = heapq.heappop(waiting)
        if cost > alpha * best:
            return
        for way, name in ways(found.body, patterns, known):
            if name in seen:
                continue
            seen.add(name)
            reached = Found(way.after, price(way.after, alpha * best), found, way)
            best, count = min(best, reached.price), count + 1
            if reached.price <= alpha * best:
                heapq.heappush(waiting, (reached.price, count, reached))
            yield reached


def ways(body: Body, patterns: Sequence[Pattern], known: set[str]) -> Iterator[tuple[Way, tuple[str, ...]]]:
    """Every step that a program allows, and that a derivation can say, to a program of no known content; and what that computes."""
    reading, forms = Reading(body), canonical_forms(body)
    for pattern in patterns:
        for number, occurrence in enumerate(occurrences(reading, pattern)):
            new = rewritten(body, occurrence) if step_of(forms, occurrence) is not None else None
            key = content_key(new) if new is not None else ""
            if new is not None and key not in known:
                known.add(key)
                after, name = settled(new)
                yield Way(body, occurrence, number, after), name
