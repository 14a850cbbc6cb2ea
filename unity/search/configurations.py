"""The values of every site: which choice each mesh axis takes.

Axes of one size on one level are interchangeable, so choices are given to them in one fixed order: the order of the tensor
dimensions that they follow through the graph (samples first). That is what keeps domains small without losing degrees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, groupby
from math import prod

import numpy as np

from unity.pcg.axis import Axis
from unity.pcg.choices import Choice
from unity.pcg.state import State, Type
from unity.search.reshard import Types
from unity.search.sites import Site


@dataclass(frozen=True, eq=False)
class Domain:
    """The values of a site: for each, the choice along each axis, and from that the types of operands and results."""

    choices: tuple[Choice, ...]
    picks: np.ndarray  # [values, axes], indices into `choices`
    key: str

    def __len__(self) -> int:
        return len(self.picks)

    @cached_property
    def types(self) -> tuple[tuple[Types, np.ndarray], ...]:
        """For each operand and then each result: its distinct types, and which of them each value has."""
        found = []
        for position in range(len(self.choices[0].states)):
            codes: dict[State, int] = {}
            of_choice = np.array([codes.setdefault(c.states[position], len(codes)) for c in self.choices], np.int16)
            rows, index = np.unique(of_choice[self.picks], axis=0, return_inverse=True)
            found.append((Types(tuple(codes), rows), index.reshape(-1)))
        return tuple(found)

    def type_of(self, value: int, position: int) -> Type:
        """The type of an operand, or (counted after the operands) of a result."""
        return tuple(self.choices[c].states[position] for c in self.picks[value])


def ranks(sites: Sequence[Site], found: Sequence[tuple[Choice, ...]]) -> list[tuple[int, ...]]:
    """For every choice, the rank of the dimension that it follows through the graph; the samples' dimension comes first."""
    parent: dict[tuple[int, int, State], tuple[int, int, State]] = {}

    def root(x: tuple[int, int, State]) -> tuple[int, int, State]:
        while parent.setdefault(x, x) != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def ends(s: int, choice: Choice) -> Iterator[tuple[int, int, State]]:
        for p, state in zip(sites[s].ports, choice.operands, strict=True):
            if state.kind == "P":
                yield (p.source, p.index, state)
        for k, state in enumerate(choice.results):
            if state.kind == "P":
                yield (s, k, state)

    for s, cs in enumerate(found):
        for choice in cs:
            slots = list(ends(s, choice))
            for other in slots[1:]:
                parent[root(other)] = root(slots[0])
    order: dict[tuple[int, int, State], int] = {}
    first = sorted(range(len(sites)), key=lambda s: (sites[s].kind != "input" or sites[s].weight, s))
    for s in first:
        for choice in sorted(found[s], key=lambda c: c.states):
            for slot in ends(s, choice):
                order.setdefault(root(slot), len(order))
    last = {"replicated": len(order) + 1, "unused": len(order) + 2}
    return [
        tuple(min((order[root(e)] for e in ends(s, c)), default=last.get(c.name, len(order))) for c in cs)
        for s, cs in enumerate(found)
    ]


@dataclass(frozen=True)
class Limits:
    """How far domains are cut for large machines; the loss is measured in `benchmarks/pruning.py`.

    `distinct`: different choices on one group of interchangeable axes, and `total` on all axes, the unused not counted.
    `waste`: how many times more work than the best value a device may do.
    """

    distinct: int
    total: int
    waste: float


EXACT = Limits(99, 99, float("inf"))


def usual_limits(axes: Sequence[Axis]) -> Limits:
    """No limits up to 16 devices; then such as keep the largest domain near a thousand values."""
    return EXACT if prod(a.size for a in axes) <= 16 else Limits(2, 2, 2.0)


def domain(site: Site, found: tuple[Choice, ...], rank: tuple[int, ...], axes: tuple[Axis, ...], limits: Limits) -> Domain:
    """All values of a site: one choice for each axis, in rank order on interchangeable axes, that fits all its tensors."""
    cs = [found[i] for i in sorted(range(len(found)), key=lambda i: (rank[i], found[i].states))]
    shapes = [p.tensor.shape for p in site.ports] + [t.shape for t in site.results]
    table = _frugal(cs, _picks(cs, shapes, axes, limits), axes, limits)
    text = repr([(c.states, c.size, round(c.divided, 6), c.reduced, sorted(c.partitions)) for c in cs])
    key = hashlib.blake2b((text + repr((shapes, axes, limits))).encode(), digest_size=12).hexdigest()
    return Domain(tuple(cs), table, key)


def _picks(cs: Sequence[Choice], shapes: Sequence[tuple[int, ...]], axes: tuple[Axis, ...], limits: Limits) -> np.ndarray:
    """All values that fit, [values, axes]. What does not fit on some of the axes does not fit on more."""
    idle = np.array([c.name in ("unused", "replicated") for c in cs])
    picks, done = np.zeros((1, 0), np.int16), 0
    for _, group in groupby(axes, key=lambda a: (a.size, a.level)):
        n = len(list(group))
        ways = [c for c in combinations_with_replacement(range(len(cs)), n) if len(set(c)) <= limits.distinct]
        more = np.array(ways, np.int16).reshape(len(ways), n)
        more = more[_fits(cs, shapes, more, axes[done : done + n])]
        picks = np.hstack([np.repeat(picks, len(more), axis=0), np.tile(more, (len(picks), 1))])
        done += n
        used = (picks[:, :, None] == np.arange(len(cs))).any(1)
        picks = picks[(used & ~idle).sum(1) <= limits.total]
        picks = picks[_fits(cs, shapes, picks, axes[:done])]
    return picks


def _fits(cs: Sequence[Choice], shapes: Sequence[tuple[int, ...]], picks: np.ndarray, axes: Sequence[Axis]) -> np.ndarray:
    """Which picks divide everything that they partition: `pcg.state.misfit`, and every choice's own size."""
    sizes = np.array([a.size for a in axes], int)
    good = np.ones(len(picks), bool)
    for i, c in enumerate(cs):
        good &= c.size % np.where(picks == i, sizes, 1).prod(1) == 0
    for position, shape in enumerate(shapes):
        states = [c.states[position] for c in cs]
        slots = sorted({s for s in states if s.kind == "P"}, key=lambda s: (s.dim, -s.outer))
        for dim, same in groupby(slots, key=lambda s: s.dim):
            end = np.full(len(picks), shape[dim])
            for slot in same:  # the innermost first
                degree = np.where(np.array([s == slot for s in states])[picks], sizes, 1).prod(1)
                good &= (degree == 1) | (end % (slot.outer * degree) == 0)
                end = np.where(degree > 1, slot.outer, end)
    return good


def _frugal(cs: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis], limits: Limits) -> np.ndarray:
    """Values that share the work well enough. An operator that shares nothing keeps all."""
    sizes = np.array([a.size for a in axes], float)
    divided = np.array([c.divided for c in cs])[picks]
    share = np.prod(1 - divided + divided / sizes, axis=1)
    return picks[share <= limits.waste * share.min()] if len(picks) and np.isfinite(limits.waste) else picks
