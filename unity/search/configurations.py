"""The values of every site: which choice each mesh axis takes.

Axes of one size on one level are interchangeable, so choices are given to them in one fixed order: the order of the tensor
dimensions that they follow through the graph (samples first). That is what keeps domains small without losing degrees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, groupby, product
from math import prod

import numpy as np

from unity.pcg.axis import Axis
from unity.pcg.choices import Choice
from unity.pcg.state import State, Type, misfit
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
    def types(self) -> tuple[tuple[tuple[Type, ...], np.ndarray], ...]:
        """For each operand and then each result: its distinct types, and which of them each value has."""
        found = []
        for position in range(len(self.choices[0].states)):
            codes: dict[State, int] = {}
            of_choice = np.array([codes.setdefault(c.states[position], len(codes)) for c in self.choices])
            states = list(codes)
            rows, index = np.unique(of_choice[self.picks], axis=0, return_inverse=True)
            found.append((tuple(tuple(states[s] for s in row) for row in rows), index.reshape(-1)))
        return tuple(found)

    def type_of(self, value: int, position: int) -> Type:
        """The type of an operand, or (counted after the operands) of a result."""
        distinct, index = self.types[position]
        return distinct[index[value]]


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
    order = sorted(range(len(found)), key=lambda i: (rank[i], found[i].states))
    cs = [found[i] for i in order]
    idle = {i for i, c in enumerate(cs) if c.name in ("unused", "replicated")}
    groups = [len(list(g)) for _, g in groupby(axes, key=lambda a: (a.size, a.level))]
    per_group = [[c for c in combinations_with_replacement(range(len(cs)), n) if len(set(c)) <= limits.distinct] for n in groups]
    shapes = [p.tensor.shape for p in site.ports] + [t.shape for t in site.results]
    fits = _Fit(cs, shapes, axes)
    picks = [
        pick
        for parts in product(*per_group)
        if len(set(pick := tuple(i for part in parts for i in part)) - idle) <= limits.total and fits(pick)
    ]
    table = _frugal(cs, np.array(picks, np.int16).reshape(len(picks), len(axes)), axes, limits)
    text = repr([(c.states, c.size, round(c.divided, 6), c.reduced, sorted(c.partitions)) for c in cs])
    key = hashlib.blake2b((text + repr((shapes, axes, limits))).encode(), digest_size=12).hexdigest()
    return Domain(tuple(cs), table, key)


def _frugal(cs: Sequence[Choice], picks: np.ndarray, axes: Sequence[Axis], limits: Limits) -> np.ndarray:
    """Values that share the work well enough. An operator that shares nothing keeps all."""
    sizes = np.array([a.size for a in axes], float)
    divided = np.array([c.divided for c in cs])[picks]
    share = np.prod(1 - divided + divided / sizes, axis=1)
    return picks[share <= limits.waste * share.min()] if len(picks) and np.isfinite(limits.waste) else picks


class _Fit:
    """Whether a pick of choices divides everything that it partitions; what was found for a type is remembered."""

    def __init__(self, cs: Sequence[Choice], shapes: Sequence[tuple[int, ...]], axes: tuple[Axis, ...]) -> None:
        self.cs, self.shapes, self.axes = cs, shapes, axes
        self.known: dict[tuple[int, Type], bool] = {}

    def __call__(self, pick: tuple[int, ...]) -> bool:
        degree: dict[int, int] = {}
        for i, axis in zip(pick, self.axes, strict=True):
            degree[i] = degree.get(i, 1) * axis.size
        if any(self.cs[i].size % n for i, n in degree.items()):
            return False
        for position, shape in enumerate(self.shapes):
            key = (position, tuple(self.cs[i].states[position] for i in pick))
            if key not in self.known:
                self.known[key] = misfit(shape, key[1], self.axes) is None
            if not self.known[key]:
                return False
        return True
