"""The joint search: algebra and parallelization together (Unity, section 5), over the rules of a library.

A program is cut into segments (level 1); the rewritings of each different segment are searched with backtracking (level 2), priced
by exact search over their parallelizations (level 3). What makes a segment cheaper is tried in the whole program, wherever that
segment is, and kept if the whole is cheaper too. Segments take turns, one program each, so a longer search first does what a
shorter one did.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unity.pcg.ir.program import Body
from unity.search.joint.backtracking import ALPHA, Found, backtrack
from unity.search.joint.nested import Program, program
from unity.search.joint.pricing import Prices
from unity.search.joint.segments import Segment
from unity.substitutions.rewriting.forms import closed
from unity.substitutions.rewriting.occurrences import Pattern
from unity.substitutions.rewriting.rewriting import tidy

GAIN = 2e-4  # what a rewriting of a segment must promise the whole program, and an improvement give it: a share of its price


@dataclass(frozen=True)
class Budget:
    """How long to search: programs that are priced, and seconds; nothing is no limit."""

    programs: int | None = None
    seconds: float | None = None

    def left(self, programs: int, started: float) -> bool:
        """Whether there is any left."""
        enough = self.programs is None or programs < self.programs
        return enough and (self.seconds is None or time.perf_counter() - started < self.seconds)

    def said(self, programs: int, started: float) -> str:
        """How much is left, in words; of programs also the seconds that they will take, if they take as long as those before."""
        spent, left = time.perf_counter() - started, list[str]()
        if self.programs is not None:
            more = self.programs - programs
            left.append(f"{more} programs" + (f" (about {more * spent / programs:.0f} s)" if programs else ""))
        if self.seconds is not None:
            left.append(f"{max(0.0, self.seconds - spent):.0f} s")
        return f"{' or '.join(left)} left" if left else "no limit"


@dataclass(frozen=True, eq=False)
class Improvement:
    """The whole program, rewritten: its price, and for some of its segments, by key, what takes their place."""

    body: Body
    price: float
    chosen: Mapping[str, Found]


def improvements(
    body: Body,
    differentiated: Collection[int],
    prices: Prices,
    patterns: Sequence[Pattern],
    budget: Budget,
    alpha: float = ALPHA,
    say: Callable[[str], None] = lambda stage: None,
) -> Iterator[Improvement]:
    """Programs that compute the same, each cheaper than all before it; the first is the given one.

    With the same budget of programs the same ones, in the same order; with a larger one these, and maybe more: what a round over
    the segments found is tried when the round is over.
    """
    given, whole = tidy(body), program(body, differentiated)
    best = Improvement(given, prices.whole(given, differentiated), {})
    yield best
    count, started = 0, time.perf_counter()
    own = _own(whole, differentiated)
    turns = [_Turn(part, often, prices, patterns, alpha, own[part.key]) for part, often in _different(whole)]

    def tried(better: Mapping[str, Found]) -> Improvement:
        chosen = {**best.chosen, **better}
        other = whole.with_segments({key: found.body for key, found in chosen.items()})
        return Improvement(other, prices.whole(other, differentiated, (1 - GAIN) * best.price), chosen)

    plain = tried({})
    if plain.price < (1 - GAIN) * best.price:  # transposes and reshapes alone
        best = plain
        yield best
    while turns:
        better: dict[str, Found] = {}
        for turn in list(turns):
            if not budget.left(count, started):
                return
            found = next(turn.reached, None)
            if found is None:
                turns.remove(turn)
                continue
            count += 1
            say(f"best step {best.price * 1e3:.4g} ms; {count} rewritten programs priced, {budget.said(count, started)}")
            if turn.promises(found, GAIN * best.price):
                better[turn.part.key] = found
        # all at once, and if that is no gain, one by one
        attempts = [better, *({key: found} for key, found in better.items() if len(better) > 1)] if better else []
        for attempt in attempts:
            other = tried(attempt)
            if other.price < (1 - GAIN) * best.price:
                best = other
                yield best
                if attempt is better:
                    break


def _different(whole: Program) -> list[tuple[Segment, int]]:
    """Segments that are not equal, those inside of scans and remats too, and how often each runs."""
    first: dict[str, Segment] = {}
    often: Counter[str] = Counter()
    for one, times in whole.walk():
        for part in one.segments:
            first.setdefault(part.key, part)
            often[part.key] += times
    return [(part, often[key]) for key, part in first.items()]


def _own(whole: Program, differentiated: Collection[int]) -> Mapping[str, frozenset[int]]:
    """Of every segment, by key, the inputs (by number) that are weights of the program which no other place reads."""
    weights = {v for k, v in enumerate(whole.body.inputs) if k in differentiated} - set(whole.body.outputs)
    readers = Counter(v for part in whole.segments for v in part.inputs)
    found: dict[str, frozenset[int]] = {}
    for one, _ in whole.walk():
        for part in one.segments:
            mine = (k for k, v in enumerate(part.inputs) if one is whole and v in weights and readers[v] == 1)
            mine = frozenset(mine)
            found[part.key] = found.get(part.key, mine) & mine
    return found


class _Turn:
    """The search for one segment, taken a step at a time."""

    def __init__(
        self, part: Segment, often: int, prices: Prices, patterns: Sequence[Pattern], alpha: float, own: Collection[int]
    ) -> None:
        self.part, self.often = part, often
        self.reached = backtrack(part.body, patterns, lambda b, above: prices.of(closed(b), part.differentiated, own, above), alpha)
        self.least = next(self.reached).price

    def promises(self, found: Found, enough: float) -> bool:
        """Whether a program is cheaper than all before it, by so much in all places together."""
        if (self.least - found.price) * self.often < enough:
            return False
        self.least = found.price
        return True
