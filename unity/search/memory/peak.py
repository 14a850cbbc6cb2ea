"""Peak memory of a sequence of operators' turns, where values reuse the memory of gradients that are not yet computed.

A weight's gradient is complete when the backward pass, which takes operators in reverse, reaches the weight's first reader. Values
that only later operators need are dead by then, so they may use the gradient's memory, one value per gradient: the largest gradient
takes the largest value that fits, then the next gradient does.

The reused bytes never decrease from one turn to a later one: a further gradient or value displaces none (at worst, values give way
to smaller ones). So the reuse at some turns is a lower bound on the reuse at the turns after them, and most turns need not be
examined, because another turn certainly needs more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

MARKS = 32  # turns whose reuse is computed first, as a lower bound on that of later turns


@dataclass(frozen=True)
class ReusableGradient:
    """A gradient whose memory may be reused before it is computed: its bytes, and the first operator that reads its weight."""

    nbytes: float
    first: int


Sizes = Mapping[float, list[int]]  # by the bytes of values, the operators that need them, ascending


@dataclass(frozen=True, eq=False)
class Turns:
    """The bytes that are live at each operator's turn.

    Args:
        kept: For each operator, the bytes of its residuals.
        early: For each operator, whether its residuals are live from the start, not only from its turn on.
        own: For each operator, the bytes that are live at its turn alone.
        later: The gradients whose memory may be reused, largest first.
    """

    kept: Sequence[Sequence[float]]
    early: Sequence[bool]
    own: Sequence[Sequence[float]]
    later: Sequence[ReusableGradient]

    def highest(self) -> tuple[int, float] | None:
        """Return the operator at whose turn memory is highest, and the bytes; None without operators.

        Of several, it is the one with the most bytes before reuse; of those, the first.
        """
        sizes = self.sizes
        lower_bound, least = 0.0, list[float]()
        for i in range(len(sizes)):
            if self.later and i % self.step == 0:
                lower_bound = sum(n for _, n in self.reused(i, ()))
            least.append(lower_bound)
        best: tuple[float, float, int] | None = None
        for i in sorted(range(len(sizes)), key=lambda i: least[i] - sizes[i]):
            if best is not None and sizes[i] - least[i] < best[0]:
                break
            here = sizes[i] - sum(n for _, n in self.reused(i, self.own[i]))
            best = max(best, (here, sizes[i], -i)) if best else (here, sizes[i], -i)
        return None if best is None else (-best[2], best[0])

    @property
    def step(self) -> int:
        """The number of operators from one turn whose reuse is computed first to the next."""
        return max(1, len(self.kept) // MARKS)

    @cached_property
    def sizes(self) -> list[float]:
        """The bytes that are live at each turn, before reuse."""
        sums = [sum(k) for k in self.kept]
        below = sum(n for n, first in zip(sums, self.early, strict=True) if first)
        totals = []
        for n, first, own in zip(sums, self.early, self.own, strict=True):
            below += 0.0 if first else n
            totals.append(below + sum(own))
        return totals

    def reused(self, at: int, own: Sequence[float]) -> list[tuple[int, float]]:
        """Return the gradients whose memory is reused at an operator's turn, by number, with the reused bytes.

        `own` are the bytes that are live at that turn alone.
        """
        if not self.later:
            return []
        live = {n: ready[: bisect_right(ready, at)] for n, ready in self.from_turn.items()}
        for n, operators in self.from_start.items():
            live[n] = sorted([*live.get(n, ()), *operators])
        for n in own:
            if n > 0:
                live[n] = sorted([*live.get(n, ()), at])
        return assign_reuse(live, self.later, at)

    @cached_property
    def from_turn(self) -> Sizes:
        """Residuals that are live from their operator's turn on."""
        return self._sizes(early=False)

    @cached_property
    def from_start(self) -> Sizes:
        """Residuals that are live from the start."""
        return self._sizes(early=True)

    def _sizes(self, early: bool) -> Sizes:
        sizes: dict[float, list[int]] = {}
        for i, (residuals, first) in enumerate(zip(self.kept, self.early, strict=True)):
            for n in residuals if first == early else ():
                if n > 0:
                    sizes.setdefault(n, []).append(i)
        return sizes


def assign_reuse(live: Sizes, later: Sequence[ReusableGradient], at: int) -> list[tuple[int, float]]:
    """Assign values to the memory of gradients that are not yet computed. Returns the gradients, by number, with the reused bytes.

    Of values of equal size the one for the last operator goes first: if that does not fit, no other does.

    Args:
        live: The live values. The call consumes them.
        later: The gradients, largest first.
        at: The operator whose turn it is.
    """
    sizes, reused = sorted((n for n, operators in live.items() if operators), reverse=True), []
    for k, gradient in enumerate(later):
        if gradient.first >= at:
            continue
        while sizes and sizes[0] > gradient.nbytes:
            del sizes[0]  # those that follow are smaller
        for n in sizes:
            if live[n][-1] > gradient.first:
                live[n].pop()
                reused.append((k, n))
                if not live[n]:
                    sizes.remove(n)
                break
    return reused
