"""Lower bounds on the strategies that use each value of a variable, by which a search excludes most values.

The method is sequential tree-reweighted message passing (Kolmogorov 2006, "Convergent tree-reweighted message passing for energy
minimization", section 4.2). The graph is covered by chains that are monotonic in the order of the variables; messages move cost
between them so that the sum of the chains' minima, a lower bound, never falls. A pass takes time quadratic in the number of values,
whereas eliminating a variable between two others takes cubic time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from unity.search.solver.problem import Array

# A value is excluded only if its bound exceeds the best known objective by more than this, relatively, so not by rounding.
ABOVE = 1e-9
Messages = dict[tuple[int, int], Array]  # from a variable to a neighbour: a cost for each of the neighbour's values


@dataclass(frozen=True, eq=False)
class Energy:
    """One objective's tables: `pairs[s, t]`, s < t, is [values of s, values of t]. An infinite cost forbids an entry."""

    unary: list[Array]
    pairs: dict[tuple[int, int], Array]

    @property
    def entries(self) -> int:
        return sum(table.size for table in self.pairs.values())

    def at(self, values: Sequence[int]) -> float:
        """Return the objective of one strategy."""
        alone = sum(float(own[v]) for own, v in zip(self.unary, values, strict=True))
        return alone + sum(float(table[values[s], values[t]]) for (s, t), table in self.pairs.items())


class Bounds:
    """Lower bounds on all strategies, and on those that use each value. They rise from pass to pass.

    `start` is the messages of a similar objective, if there is one.
    """

    def __init__(self, energy: Energy, start: Messages | None = None) -> None:
        self.energy = energy
        count = len(energy.unary)
        self.before: list[list[int]] = [[] for _ in range(count)]
        self.after: list[list[int]] = [[] for _ in range(count)]
        for s, t in sorted(energy.pairs):
            self.after[s].append(t)
            self.before[t].append(s)
        # each chain's share of the cost of a variable on it
        self.share = [1 / max(1, len(b), len(a)) for b, a in zip(self.before, self.after, strict=True)]
        self.work = np.empty(max((table.size for table in energy.pairs.values()), default=0))
        ends = [edge for s, t in energy.pairs for edge in ((s, t), (t, s))]
        self.messages = dict(start) if start else {(s, t): np.zeros(len(energy.unary[t])) for s, t in ends}
        self.least = -np.inf
        self.incumbent: tuple[float, Sequence[int]] = np.inf, ()  # the cost and the values of the best strategy so far
        self.excess = [own - own.min() for own in energy.unary]

    def improve(self, passes: int) -> float:
        """Make `passes` passes in both directions. Returns the objective of the incumbent, the best strategy so far."""
        for _ in range(passes):
            self._backward()
            self.least = max(self.least, self._bound())
            values = self._decoded()
            self.incumbent = min(self.incumbent, (self.energy.at(values), values), key=lambda known: known[0])
            self.excess = self._forward()
        return self.incumbent[0]

    def left(self, best: float) -> list[Array]:
        """Return for every variable the values that some strategy no worse than `best` may use."""
        most = best - self.least + ABOVE * abs(best)
        return [np.flatnonzero(np.isfinite(own) & (own <= most)) for own in self.excess]

    def enough(self, best: float, share: float) -> bool:
        """Return whether bounds are tight enough for strategies no worse than `best`.

        They are if they leave at most this share of the tables' entries, or prove that all such strategies are equally good.
        """
        return self.remaining(best) <= share or best <= self.least + ABOVE * abs(best)

    def remaining(self, best: float) -> float:
        """Return the share of the tables' entries that strategies no worse than `best` may use."""
        left = tuple(map(len, self.left(best)))
        return sum(left[s] * left[t] for s, t in self.energy.pairs) / max(1, self.energy.entries)

    def first(self, count: int) -> list[Array]:
        """Return for every variable the values with the lowest bounds, ascending."""
        return [np.sort(np.argsort(own, kind="stable")[:count]) for own in self.excess]

    def _forward(self) -> list[Array]:
        """Make a pass in the order of the variables. Returns the excess of every value over its variable's best.

        Any strategy with this value exceeds the bound by at least its excess: at its turn, a variable's own cost plus its messages
        are the minima of the chains through it, for each of its values.
        """
        return [own - own.min() for own in self._pass(range(len(self.energy.unary)), self.after)]

    def _backward(self) -> None:
        """Make a pass against the order of the variables."""
        for _ in self._pass(reversed(range(len(self.energy.unary))), self.before):
            pass

    def _pass(self, order: Iterable[int], ahead: list[list[int]]) -> Iterable[Array]:
        """Send a message from each variable to its neighbours `ahead`. Yields its own cost plus the messages that it received."""
        for s in order:
            own = self._gathered(s)
            for t in ahead[s]:
                # inf - inf where a value is forbidden
                share = np.where(np.isfinite(own), self.share[s] * own - self._finite(t, s), np.inf)
                self.messages[s, t] = self._minimum(s, t, share)
            yield own

    def _finite(self, t: int, s: int) -> Array:
        """Return the message from t to s, with 0 for forbidden values."""
        message = self.messages[t, s]
        return np.where(np.isfinite(message), message, 0.0)

    def _gathered(self, s: int) -> Array:
        """Return the own cost of a variable plus all messages to it."""
        total = self.energy.unary[s].copy()
        for t in (*self.before[s], *self.after[s]):
            total += self.messages[t, s]
        return total

    def _minimum(self, s: int, t: int, own: Array) -> Array:
        """Return for every value of t the minimum over the values of s of their table plus a cost of s."""
        table = self.energy.pairs[min(s, t), max(s, t)]
        total = self.work[: table.size].reshape(table.shape)
        if s < t:
            return np.add(table, own[:, None], out=total).min(0)
        return np.add(table, own, out=total).min(1)

    def _bound(self) -> float:
        """Return the sum of the chains' minima after a backward pass, each taken where its chain starts."""
        starting = (1 - share * len(before) for share, before in zip(self.share, self.before, strict=True))
        return sum(part * float(self._gathered(s).min()) for s, part in enumerate(starting) if part > 0)

    def _decoded(self) -> list[int]:
        """Return a strategy: variable by variable the best value, given the values before it and the messages from those after
        it.
        """
        values: list[int] = []
        for s, own in enumerate(self.energy.unary):
            total = own.copy()
            for t in self.before[s]:
                total += self.energy.pairs[t, s][values[t]]
            for t in self.after[s]:
                total += self.messages[t, s]
            values.append(int(total.argmin()))
        return values
