"""The task graph of a FlexFlow strategy: every operator split and placed on its own (section 5.1), and changed one at a time.

A piece of an operator is a task; so is its backward pass. Where two operators' pieces share elements of a tensor, one waits for
the other: directly on one device, through a transfer between two; cotangents go the other way. Inputs are there wherever they
are read. What pieces sum up, and weights' gradients on several devices, are rings.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from unity.base.gc_pause import uncollected
from unity.baselines.flexflow.delta.columns import ByColumn, Numbers
from unity.baselines.flexflow.delta.simulation import Change
from unity.baselines.flexflow.strategy import blocks, records
from unity.baselines.flexflow.strategy.around import Around, around
from unity.baselines.flexflow.strategy.configs import ParallelConfig
from unity.baselines.flexflow.strategy.exchange import made_of
from unity.baselines.flexflow.strategy.names import TRANSFERS, WAYS, check_named, name_of
from unity.baselines.flexflow.strategy.operators import Edge, Operators
from unity.baselines.flexflow.strategy.records import NOTHING
from unity.baselines.flexflow.strategy.regions import numbered
from unity.baselines.flexflow.strategy.wiring import Wiring
from unity.search.simulator.tasks import SimulationError, Task, TaskGraph

T = TypeVar("T", bound=Hashable)


class _Before(NamedTuple):
    """What there was for an operator and around it: all that a change of its configuration makes anew."""

    operator: int
    config: ParallelConfig
    pieces: Numbers
    waits: dict[tuple[int, int], Numbers]
    parts: dict[int, Numbers]


class Strategy:
    """Every operator's configuration, and the task graph that follows. `change` gives one operator another configuration; `back`
    takes the last change back.

    Raises:
        SimulationError: an operator has no configuration, or one that it cannot have.
        MachineError: a configuration names devices that are not there.
    """

    @uncollected()
    def __init__(self, operators: Operators, configs: Mapping[int, ParallelConfig], overlap: bool = True) -> None:
        """`configs`: by the number of every operator. `overlap`: whether devices communicate while they compute."""
        self.operators, self.wiring = operators, Wiring(operators.topology, overlap)
        missing = [operators.nodes[k] for k in operators.numbers if k not in configs]
        if missing:
            raise SimulationError(f"{len(missing)} operators have no configuration, the first is {missing[0].source or missing[0]}")
        check_named(operators)
        self.configs: dict[int, ParallelConfig] = {}
        for k in operators.numbers:
            operators.check(k, configs[k])
            self.configs[k] = configs[k]
        # blocks of operators and of what operands are waited for (`exchange`), and tasks' records by the first name there may be
        self._pieces: dict[int, Numbers] = {}
        self._waits: dict[tuple[int, int], Numbers] = {}
        self._parts: dict[int, Numbers] = {}
        self._around: dict[int, Around] = {}
        self._blocks: dict[Hashable, Numbers] = {}  # of operators, operands and weights, by degrees
        self._before: _Before | None = None
        self._make(around(operators, operators.numbers))

    @property
    def graph(self) -> TaskGraph:
        """The task graph of all operators."""
        return TaskGraph(ByColumn[Task](records.change(NOTHING, self._records(sorted(self._parts)))), self.wiring.resources)

    @uncollected()
    def change(self, operator: int, config: ParallelConfig) -> Change:
        """Gives an operator another configuration. Only its own tasks, and those around it, are made anew: what changes.

        Raises as making a strategy does; then nothing is changed.
        """
        self.operators.check(operator, config)
        near = self._around.get(operator)
        if near is None:
            near = self._around[operator] = around(self.operators, (operator,))
        before = self._records(near.ordered)
        waits, parts = {e: self._waits[e] for e in near.names}, {first: self._parts[first] for first in near.parts}
        self._before = _Before(operator, self.configs[operator], self._pieces[operator], waits, parts)
        self.configs[operator] = config
        self._make(near)
        return ByColumn[Task | None](records.change(before, self._records(near.ordered)))

    def back(self) -> None:
        """Takes the last change back. Nothing is made anew.

        Raises:
            SimulationError: there was none, or it was taken back already.
        """
        old = self._before
        if old is None:
            raise SimulationError("there is no change of the strategy to be taken back")
        self._before = None
        self.configs[old.operator], self._pieces[old.operator] = old.config, old.pieces
        self._waits |= old.waits
        self._parts |= old.parts

    def of_edge(self, edge: Edge) -> Mapping[int, Task]:
        """The transfers of an operand."""
        k, p = edge[:2]
        return ByColumn[Task](records.change(NOTHING, self._parts[name_of(k, TRANSFERS + p * WAYS)]))

    def _make(self, near: Around) -> None:
        """Makes all anew that depends on some operators' configurations."""
        o, configs = self.operators, self.configs
        found = [block for k in near.anew for block in self._operator(k)]
        found += [self._pieces[k] for k in near.others]
        found += self._weights(near)
        found += [self._operand(name, e) for name, e in zip(near.names, near.edges, strict=True)]
        facts, kept = (np.concatenate([NOTHING, *some]) for some in (found, [self._waits[e[:2]] for e in near.kept]))
        made, waits, ends, ringed, sent = made_of(near.head, facts, kept, self.wiring.wires)
        wholes = np.array([o.seconds(k, configs[k].degrees)[way] for k, way in near.computing])
        self.wiring.time(made, ringed, sent, wholes)
        self._pieces.update(_named(near.anew, facts))
        self._waits.update(_named(near.names, waits))
        records, begin = made.records[: made.used[0]].copy(), 0  # without the room that there is for more
        for first, end in zip(near.parts, ends.tolist(), strict=True):
            self._parts[first], begin = records[begin:end], end

    def _operator(self, k: int) -> tuple[Numbers, Numbers]:
        """An operator's block, in two parts."""
        o, config = self.operators, self.configs[k]
        key = o.alike[k], config.degrees
        found = self._blocks.get(key)
        if found is None:
            backward = o.seconds(k, config.degrees)[1] > 0
            found = self._blocks[key] = blocks.operator(config.pieces, backward, o.reductions(k, config.degrees))
        return found, np.array(config.devices, np.int64)

    def _operand(self, name: tuple[int, int], e: Edge) -> Numbers:
        """An operand's block."""
        o, made, read = self.operators, self.configs[e.maker].degrees, self.configs[e.reader].degrees
        key = name, made, read
        found = self._blocks.get(key)
        if found is None:
            whole = o.slices(e.maker, made, len(o.nodes[e.maker].operands) + e.result)
            found = self._blocks[key] = blocks.operand(whole, o.slices(e.reader, read, e.position))
        return found

    def _weights(self, near: Around) -> list[Numbers]:
        """The blocks of weights. On which devices pieces are makes a difference to them only where several operators, or several
        pieces on one device, read a weight."""
        config = self.configs[near.anew[0]] if near.read is not None else None
        if config is None or len(set(config.devices)) < len(config.devices):
            return [self._weight(w) for w in near.weights]
        key = self.operators.alike[near.anew[0]], config.degrees, near.read
        found = self._blocks.get(key)
        if found is None:
            found = self._blocks[key] = np.concatenate([NOTHING, *[self._weight(w) for w in near.weights]])
        return [found]

    def _weight(self, weight: tuple[int, int]) -> Numbers:
        """A weight's block."""
        o, configs, (node, result) = self.operators, self.configs, weight
        cuts = tuple([(o.slices(k, configs[k].degrees, p), configs[k].devices) for k, p in o.weights[weight]])
        return blocks.weight(numbered(cuts), o.nodes[node].tensors[result].itemsize)

    def _records(self, ordered: Iterable[int]) -> Numbers:
        """The records of several parts."""
        return np.concatenate([NOTHING, *[self._parts[first] for first in ordered]])


def _named(names: Sequence[T], found: Numbers) -> Iterator[tuple[T, Numbers]]:
    """Blocks of which the first belong to so many names, with these."""
    begin = 0
    for name in names:
        end = begin + int(found[begin])
        yield name, found[begin:end]
        begin = end
