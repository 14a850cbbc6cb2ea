"""The choice of the least number of a transformation that saves memory, such as that of recomputed layers (`recomputing.choose`).

The larger the number, the slower the fastest strategy of the program, and the less memory it needs. So the best number is the least
whose fastest strategy fits a memory limit, or a smaller one with a leaner strategy. Each program is priced by a search; bounds
exclude most.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from math import ceil, inf
from typing import Generic, TypeVar

from unity.base.errors import InfeasibleError
from unity.search.request import Wish
from unity.search.session import Candidate, Search
from unity.transforms.transformation import Transformation, TransformationCandidate

T = TypeVar("T", bound=Transformation)

NONE = (inf, inf)  # the worth of no strategy


@dataclass(frozen=True, eq=False)
class LimitedWish(Wish):
    """The request for a program that fits a memory limit.

    Args:
        limit: The memory of a device, in bytes.
    """

    limit: float = inf


@dataclass(frozen=True, eq=False)
class LimitedChoice(Generic[T]):
    """The best transformed program, if any fits, and the programs that were tried.

    Args:
        best: The best program that fits.
        tried: The searches of all programs that were tried. Bounds excluded some of them.
        searched: The searches among them that were asked for their best strategy.
    """

    best: TransformationCandidate[T] | None = None
    tried: Sequence[Search] = ()
    searched: Sequence[Search] = ()

    @property
    def leanest(self) -> Search | None:
        """The search of the program with the least bound on memory."""
        return min(self.tried, key=lambda search: search.least_memory.total, default=None)


@dataclass(frozen=True, eq=False)
class Way(Generic[T]):
    """A transformation that may be tried, and is applied when it is first asked for.

    Args:
        key: Its identity: transformations of equal keys lead to equal programs.
        text: The line of progress about it.
        transform: Returns the transformation, and the search of the program that it leads to.
    """

    key: Hashable
    text: str
    transform: Callable[[], tuple[T, Search]]


@dataclass(frozen=True, eq=False)
class Numbered(Generic[T]):
    """The transformation of each number from 0 to `count`; None for a number that changes nothing."""

    way: Callable[[int], Way[T] | None]
    count: int


@dataclass(eq=False)
class Programs(Generic[T]):
    """The programs that were searched, and the best of them.

    Attributes:
        wish: the request.
        chosen: the best that fits.
        known: the transformations, by key, with their searches.
        worths: the results of `worth`, by search.
        searched: the searches that were asked for their best strategy.
    """

    wish: LimitedWish
    chosen: TransformationCandidate[T] | None = None
    known: dict[Hashable, tuple[T, Search]] = field(default_factory=dict)
    worths: dict[Search, tuple[float, float]] = field(default_factory=dict)
    searched: list[Search] = field(default_factory=list)

    @property
    def choice(self) -> LimitedChoice[T]:
        """The best program, and those that were tried."""
        return LimitedChoice(self.chosen, [search for _, search in self.known.values()], self.searched)

    def refine(self, choices: Numbered[T]) -> int:
        """Search the program of the least number that suffices, and better ones around it.

        Returns the best number, or 0 if none is better than what was found before.
        """
        number = self.least_number(choices)
        numbers = [min(number, choices.count), max(0, number - 1), *([choices.count] if self.wish.than is None else [])]
        worth = {0: NONE} | {k: self.worth(choices.way(k)) for k in dict.fromkeys(numbers)}  # the quickest search first
        while min(worth.values()) < NONE:
            at, tried = min(worth, key=lambda k: worth[k]), sorted(worth)
            place = tried.index(at)
            around = tried[max(0, place - 1) : place + 2]
            between = {(low + high) // 2 for low, high in pairwise(around)} - worth.keys()
            if not between:
                break
            worth |= {k: self.worth(choices.way(k)) for k in between}
        return min(worth, key=lambda k: worth[k])

    def least_number(self, choices: Numbered[T]) -> int:
        """Return the least number with which the fastest strategy fits or is too slow; `count` + 1 if none suffices.

        Two numbers in three are guessed; the third halves the interval.
        """
        low, high, tried = 0, choices.count + 1, dict[int, Sequence[Candidate]]()
        if choices.way(0) is None:
            low, tried[0] = 1, () if self.wish.than is None else self.unrefined(self.wish.than[0])
        for turn in count():
            if low >= high:
                break
            guess = self.guessed_part(tried.get(low - 1, ()), tried.get(high, ())) if turn % 3 < 2 else None
            number = (low + high) // 2 if guess is None else ceil(low - 1 + guess * (high - low + 1))
            number = min(max(number, low), high - 1)
            way = choices.way(number)
            tried[number] = () if way is None else self.unrefined(self.program(way)[1])
            if self.suffices(tried[number]):
                high = number
            else:
                low = number + 1
        return low

    def guessed_part(self, less: Sequence[Candidate], more: Sequence[Candidate]) -> float | None:
        """Return the part of the way between two numbers at which the fastest strategy should fit or be too slow.

        Its time and its memory are nearly linear in the number. Returns None if nothing is known of one of the numbers.
        """
        if not less or not more:
            return None
        bounds = [(less[0].memory, more[0].memory, self.wish.limit)]
        bounds += [(less[0].time, more[0].time, self.best.time)] if self.best is not None else []
        parts = ((bound - start) / (end - start) for start, end, bound in bounds if start != end)
        return min((part for part in parts if 0 <= part <= 1), default=None)

    def suffices(self, strategies: Sequence[Candidate]) -> bool:
        """Return whether no larger number is needed: the fastest strategy of the program fits, or it is too slow."""
        return any(self.is_beaten(c.time, inf) or c.memory <= self.wish.limit for c in strategies)

    def unrefined(self, search: Search) -> Sequence[Candidate]:
        """Return the fastest strategy of a program's first search; none if bounds exclude that one fits."""
        if search.least_memory.total > self.wish.limit:
            return ()
        try:
            return search.unrefined
        except InfeasibleError:  # the user's constraints leave an operator of it no choice
            return ()

    def program(self, way: Way[T]) -> tuple[T, Search]:
        """Return a transformation, and the search of the program that it leads to."""
        if way.key not in self.known:
            self.wish.say(way.text)
            self.known[way.key] = way.transform()
        return self.known[way.key]

    def worth(self, way: Way[T] | None) -> tuple[float, float]:
        """Return the worth of the best strategy of a program: `NONE` if others were better.

        Of a program that an earlier series tried it is the worth that it had then: what lies around it in this series may be better
        than all, though it is beaten by now.
        """
        if way is None:
            return NONE
        transformation, search = self.program(way)
        if search not in self.worths:
            candidate = self.better(search)
            if candidate is not None:
                self.chosen = TransformationCandidate(transformation, search, candidate)
            self.worths[search] = NONE if candidate is None else self.wish.worth(candidate)
        return self.worths[search]

    def better(self, search: Search) -> Candidate | None:
        """Return the best strategy of a program, or None if none fits and is better than the best so far.

        A program is not searched if bounds, or estimates by its first search, exclude that.
        """
        limit, least = self.wish.limit, search.least_memory.total
        try:
            if least > limit or any(self.is_beaten(c.time, least) for c in search.unrefined):
                return None
            if self.is_beaten(search.estimated_time(limit), least):
                return None
            candidate = self.wish.choose(search)
        except InfeasibleError:  # the user's constraints leave an operator of it no choice
            return None
        self.searched.append(search)
        return None if candidate is None or self.is_beaten(candidate.time, candidate.memory) else candidate

    def is_beaten(self, time: float, memory: float) -> bool:
        """Return whether the best program so far, or the plan to beat, is at least as good as one with this time and memory."""
        best = self.best
        return best is not None and self.wish.worth(best) <= self.wish.worth(replace(best, time=time, memory=memory))

    @property
    def best(self) -> Candidate | None:
        """The strategy of the best program so far, or the one to beat."""
        return self.chosen.candidate if self.chosen is not None else self.wish.than and self.wish.than[1]
