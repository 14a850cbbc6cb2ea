"""What FlexFlow's search asks about a strategy: the simulated seconds of a step, by full or by delta simulation (section 5).

Both say the same of the same strategy, to the last bit. A proposal that is rejected is taken back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from unity.baselines.flexflow.delta.simulation import Delta, makespan
from unity.baselines.flexflow.strategy.configs import ParallelConfig
from unity.baselines.flexflow.strategy.operators import Operators
from unity.baselines.flexflow.strategy.strategy import Strategy

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
        self._delta = Delta(self._strategy.graph)

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
