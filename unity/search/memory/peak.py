"""When most is held while operators have their turns, and what takes no memory of its own then.

A gradient is there when that of the weight's first reader is, and the backward pass takes operators in reverse. So what is held for
later readers alone is gone by then, and may lie in the gradient's place, one value at a time: the largest gradient takes the
largest value that fits, then the next one does.

What finds a place so only grows along the operators: a further gradient, or a further value, takes none of what was found away (at
worst they exchange places with something smaller). So what finds a place at some operators bounds from below what does at those
after them, and of most operators nothing has to be looked at: less is held there, in any case, than somewhere else.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

MARKS = 32  # operators at which it is looked at first


@dataclass(frozen=True)
class Later:
    """A gradient that is not there from the start: its bytes, and the first operator that reads the weight."""

    nbytes: float
    first: int


Sizes = Mapping[float, list[int]]  # bytes of values → the operators that they are held for, ascending


@dataclass(frozen=True, eq=False)
class Turns:
    """What is held at each operator's turn, in bytes.

    `kept`: for whose sake; from that operator on, or, where `early` says so, from the start. `own`: at its turn alone. `later`: the
    largest first.
    """

    kept: Sequence[Sequence[float]]
    early: Sequence[bool]
    own: Sequence[Sequence[float]]
    later: Sequence[Later]

    def highest(self) -> tuple[int, float] | None:
        """The operator at whose turn most is held, and how much that is; none if there is no operator.

        Of those that hold as much, it is the first of those which would without what finds a place.
        """
        sizes = self.sizes
        placed, least = 0.0, list[float]()
        for i in range(len(sizes)):
            if self.later and i % self.step == 0:
                placed = sum(n for _, n in self.placed(i, ()))
            least.append(placed)
        best: tuple[float, float, int] | None = None
        for i in sorted(range(len(sizes)), key=lambda i: least[i] - sizes[i]):
            if best is not None and sizes[i] - least[i] < best[0]:
                break
            here = sizes[i] - sum(n for _, n in self.placed(i, self.own[i]))
            best = max(best, (here, sizes[i], -i)) if best else (here, sizes[i], -i)
        return None if best is None else (-best[2], best[0])

    @property
    def step(self) -> int:
        """How many operators are between two at which it is looked at first."""
        return max(1, len(self.kept) // MARKS)

    @cached_property
    def sizes(self) -> list[float]:
        """All bytes that are held at each turn, whether they take memory of their own or not."""
        sums = [sum(k) for k in self.kept]
        below = sum(n for n, first in zip(sums, self.early, strict=True) if first)
        found = []
        for n, first, own in zip(sums, self.early, self.own, strict=True):
            below += 0.0 if first else n
            found.append(below + sum(own))
        return found

    def placed(self, at: int, own: Sequence[float]) -> list[tuple[int, float]]:
        """At an operator's turn, the gradients in whose place something lies, by number, and its bytes; `own`: held there too."""
        if not self.later:
            return []
        held = {n: ready[: bisect_right(ready, at)] for n, ready in self.from_turn.items()}
        for n, operators in self.from_start.items():
            held[n] = sorted([*held.get(n, ()), *operators])
        for n in own:
            if n > 0:
                held[n] = sorted([*held.get(n, ()), at])
        return places(held, self.later, at)

    @cached_property
    def from_turn(self) -> Sizes:
        """Values that are held from their operator's turn on."""
        return self._of(early=False)

    @cached_property
    def from_start(self) -> Sizes:
        """Values that are held from the start."""
        return self._of(early=True)

    def _of(self, early: bool) -> Sizes:
        found: dict[float, list[int]] = {}
        for i, (kept, first) in enumerate(zip(self.kept, self.early, strict=True)):
            for n in kept if first == early else ():
                if n > 0:
                    found.setdefault(n, []).append(i)
        return found


def places(held: Sizes, later: Sequence[Later], at: int) -> list[tuple[int, float]]:
    """The gradients in whose place something lies, by number, and its bytes. `held` is used up; `later`: the largest first.

    Of values of one size the one goes first that is held for the last operator: if that does not fit, no other does.
    """
    sizes, found = sorted((n for n, operators in held.items() if operators), reverse=True), []
    for k, gradient in enumerate(later):
        if gradient.first >= at:
            continue
        while sizes and sizes[0] > gradient.nbytes:
            del sizes[0]  # those that follow are smaller
        for n in sizes:
            if held[n][-1] > gradient.first:
                held[n].pop()
                found.append((k, n))
                if not held[n]:
                    sizes.remove(n)
                break
    return found
