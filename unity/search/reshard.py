"""What it costs to change types: the sequence of `pcg.resharding`, priced for all pairs of types at once.

Every step is one collective whose time is alpha + beta · bytes, so a change costs a + b · (bytes of the whole tensor), with
coefficients that depend on the two types only. They are computed once for a set of types and used for every tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from unity.pcg.axis import Axis
from unity.pcg.resharding import IMPOSSIBLE
from unity.pcg.state import Digit, Type, digits
from unity.search.collectives import table
from unity.search.machine import Machine

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Changes:
    """Coefficients for every pair (from, to). Seconds are `alpha + beta · nbytes` with the whole tensor's bytes."""

    forward: tuple[Array, Array]
    backward: tuple[Array, Array]
    gathers: tuple[Array, Array]  # the forward all-gathers alone: what gathering again costs
    size: Array  # what one device holds afterwards, as a fraction of the tensor; 0 where no new buffer is made
    gathered: Array  # whether anything is gathered
    possible: Array


@cache
def changes(machine: Machine, before: tuple[Type, ...], after: tuple[Type, ...]) -> Changes:
    """The coefficients of all changes between two sets of types on a machine's axes."""
    return _Pricing(machine, before, after).run()


class _Pricing:
    """Follows all pairs through the steps of `pcg.resharding.steps`, in the same order."""

    def __init__(self, machine: Machine, before: tuple[Type, ...], after: tuple[Type, ...]) -> None:
        self.machine, axes = machine, machine.axes
        self.k = len(axes)
        numbers: dict[Digit, int] = {}
        self.old_kind, self.old = _codes(before, axes, numbers)
        self.new_kind, self.new = _codes(after, axes, numbers)
        self.clash = _clashes(list(numbers))
        self.dims = np.array([d.dim for d in numbers] + [-1])
        self.shape = (len(before), len(after))
        self.sizes = [a.size for a in axes]
        zero = np.zeros(self.shape)
        self.cost = {name: [zero.copy(), zero.copy()] for name in ("forward", "backward", "gathers")}
        self.gathered = np.zeros(self.shape, bool)

    def run(self) -> Changes:
        state = [np.broadcast_to(self.old_kind[:, None, i], self.shape).copy() for i in range(self.k)]
        goal = [np.broadcast_to(self.new_kind[None, :, i], self.shape) for i in range(self.k)]
        same = [self.old[:, None, i] == self.new[None, :, i] for i in range(self.k)]
        self.fraction = np.ones(self.shape)
        for i, n in enumerate(self.sizes):
            self.fraction = np.where(state[i] == "P", self.fraction / n, self.fraction)
        possible = np.ones(self.shape, bool)
        for i in range(self.k):
            for a, b in IMPOSSIBLE:
                possible &= ~((state[i] == a) & (goal[i] == b))
        early = self.early(state, same)
        self.gather([e & (g != "U") for e, g in zip(early, goal, strict=True)], state, "R")
        self.gather([e & (g == "U") for e, g in zip(early, goal, strict=True)], state, "U")
        moves = [~e & (s == "P") & (g == "P") & ~m for e, s, g, m in zip(early, state, goal, same, strict=True)]
        self.slice([(s == "R") & (g == "P") for s, g in zip(state, goal, strict=True)], state, None)
        self.slice([(s == "U") & (g == "P") for s, g in zip(state, goal, strict=True)], state, "all-gather")
        chosen = [(s == "S") & (g == "P") for s, g in zip(state, goal, strict=True)]
        mask = self.mask(chosen)
        self.add("forward", "reduce-scatter", mask)
        self.add("backward", "all-gather", mask)
        self.become(chosen, state, "P")
        mask = self.mask(moves)
        self.add("forward", "all-to-all", mask)
        self.add("backward", "all-to-all", mask)
        chosen = [(s == "S") & (g != "S") for s, g in zip(state, goal, strict=True)]
        self.add("forward", "all-reduce", self.mask(chosen))
        self.become(chosen, state, "U")
        chosen = [(s == "U") & (g == "R") for s, g in zip(state, goal, strict=True)]
        self.add("backward", "all-reduce", self.mask(chosen))
        self.become(chosen, state, "R")
        self.gather([(s == "P") & (g == "R") for s, g in zip(state, goal, strict=True)], state, "R")
        self.gather([(s == "P") & (g == "U") for s, g in zip(state, goal, strict=True)], state, "U")
        moved = np.zeros(self.shape, bool)
        for i in range(self.k):
            differs = (self.old_kind[:, None, i] != goal[i]) | ~same[i]
            moved |= differs & ~((self.old_kind[:, None, i] == "U") & (goal[i] == "R"))
        f, b, g = (tuple(self.cost[name]) for name in ("forward", "backward", "gathers"))
        return Changes(f, b, g, np.where(moved, self.fraction, 0.0), self.gathered, possible)

    def early(self, state: list[Array], same: list[Array]) -> list[Array]:
        """`pcg.resharding.in_the_way` for all pairs."""
        found = []
        for i in range(self.k):
            own = self.old[:, None, i]
            within = self.dims[own] == self.dims[self.new[None, :, i]]
            clash = np.zeros(self.shape, bool)
            for j in range(self.k):
                if j != i:
                    given = self.new[None, :, j] != self.old[:, None, j]
                    clash |= given & self.clash[self.new[None, :, j], own]
            found.append((state[i] == "P") & ~same[i] & (within | clash))
        return found

    def mask(self, chosen: Sequence[Array]) -> Array:
        return sum(c.astype(np.int64) << i for i, c in enumerate(chosen)) if chosen else np.zeros(self.shape, np.int64)

    def add(self, name: str, kind: str, mask: Array) -> None:
        alpha, beta = table(self.machine, kind)
        self.cost[name][0] += alpha[mask]
        self.cost[name][1] += beta[mask] * self.fraction

    def become(self, chosen: Sequence[Array], state: list[Array], kind: str) -> None:
        for i, c in enumerate(chosen):
            if kind == "P":
                self.fraction = np.where(c, self.fraction / self.sizes[i], self.fraction)
            state[i] = np.where(c, kind, state[i])

    def slice(self, chosen: Sequence[Array], state: list[Array], backward: str | None) -> None:
        if backward:
            self.add("backward", backward, self.mask(chosen))
        self.become(chosen, state, "P")

    def gather(self, chosen: Sequence[Array], state: list[Array], kind: str) -> None:
        for i, c in enumerate(chosen):
            self.fraction = np.where(c, self.fraction * self.sizes[i], self.fraction)
            state[i] = np.where(c, kind, state[i])
        mask = self.mask(chosen)
        self.add("forward", "all-gather", mask)
        self.add("gathers", "all-gather", mask)
        if kind == "R":
            self.add("backward", "reduce-scatter", mask)
        self.gathered |= mask > 0


def _codes(types: Sequence[Type], axes: Sequence[Axis], numbers: dict[Digit, int]) -> tuple[Array, Array]:
    """Kinds, and numbered slice positions (-1: none), both [types, axes]."""
    kinds = np.array([[s.kind for s in t] for t in types]).reshape(len(types), len(axes))
    found = [[-1 if d is None else numbers.setdefault(d, len(numbers)) for d in digits(t, axes)] for t in types]
    return kinds, np.array(found, np.int64).reshape(len(types), len(axes))


def _clashes(found: list[Digit]) -> Array:
    """Whether position i overlaps position j; the last row and column stand for none."""
    result = np.zeros((len(found) + 1, len(found) + 1), bool)
    for i, a in enumerate(found):
        for j, b in enumerate(found):
            result[i, j] = a.overlaps(b)
    return result


