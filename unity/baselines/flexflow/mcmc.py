"""FlexFlow's search: Markov chains over strategies, with the simulated time of a step as the cost (section 6).

A chain begins with an initial strategy. Again and again an operator is drawn, and a configuration for it, from all that it may
have: degrees of its dimensions, and devices. The new strategy is accepted with the probability min(1, exp(β · (cost - new cost)))
(equation 1). The best strategy of all chains is the result.

What the paper leaves open, and is so here: β is counted in units of the first initial strategy's time, divided by the number of
operators, as models' times differ by orders of magnitude and one operator's change matters the less the more there are; and "half
of the search time" is counted in proposals, so that a seed always gives the same chain, and is not asked for before every operator
has had its turn a few times.
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

BETA = 20.0  # a strategy that is slower by a twentieth of an operator's mean part of the step is accepted once in e times
TURNS = 10  # proposals for each operator before a chain may end for want of progress
SECONDS = 1800.0  # for one initial strategy (section 8)

Draw = Callable[[int, random.Random], ParallelConfig]
"""A configuration for an operator (by its number) at random."""


Configs = Mapping[int, ParallelConfig]  # by the number of every operator


class Oracle(Protocol):
    """A strategy whose operators may be changed one at a time, and its cost."""

    @property
    def configs(self) -> Configs:
        """The strategy."""
        ...

    @property
    def seconds(self) -> float:
        """What a step of it takes."""
        ...

    def propose(self, operator: int, config: ParallelConfig) -> None:
        """Gives an operator another configuration."""

    def back(self) -> None:
        """Takes the last proposal back."""


class ByDelta:
    """Only what a proposal changes is made, and only what comes after the first difference is simulated."""

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
        """Gives an operator another configuration."""
        self._delta.change(self._strategy.change(operator, config))

    def back(self) -> None:
        """Takes the last proposal back, without simulating anything."""
        self._strategy.back()
        self._delta.back()


class ByFull:
    """The whole task graph is made and simulated for every proposal."""

    def __init__(self, operators: Operators, configs: Configs, overlap: bool) -> None:
        self._operators, self._overlap = operators, overlap
        self.configs, self.seconds = configs, self._simulated(configs)
        self._before = configs, self.seconds

    def _simulated(self, configs: Configs) -> float:
        return makespan(Strategy(self._operators, configs, self._overlap).graph)

    def propose(self, operator: int, config: ParallelConfig) -> None:
        """Gives an operator another configuration."""
        self._before = self.configs, self.seconds
        self.configs = {**self.configs, operator: config}
        self.seconds = self._simulated(self.configs)

    def back(self) -> None:
        """Takes the last proposal back."""
        self.configs, self.seconds = self._before


@dataclass(frozen=True)
class Stop:
    """When a chain ends (section 6.2): its budget is used up, in seconds or in proposals; or, where `early`, it has made half of
    its proposals, and at least `TURNS` for each operator, since it last found a better strategy than before."""

    seconds: float | None = SECONDS
    proposals: int | None = None
    early: bool = True


@dataclass(frozen=True)
class Chain:
    """What was found from one initial strategy. Seconds of a step: of the initial strategy, and of the best."""

    start: str
    first: float
    best: float
    configs: Configs
    proposals: int
    accepted: int


@dataclass(frozen=True)
class Found:
    """All chains of a search."""

    chains: tuple[Chain, ...]

    @property
    def best(self) -> Chain:
        """The one with the best strategy."""
        return min(self.chains, key=lambda chain: chain.best)

    @property
    def proposals(self) -> int:
        """How many strategies were looked at, initial ones not counted."""
        return sum(chain.proposals for chain in self.chains)


def initial(o: Operators, batch: int, seed: int = 0) -> dict[str, Configs]:
    """The paper's initial strategies (section 8): data parallelism, with so many samples, and one that is drawn at random."""
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
) -> Found:
    """Searches from every initial strategy.

    Args:
        o: the operators, and the devices.
        starts: initial strategies by name: `initial`, and those of experts where there are any.
        seed: of all random numbers. Without a limit in seconds, the same seed gives the same result.
        stop: when a chain ends.
        beta: β, where the unit of time is an operator's mean part of the first initial strategy's step.
        delta: by delta simulation, or by full. The result is the same.
        overlap: whether devices communicate while they compute.
        draw: what may be proposed for an operator. Default: any degrees, on any devices that are all different.
    """
    oracle, n = ByDelta if delta else ByFull, o.topology.devices
    may = cache(lambda k: possible(o.nodes[k], n))
    draw = draw or (lambda k, rng: drawn_of(may(k), n, rng))
    chains = list[Chain]()
    for name, configs in starts.items():
        begun = oracle(o, configs, overlap)
        unit = (chains[0].first if chains else begun.seconds) / max(1, len(o.numbers))
        per_second = beta / unit if unit else beta  # a step without operators takes no time
        chains.append(_chain(name, begun, o.numbers, draw, random.Random(f"{seed} {name}"), stop, per_second))
    return Found(tuple(chains))


def _chain(name: str, oracle: Oracle, operators: tuple[int, ...], draw: Draw, rng: random.Random, stop: Stop, beta: float) -> Chain:
    """One chain. `beta`: per second."""
    began, configs = time.perf_counter(), dict(oracle.configs)
    first = now = best = oracle.seconds
    better, accepted = 0, 0
    least = 2 * TURNS * len(operators)
    for n in count():
        spent = stop.seconds is not None and time.perf_counter() - began >= stop.seconds
        if spent or not operators or n == stop.proposals or (stop.early and n >= max(least, 2 * better)):
            return Chain(name, first, best, configs, n, accepted)
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
