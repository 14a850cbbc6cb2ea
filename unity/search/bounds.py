"""Lower bounds on all strategies that use a value of a variable, by which most values are left out of a search.

Sequential tree-reweighted message passing (Kolmogorov 2006, "Convergent tree-reweighted message passing for energy
minimization", section 4.2). The graph is covered by chains that are monotonic in the order of the variables; messages
move cost between them so that the sum of the chains' minima, a lower bound, never falls. A pass takes time quadratic in
the number of values, where to eliminate a variable between two others takes cubic time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from unity.search.problem import Array

# Values are left out only if their bound is above the best known by more than rounding, relatively.
ABOVE = 1e-9
# The tables are cut down when that leaves no more than this share of them.
CUT = 0.8
# Passes without much progress: so many, in each of which the gap shrank by less than this share.
STALLED, PROGRESS = 8, 0.01

Messages = dict[tuple[int, int], Array]  # from a variable to a neighbour: a cost for each of the neighbour's values


@dataclass(frozen=True, eq=False)
class Energy:
    """One objective's tables: `pairs[s, t]`, s < t, is [values of s, values of t]. Infinite is forbidden."""

    unary: list[Array]
    pairs: dict[tuple[int, int], Array]

    @property
    def entries(self) -> int:
        return sum(table.size for table in self.pairs.values())

    def at(self, values: Sequence[int]) -> float:
        """The objective of one strategy."""
        alone = sum(float(own[v]) for own, v in zip(self.unary, values, strict=True))
        return alone + sum(float(table[values[s], values[t]]) for (s, t), table in self.pairs.items())

    def cut(self, left: Sequence[Array]) -> Energy:
        """The same on the values that are left, a mask for every variable."""
        unary = [own[mask] for own, mask in zip(self.unary, left, strict=True)]
        return Energy(unary, {(s, t): table[np.ix_(left[s], left[t])] for (s, t), table in self.pairs.items()})


@dataclass(frozen=True, eq=False)
class Pruned:
    """For every variable the values that a best strategy may use, and the bounds that its objective lies between.

    `messages` are a start for an objective that is not much different.
    """

    kept: list[Array]
    bound: float
    best: float
    messages: Messages
    excess: list[Array]  # of every value that is kept, over the bound

    def first(self, count: int) -> list[Array]:
        """For every variable, of the values that are kept those with the lowest bounds, ascending."""
        ranked = (np.argsort(excess, kind="stable")[:count] for excess in self.excess)
        return [kept[np.sort(best)] for kept, best in zip(self.kept, ranked, strict=True)]


def pruned(energy: Energy, best: float, start: Messages | None, passes: int, enough: float) -> Pruned:
    """Leaves out values that no strategy as good as `best`, the objective of a known one, can use.

    It stops after so many `passes`; when what is left has no more than the share `enough` of all entries; when the
    best known strategy is proved to be the best; or when there is hardly any progress.
    """
    kept = [np.arange(len(own)) for own in energy.unary]
    full = dict(start) if start is not None else _zeros(energy)
    descent = _Descent(energy, dict(full))
    wanted = enough * energy.entries
    excess = energy.unary
    bound, gap, stalled = -np.inf, np.inf, 0
    for number in range(passes):
        descent.backward()
        bound = max(bound, descent.bound())
        if not np.isfinite(bound):
            break
        best = min(best, descent.energy.at(descent.decoded()))
        before, gap = gap, best - bound
        stalled = 0 if gap < (1 - PROGRESS) * before or not np.isfinite(gap) else stalled + 1
        excess = descent.forward()
        left = [np.isfinite(own) & (own <= gap + ABOVE * abs(best)) for own in excess]
        remain = sum(int(left[s].sum()) * int(left[t].sum()) for s, t in energy.pairs)
        done = gap <= ABOVE * abs(best) or stalled == STALLED or remain <= wanted or number == passes - 1
        if done or remain < CUT * descent.energy.entries:
            full = _remembered(full, kept, descent.messages)
            kept, excess = ([own[mask] for own, mask in zip(all_, left, strict=True)] for all_ in (kept, excess))
            descent = _Descent(descent.energy.cut(left), {e: m[left[e[1]]] for e, m in descent.messages.items()})
        if done:
            break
    return Pruned(kept, bound, best, full, excess)


def _zeros(energy: Energy) -> Messages:
    ends = [edge for s, t in energy.pairs for edge in ((s, t), (t, s))]
    return {(s, t): np.zeros(len(energy.unary[t])) for s, t in ends}


def _remembered(full: Messages, kept: Sequence[Array], messages: Messages) -> Messages:
    """Messages to all values: the new ones to those that are kept, the old ones to the others."""
    result = {}
    for edge, message in messages.items():
        result[edge] = full[edge].copy()
        # what is forbidden under one objective is so under all, but with fewer values left more looks forbidden
        usable = np.isfinite(message)
        result[edge][kept[edge[1]][usable]] = message[usable]
    return result


class _Descent:
    """Messages, and the passes that improve them."""

    def __init__(self, energy: Energy, messages: Messages) -> None:
        self.energy = energy
        self.messages = messages
        count = len(energy.unary)
        self.before: list[list[int]] = [[] for _ in range(count)]
        self.after: list[list[int]] = [[] for _ in range(count)]
        for s, t in sorted(energy.pairs):
            self.after[s].append(t)
            self.before[t].append(s)
        # the share of a variable's cost that each chain through it has
        self.share = [1 / max(1, len(b), len(a)) for b, a in zip(self.before, self.after, strict=True)]
        self.work = np.empty(max((table.size for table in energy.pairs.values()), default=0))

    def forward(self) -> list[Array]:
        """A pass in the order of the variables. For every value, by how much it is worse than the variable's best.

        That is the excess over the bound of any strategy with this value: at its turn, a variable's own cost and its
        messages are together the minima, for each of its values, of the chains through it.
        """
        return [own - own.min() for own in self._pass(range(len(self.energy.unary)), self.after)]

    def backward(self) -> None:
        """A pass against the order of the variables."""
        for _ in self._pass(reversed(range(len(self.energy.unary))), self.before):
            pass

    def _pass(self, order: Iterable[int], ahead: list[list[int]]) -> Iterable[Array]:
        for s in order:
            own = self._gathered(s)
            for t in ahead[s]:
                # inf - inf where a value is forbidden
                share = np.where(np.isfinite(own), self.share[s] * own - self._finite(t, s), np.inf)
                self.messages[s, t] = self._minimum(s, t, share)
            yield own

    def _finite(self, t: int, s: int) -> Array:
        message = self.messages[t, s]
        return np.where(np.isfinite(message), message, 0.0)

    def _gathered(self, s: int) -> Array:
        total = self.energy.unary[s].copy()
        for t in (*self.before[s], *self.after[s]):
            total += self.messages[t, s]
        return total

    def _minimum(self, s: int, t: int, own: Array) -> Array:
        """For every value of t, the minimum over the values of s of their table and a cost of s."""
        table = self.energy.pairs[min(s, t), max(s, t)]
        total = self.work[: table.size].reshape(table.shape)
        if s < t:
            return np.add(table, own[:, None], out=total).min(0)
        return np.add(table, own, out=total).min(1)

    def bound(self) -> float:
        """The sum of the chains' minima, after a backward pass: each where the chain starts."""
        starting = (1 - share * len(before) for share, before in zip(self.share, self.before, strict=True))
        return sum(part * float(self._gathered(s).min()) for s, part in enumerate(starting) if part > 0)

    def decoded(self) -> list[int]:
        """A strategy: variable by variable the best value, given those before, and messages for those after."""
        values: list[int] = []
        for s, own in enumerate(self.energy.unary):
            total = own.copy()
            for t in self.before[s]:
                total += self.energy.pairs[t, s][values[t]]
            for t in self.after[s]:
                total += self.messages[t, s]
            values.append(int(total.argmin()))
        return values
