"""FlexFlow's search: Markov chains over strategies, with the simulated time of a step as the cost (section 6).

A chain starts at an initial strategy. Each proposal draws an operator, and a configuration for it from all that are possible:
degrees of its dimensions, and devices. The new strategy is accepted with the probability min(1, exp(β · (cost - new cost)))
(equation 1). The result is the best strategy of all chains.

The paper leaves two things open. Here β is counted in units of the first initial strategy's time divided by the number of
operators, because models' times differ by orders of magnitude, and the more operators there are, the less a change of one matters.
And "half of the search time" is counted in proposals, so that a seed always gives the same chain; no chain ends before there are
some proposals for each operator.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Protocol

from unity.base.gc_pause import uncollected
from unity.baselines.flexflow.delta.simulation import DeltaSimulation, makespan
from unity.baselines.flexflow.strategy.configs import ParallelConfig, data_parallel, drawn, drawn_of, possible
from unity.baselines.flexflow.strategy.operators import Operators
from unity.baselines.flexflow.strategy.strategy import Strategy

BETA = 20.0  # a strategy slower by a twentieth of the mean time per operator is accepted with probability 1/e
TURNS = 10  # proposals for each operator before a chain may end for lack of progress
SECONDS = 1800.0  # for one initial strategy (section 8)

Draw = Callable[[int, random.Random], ParallelConfig]
"""Draws a configuration for an operator, given by its number."""


Configs = Mapping[int, ParallelConfig]  # by the number of every operator


class Oracle(Protocol):
    """A strategy whose operators change one at a time, and its cost: the simulated seconds of a step (section 5).

    `DeltaOracle` and `FullOracle` return the same to the last bit.
    """

    @property
    def configs(self) -> Configs:
        """The configuration of every operator."""
        ...

    @property
    def seconds(self) -> float:
        """The simulated seconds of a step."""
        ...

    def propose(self, operator: int, config: ParallelConfig) -> None:
        """Give an operator another configuration."""

    def back(self) -> None:
        """Undo the last proposal."""


class DeltaOracle:
    """An oracle that rebuilds and simulates only what a proposal changes."""

    def __init__(self, operators: Operators, configs: Configs, overlap: bool) -> None:
        self._strategy = Strategy(operators, configs, overlap)
        self._delta = DeltaSimulation(self._strategy.graph)

    @property
    def configs(self) -> Configs:
        return self._strategy.configs

    @property
    def seconds(self) -> float:
        return self._delta.makespan

    def propose(self, operator: int, config: ParallelConfig) -> None:
        """Give an operator another configuration."""
        self._delta.change(self._strategy.change(operator, config))

    def back(self) -> None:
        """Undo the last proposal without simulating anything."""
        self._strategy.back()
        self._delta.back()


class FullOracle:
    """An oracle that builds and simulates the whole task graph for every proposal."""

    def __init__(self, operators: Operators, configs: Configs, overlap: bool) -> None:
        self._operators, self._overlap = operators, overlap
        self.configs, self.seconds = configs, self._simulated(configs)
        self._before = configs, self.seconds

    def _simulated(self, configs: Configs) -> float:
        return makespan(Strategy(self._operators, configs, self._overlap).graph)

    def propose(self, operator: int, config: ParallelConfig) -> None:
        """Give an operator another configuration."""
        self._before = self.configs, self.seconds
        self.configs = {**self.configs, operator: config}
        self.seconds = self._simulated(self.configs)

    def back(self) -> None:
        """Undo the last proposal."""
        self.configs, self.seconds = self._before


@dataclass(frozen=True)
class Stop:
    """The end of a chain (section 6.2).

    Args:
        seconds: the budget in seconds.
        proposals: the budget in proposals.
        early: whether the chain also ends when it has made half of its proposals, and at least `TURNS` for each operator, since it
            last improved on its best strategy.
    """

    seconds: float | None = SECONDS
    proposals: int | None = None
    early: bool = True


@dataclass(frozen=True)
class MarkovChain:
    """The result of a chain: simulated seconds of a step with the first strategy and with the best one, and the best strategy."""

    start: str
    first: float
    best: float
    configs: Configs
    proposals: int
    accepted: int


@dataclass(frozen=True)
class McmcResult:
    """All chains of a search."""

    chains: tuple[MarkovChain, ...]

    @property
    def best(self) -> MarkovChain:
        """The chain with the best strategy."""
        return min(self.chains, key=lambda chain: chain.best)

    @property
    def proposals(self) -> int:
        """The number of proposals, without initial strategies."""
        return sum(chain.proposals for chain in self.chains)


def initial(o: Operators, batch: int, seed: int = 0) -> dict[str, Configs]:
    """Return the paper's initial strategies (section 8): data parallelism over `batch` samples, and a random one."""
    n, rng = o.topology.devices, random.Random(seed)
    return {
        "data parallelism": {k: data_parallel(o.nodes[k], batch, n) for k in o.numbers},
        "random": {k: drawn(o.nodes[k], n, rng) for k in o.numbers},
    }


@uncollected()
def explored(
    o: Operators,
    starts: Mapping[str, Configs],
    *,
    seed: int = 0,
    stop: Stop = Stop(),
    beta: float = BETA,
    delta: bool = True,
    overlap: bool = True,
    draw: Draw | None = None,
) -> McmcResult:
    """Search from every initial strategy.

    Args:
        o: the operators and the topology.
        starts: initial strategies by name: those of `initial`, and experts' where there are any.
        seed: the seed of all random numbers. Without a limit in seconds, equal seeds give equal results.
        stop: when a chain ends.
        beta: β, where the unit of time is the first initial strategy's step divided by the number of operators.
        delta: whether to use delta simulation; the result is the same.
        overlap: whether devices communicate while they compute.
        draw: draws a proposal for an operator. Default: any degrees, on any devices that are all different.
    """
    oracle, n = DeltaOracle if delta else FullOracle, o.topology.devices
    may = cache(lambda k: possible(o.nodes[k], n))
    draw = draw or (lambda k, rng: drawn_of(may(k), n, rng))
    chains = list[MarkovChain]()
    for name, configs in starts.items():
        begun = oracle(o, configs, overlap)
        unit = (chains[0].first if chains else begun.seconds) / max(1, len(o.numbers))
        per_second = beta / unit if unit else beta  # a step without operators takes no time
        chains.append(_chain(name, begun, o.numbers, draw, random.Random(f"{seed} {name}"), stop, per_second))
    return McmcResult(tuple(chains))


def _chain(
    name: str, oracle: Oracle, operators: tuple[int, ...], draw: Draw, rng: random.Random, stop: Stop, beta: float
) -> MarkovChain:
    """Run one chain. `beta` is per second."""
    began, configs = time.perf_counter(), dict(oracle.configs)
    first = now = best = oracle.seconds
    better, accepted = 0, 0
    least = 2 * TURNS * len(operators)
    for n in count():
        spent = stop.seconds is not None and time.perf_counter() - began >= stop.seconds
        if spent or not operators or n == stop.proposals or (stop.early and n >= max(least, 2 * better)):
            return MarkovChain(name, first, best, configs, n, accepted)
        operator = rng.choice(operators)
        oracle.propose(operator, draw(operator, rng))
        seconds = oracle.seconds
        if seconds <= now or rng.random() < math.exp(beta * (now - seconds)):
            now, accepted = seconds, accepted + 1
            if now < best:
                best, better, configs = now, n + 1, dict(oracle.configs)
        else:
            oracle.back()
    raise AssertionError("a count has no end")
