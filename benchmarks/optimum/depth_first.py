"""Depth-first search with A* pruning (FlexFlow, section 8.3), for any network."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from benchmarks.optimum.bound import ONE, Array, Bound, joined
from unity.baselines.flexflow.strategy.configs import ParallelConfig

NODES = 200_000  # looked at, at most


@dataclass(eq=False)
class DepthFirst:
    """Depth-first search with A* pruning. The operators of the path come first, in its order, and then the others."""

    bound: Bound
    best: float
    configs: dict[int, ParallelConfig]
    most: int = NODES
    nodes: int = 0
    simulated: int = 0
    left: float = math.inf  # the least bound of what was not looked at

    def run(self) -> None:
        """Looks at every strategy that may be better than the best known."""
        self._path([], np.zeros(2))

    def _path(self, chosen: list[int], ended: Array) -> None:
        """`chosen`: configurations along the path, by number. `ended`: when the first and the last piece of the last one end."""
        b, at = self.bound, len(chosen)
        if at == len(b.path):
            self._others({k: b.may[k][c] for k, c in zip(b.path, chosen, strict=True)}, self.least(chosen, ended))
            return
        ways = list[tuple[float, int, Array]]()
        for c in range(len(b.may[b.path[at]])):
            sent = b.between[at - 1][0][chosen[-1], c] if at else ONE - ONE
            ends = joined(joined(ended[None], sent), b.computing[at][0][c])[0]
            ways.append((self.least([*chosen, c], ends), c, ends))
        for total, c, ends in sorted(ways, key=lambda way: way[:2]):
            if self.pruned(total):
                break
            self._path([*chosen, c], ends)

    def least(self, chosen: list[int], ended: Array) -> float:
        """A bound for all strategies with these configurations of the first operators on the path."""
        b, at = self.bound, len(chosen) - 1
        work = sum(b.working[k][c] - b.least_work[k] for k, c in zip(b.path, chosen, strict=False))
        loads = np.cumsum([b.synchronizing[i][c, 0] for i, c in enumerate(chosen)], axis=0).max(axis=1)
        back, found = joined(ended[None], b.around[at][chosen[at]]), self._shared(sum(b.least_work.values()) + work)
        while True:
            # gradients of all operators up to this one are summed after its own backward pass has begun to end
            found = max(found, back[0, 1], back[0, 0] + loads[at])
            if not at:
                return float(found)
            at -= 1
            back = joined(joined(back, b.between[at][1][chosen[at], chosen[at + 1]]), b.computing[at][1][chosen[at]])

    def _shared(self, work: float) -> float:
        """A bound for so many seconds of work, a sum of whole ticks: only this division rounds, and to no more than any time that
        is no less than the quotient."""
        return work / self.bound.o.topology.devices

    def pruned(self, total: float) -> bool:
        """Whether what has this bound is not looked at."""
        if total >= self.best:
            return True
        if self.nodes >= self.most:
            self.left = min(self.left, total)
            return True
        self.nodes += 1
        return False

    def _others(self, configs: dict[int, ParallelConfig], total: float) -> None:
        b = self.bound
        open_ = [k for k in b.o.numbers if k not in configs]
        if open_:
            done = sum(b.working[k][b.may[k].index(config)] for k, config in configs.items()) + sum(b.least_work[k] for k in open_)
            for c, config in enumerate(b.may[open_[0]]):
                least = max(total, self._shared(done + b.working[open_[0]][c] - b.least_work[open_[0]]))
                if not self.pruned(least):
                    self._others({**configs, open_[0]: config}, least)
            return
        seconds = b.simulated(configs)
        self.simulated += 1
        assert seconds >= total, "the bound is wrong"
        if seconds < self.best:
            self.best, self.configs = seconds, configs
