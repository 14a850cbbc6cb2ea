"""The optimum of a network that is a chain, operator by operator: all strategies so far that may still be better, at once.

Of the operators up to one, a strategy is known by what follows from it for the rest, as far as the bound goes: when the first and
the last piece of that operator end at the earliest (`ends`); how much later the step ends, at least, than the first and the last
of its pieces in the backward pass, and than its links are free of gradients (`rest`); and how long each link is kept in between
(`loads`). What follows is bounded from below by the operators that are left: for each configuration some matrices ([2, 3], as in
`bound`) from the end of its pieces forward to their end backward, of which each way to go on has one that is nowhere larger. So a
strategy is left out only where nothing that begins so is better than the best that is known. What is left at the end is simulated,
the most promising first.

Devices that may stand for each other are told apart by when they are first used: of strategies that differ in their names alone one
is looked at.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from benchmarks.optimum.bound import APART, Array, Bound, joined
from unity.baselines.flexflow.strategy.configs import ParallelConfig

WIDTH = 60_000  # strategies so far, at most
WAYS = 12  # matrices for what follows, of each configuration
AT_ONCE = 2_000_000  # figures in one piece of work


@dataclass(frozen=True, eq=False)
class Begun:
    """Strategies of the operators up to one, and their bounds. Arrays whose first dimension they are."""

    chosen: Array
    ends: Array
    rest: Array
    loads: Array
    used: Array
    total: Array

    def __len__(self) -> int:
        return len(self.total)

    def some(self, which: Array) -> Begun:
        """Those of them."""
        return Begun(*(getattr(self, name)[which] for name in ("chosen", "ends", "rest", "loads", "used", "total")))


@dataclass(eq=False)
class Layers:
    """Looks at every strategy of a chain that may be better than the best known.

    `any_device`: the space has every placement of an operator's pieces, so that devices that are alike may be exchanged.
    """

    bound: Bound
    best: float
    configs: dict[int, ParallelConfig]
    any_device: bool = False
    width: int = WIDTH
    nodes: int = 0
    simulated: int = 0
    left: float = math.inf  # the least bound of what was not looked at

    def run(self) -> None:
        """Looks."""
        b = self.bound
        assert set(b.path) == set(b.o.numbers), "the network is no chain"
        now = self._first()
        for at in range(1, len(b.path)):
            if not len(now):
                return
            now = self._next(at, now)
        self._simulate(now)

    def _first(self) -> Begun:
        b = self.bound
        of = b.may[b.path[0]]
        ends = b.computing[0][0].max(axis=1)
        loads = b.synchronizing[0][:, 0]
        ring = b.synchronizing[0][:, 1].max(axis=1)
        rest = np.stack([loads.max(axis=1), ring, ring], axis=1)
        every = np.arange(len(of))
        total = self._total(0, ends[None], rest[None], every)[0]
        used = self.introduced[0][1][0]
        begun = Begun(every[:, None].astype(np.int16), ends, rest, loads, used, total)
        self.nodes += len(every)
        return self._kept([begun.some(np.flatnonzero((total < self.best) & self.introduced[0][0][0]))])

    def _next(self, at: int, now: Begun) -> Begun:
        """With a configuration more."""
        b, found = self.bound, list[Begun]()
        there, _, carried = b.between[at - 1]
        forward = joined(there, b.computing[at][0][None])
        backward, rings = b.backward[at - 1], b.synchronizing[at]
        count = len(rings)
        step = max(1, AT_ONCE // (count * 4 * max(map(len, self.after[at]))))
        for first in range(0, len(now), step):
            some = now.some(np.arange(first, min(first + step, len(now))))
            last = some.chosen[:, -1]
            ends = (some.ends[:, None, :, None] + forward[last]).max(axis=2)
            rest = (backward[last] + some.rest[:, None, None, :]).max(axis=3)
            loads = some.loads[:, None] + carried[last] + rings[None, :, 0]
            np.maximum(rest[..., 0], loads.max(axis=2), out=rest[..., 0])
            np.maximum(rest[..., 1:], rings[:, 1].max(axis=1)[:, None], out=rest[..., 1:])
            total = np.maximum(self._total(at, ends, rest, np.arange(count)), some.total[:, None])
            may, used = (each[some.used] for each in self.introduced[at])
            self.nodes += total.size
            i, c = np.nonzero((total < self.best) & may)
            chosen = np.concatenate([some.chosen[i], c[:, None].astype(np.int16)], axis=1)
            found.append(Begun(chosen, ends[i, c], rest[i, c], loads[i, c], used[i, c], total[i, c]))
        return self._kept(found)

    def _total(self, at: int, ends: Array, rest: Array, every: Array) -> Array:
        """The bound of a step: of the best way to go on. `ends`: [..., C, 2], `rest`: [..., C, 3]."""
        after = self.following[at][every]
        found = np.full((*ends.shape[:-1], after.shape[1]), -np.inf)
        for i in range(2):
            for j in range(3):
                np.maximum(found, (ends[..., i] + rest[..., j])[..., None] + after[..., i, j], out=found)
        return found.min(axis=-1)

    def _kept(self, parts: list[Begun]) -> Begun:
        """All of them together, or as many as there may be, the most promising."""
        names = ("chosen", "ends", "rest", "loads", "used", "total")
        every = Begun(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
        if len(every) <= self.width:
            return every
        order = np.argpartition(every.total, self.width)
        self.left = min(self.left, float(every.total[order[self.width :]].min()))
        return every.some(order[: self.width])

    def _simulate(self, whole: Begun) -> None:
        """Simulates strategies, the most promising first, until no other can be better."""
        b = self.bound
        for n in np.argsort(whole.total, kind="stable"):
            if whole.total[n] >= self.best:
                return
            configs = {k: b.may[k][c] for k, c in zip(b.path, whole.chosen[n], strict=True)}
            seconds = b.simulated(configs)
            self.simulated += 1
            assert seconds >= whole.total[n], "the bound is wrong"
            if seconds < self.best:
                self.best, self.configs = seconds, configs

    @cached_property
    def introduced(self) -> list[tuple[Array, Array]]:
        """Along the path, [devices used so far, C]: whether a configuration takes new devices in their order, and how many are
        used then."""
        n = self.bound.o.topology.devices
        fold = self.any_device and self.bound.alike
        found = []
        for k in self.bound.path:
            may = np.ones((n + 1, len(self.bound.may[k])), bool)
            used = np.full(may.shape, 0 if not fold else n)
            for c, config in enumerate(self.bound.may[k]):
                for before in range(n + 1) if fold else ():
                    new = [d for d in config.devices if d >= before]
                    may[before, c], used[before, c] = new == list(range(before, before + len(new))), before + len(new)
            found.append((may, used))
        return found

    @cached_property
    def following(self) -> list[Array]:
        """`after`, as arrays [C, ways, 2, 3] with what is never least where there are fewer."""
        found = []
        for every in self.after:
            filled = np.full((len(every), max(map(len, every)), 2, 3), np.inf)
            for c, ways in enumerate(every):
                filled[c, : len(ways)] = ways
            found.append(filled)
        return found

    @cached_property
    def after(self) -> list[list[Array]]:
        """Along the path, of each configuration: matrices [ways, 2, 3] from the end of its pieces forward to what is asked about
        its backward pass (`Bound.backward`)."""
        b = self.bound
        last = b.computing[-1][1]
        found = [[np.concatenate([matrix, np.full((2, 1), APART)], axis=1)[None] for matrix in last]]
        for at in range(len(b.path) - 2, -1, -1):
            there = joined(b.between[at][0], b.computing[at + 1][0][None])
            back = b.backward[at]
            known, own = dict[tuple[int, ...], Array](), list[Array]()
            for c, config in enumerate(b.may[b.path[at]]):
                key = config.degrees if self.any_device and b.alike else (c,)
                if key not in known:
                    ways = [joined(joined(there[c, d], every), back[c, d]) for d, every in enumerate(found[0])]
                    known[key] = _least(np.concatenate(ways))
                own.append(known[key])
            found.insert(0, own)
        return found


def _least(matrices: Array) -> Array:
    """Some matrices of which each given one has one that is nowhere larger."""
    flat = np.unique(matrices.reshape(len(matrices), -1), axis=0)
    flat = flat[np.argsort(flat.sum(axis=1), kind="stable")]
    kept = list[Array]()
    while len(flat):
        kept.append(flat[0])
        flat = flat[~(flat >= flat[0]).all(axis=1)]
    found = np.array(kept)
    if len(found) > WAYS:
        found = np.array([some.min(axis=0) for some in np.array_split(found[np.argsort(found[:, 0], kind="stable")], WAYS)])
    return found.reshape(-1, 2, 3)
