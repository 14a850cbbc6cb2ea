"""Joint search of algebraic rewritings and parallelizations (Unity, section 5), over the rules of a library.

A program is cut into segments (level 1). The rewritings of each distinct segment are searched with backtracking (level 2), and each
is priced by an exact search over its parallelizations (level 3). A rewriting that makes a segment cheaper is tried in the whole
program, wherever that segment occurs, and accepted if the whole program becomes cheaper. Segments take turns, one program each, so
a longer search begins with the programs of a shorter one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unity.pcg.ir.program import Body
from unity.search.joint.backtracking import ALPHA, RewrittenProgram, backtrack
from unity.search.joint.nested import Program, program
from unity.search.joint.pricing import Prices
from unity.search.joint.segments import Segment
from unity.substitutions.rewriting.forms import planning_form
from unity.substitutions.rewriting.occurrences import Pattern
from unity.substitutions.rewriting.rewriting import tidy

WORTHWHILE_GAIN = 0.01  # of a step: the gain for which a search goes on
ROUNDS = 3
GAIN = 2e-4  # the least gain that a segment's rewriting must promise, and an improvement have, relative to the whole price


@dataclass(frozen=True)
class Budget:
    """A limit on the length of a search.

    Args:
        programs: The most programs that are priced, or None.
        seconds: The most seconds, or None.
        patience: The programs, in whole rounds over the segments and at least `ROUNDS`, by which the best one must become
            shorter by `WORTHWHILE_GAIN`, or the search ends; or None.
    """

    programs: int | None = None
    seconds: float | None = None
    patience: int | None = None

    def left(self, programs: int, started: float) -> bool:
        """Return whether the search may continue after `programs` programs, having begun at `started`."""
        enough = self.programs is None or programs < self.programs
        return enough and (self.seconds is None or time.perf_counter() - started < self.seconds)

    def is_patient(self, fruitless: int, segments: int) -> bool:
        """Return whether the search may go on with a round over some segments after `fruitless` programs without a gain."""
        return self.patience is None or fruitless < max(self.patience, ROUNDS * segments)

    def in_words(self, programs: int, started: float) -> str:
        """Return the remaining budget in words; for programs with the seconds that they will take at the average so far."""
        spent, left = time.perf_counter() - started, list[str]()
        if self.programs is not None:
            more = self.programs - programs
            left.append(f"{more} programs" + (f" (about {more * spent / programs:.0f} s)" if programs else ""))
        if self.seconds is not None:
            left.append(f"{max(0.0, self.seconds - spent):.0f} s")
        return f"{' or '.join(left)} left" if left else "no limit"


@dataclass(frozen=True, eq=False)
class Improvement:
    """A rewritten program, its price, and the programs that replace its segments, by key."""

    body: Body
    price: float
    chosen: Mapping[str, RewrittenProgram]


def improvements(
    body: Body,
    differentiated: Collection[int],
    prices: Prices,
    patterns: Sequence[Pattern],
    budget: Budget,
    alpha: float = ALPHA,
    say: Callable[[str], None] = lambda stage: None,
) -> Iterator[Improvement]:
    """Yield equivalent programs, each cheaper than all before it; the first is the original.

    Equal budgets of programs yield equal programs in equal order; a larger one may yield more. The results of a round over the
    segments are tried at the end of the round.

    Args:
        body: The program.
        differentiated: The inputs, by number, whose gradients are wanted.
        prices: Prices programs on the machine.
        patterns: The patterns of the rules.
        budget: The length of the search.
        alpha: See `backtrack`.
        say: Receives a line of progress for every program that is priced.
    """
    original, whole = tidy(body), program(body, differentiated)
    best = Improvement(original, prices.whole(original, differentiated), {})
    yield best
    count, started = 0, time.perf_counter()
    own = _own_weights(whole, differentiated)
    turns = [_Turn(part, runs, prices, patterns, alpha, own[part.key]) for part, runs in _distinct(whole)]

    def improvement(cheaper: Mapping[str, RewrittenProgram]) -> Improvement:
        chosen = {**best.chosen, **cheaper}
        other = whole.with_segments({key: rewriting.body for key, rewriting in chosen.items()})
        return Improvement(other, prices.whole(other, differentiated, (1 - GAIN) * best.price), chosen)

    plain = improvement({})
    if plain.price < (1 - GAIN) * best.price:  # removing transposes and reshapes alone is a gain
        best = plain
        yield best
    last_gain, price_then = count, best.price  # the programs that were priced, and the price, at the last worthwhile gain
    while turns and budget.is_patient(count - last_gain, len(turns)):
        cheaper: dict[str, RewrittenProgram] = {}
        for turn in list(turns):
            if not budget.left(count, started):
                return
            rewriting = next(turn.reached, None)
            if rewriting is None:
                turns.remove(turn)
                continue
            count += 1
            say(f"best step {best.price * 1e3:.4g} ms; {count} rewritten programs priced, {budget.in_words(count, started)}")
            if turn.promises(rewriting, GAIN * best.price):
                cheaper[turn.part.key] = rewriting
        for attempt in _attempts(cheaper):
            other = improvement(attempt)
            if other.price < (1 - GAIN) * best.price:
                best = other
                if best.price < (1 - WORTHWHILE_GAIN) * price_then:
                    last_gain, price_then = count, best.price
                yield best
                if attempt is cheaper:
                    break


def _attempts(cheaper: Mapping[str, RewrittenProgram]) -> list[Mapping[str, RewrittenProgram]]:
    """Return what is tried of the cheaper segments of a round: all at once, and each alone, in case all at once gain nothing."""
    alone = ({key: rewriting} for key, rewriting in cheaper.items())
    return [cheaper, *alone] if len(cheaper) > 1 else list(alone)


def _distinct(whole: Program) -> list[tuple[Segment, int]]:
    """Return the distinct segments, including those inside scans and remats, and the runs of each."""
    first: dict[str, Segment] = {}
    runs: Counter[str] = Counter()
    for nested, times in whole.walk():
        for part in nested.segments:
            first.setdefault(part.key, part)
            runs[part.key] += times
    return [(part, runs[key]) for key, part in first.items()]


def _own_weights(whole: Program, differentiated: Collection[int]) -> Mapping[str, frozenset[int]]:
    """Return for every segment, by key, the inputs (by number) that are weights of the program and have no other reader."""
    weights = {v for k, v in enumerate(whole.body.inputs) if k in differentiated} - set(whole.body.outputs)
    readers = Counter(v for part in whole.segments for v in part.inputs)
    own: dict[str, frozenset[int]] = {}
    for nested, _ in whole.walk():
        for part in nested.segments:
            here = (k for k, v in enumerate(part.inputs) if nested is whole and v in weights and readers[v] == 1)
            inputs = frozenset(here)
            own[part.key] = own.get(part.key, inputs) & inputs
    return own


class _Turn:
    """The search for rewritings of one segment, advanced one program at a time."""

    def __init__(
        self, part: Segment, runs: int, prices: Prices, patterns: Sequence[Pattern], alpha: float, own: Collection[int]
    ) -> None:
        self.part, self.runs = part, runs
        self.reached = backtrack(
            part.body, patterns, lambda b, above: prices.of(planning_form(b), part.differentiated, own, above), alpha
        )
        self.least = next(self.reached).price

    def promises(self, rewriting: RewrittenProgram, enough: float) -> bool:
        """Return whether a program is cheaper than all before it, by at least `enough` in all runs together."""
        if (self.least - rewriting.price) * self.runs < enough:
            return False
        self.least = rewriting.price
        return True
