"""Level 2: best-first search over the rewritings of a program, with backtracking (Unity, section 5.1; TASO, algorithm 2).

The cheapest program that has not been expanded is rewritten in every possible way. Programs that cost more than alpha times the
cheapest one are dropped; so steps that increase the cost by little are taken, as they may lead to cheaper programs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from unity.pcg.ir.program import Body
from unity.substitutions.rewriting.forms import distinct_with_texts
from unity.substitutions.rewriting.occurrences import Occurrence, Pattern, occurrences
from unity.substitutions.rewriting.reading import Reading
from unity.substitutions.rewriting.recording import step_of
from unity.substitutions.rewriting.rewriting import content_key, rewritten
from unity.verify.derivations.canonical_form import canonical_forms

ALPHA = 1.05  # the highest cost of an expanded program, relative to the cheapest


@dataclass(frozen=True, eq=False)
class RewritingStep:
    """A rewriting of a program at one occurrence of a pattern, which is the `number`-th one in the program `before`."""

    before: Body
    occurrence: Occurrence
    number: int
    after: Body


@dataclass(frozen=True, eq=False)
class RewrittenProgram:
    """A program that the search reached, its price, and the step from the program before; the first one has none."""

    body: Body
    price: float
    before: RewrittenProgram | None = None
    step: RewritingStep | None = None

    @property
    def path(self) -> tuple[RewritingStep, ...]:
        """All steps from the first program, in order."""
        return () if self.before is None or self.step is None else (*self.before.path, self.step)


Price = Callable[[Body, float], float]
"""A function that prices a program; the price may be infinite if it certainly exceeds the second argument."""


def backtrack(body: Body, patterns: Sequence[Pattern], price: Price, alpha: float = ALPHA) -> Iterator[RewrittenProgram]:
    """Yield every program that is reached, the original first; end when all programs within `alpha` are expanded.

    The order depends only on the arguments, so a longer search yields the programs of a shorter one first.

    Args:
        body: the program.
        patterns: the patterns of the rules.
        price: prices a program.
        alpha: the highest price of an expanded program, relative to the lowest price.
    """
    original, name = distinct_with_texts(body)
    first = RewrittenProgram(original, price(original, math.inf))
    names, contents = {name}, {content_key(original)}
    best, count = first.price, 0
    queue = [(first.price, count, first)]
    yield first
    while queue:
        cost, _, program = heapq.heappop(queue)
        if cost > alpha * best:
            return
        for step, name in steps(program.body, patterns, contents):
            if name in names:
                continue
            names.add(name)
            reached = RewrittenProgram(step.after, price(step.after, alpha * best), program, step)
            best, count = min(best, reached.price), count + 1
            if reached.price <= alpha * best:
                heapq.heappush(queue, (reached.price, count, reached))
            yield reached


def steps(body: Body, patterns: Sequence[Pattern], contents: set[str]) -> Iterator[tuple[RewritingStep, tuple[str, ...]]]:
    """Yield every step from a program to one of new content that a derivation can express, with the result's canonical name.

    The contents of the results are added to `contents`.
    """
    reading, forms = Reading(body), canonical_forms(body)
    for pattern in patterns:
        for number, occurrence in enumerate(occurrences(reading, pattern)):
            new = rewritten(body, occurrence) if step_of(forms, occurrence) is not None else None
            key = content_key(new) if new is not None else ""
            if new is not None and key not in contents:
                contents.add(key)
                after, name = distinct_with_texts(new)
                yield RewritingStep(body, occurrence, number, after), name
