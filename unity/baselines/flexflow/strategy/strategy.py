"""The task graph of a FlexFlow strategy, in which every operator is split and placed separately (section 5.1).

Each piece of an operator is a task, and so is its backward pass. Where pieces of two operators share elements of a tensor, one
waits for the other: directly if both are on one device, through a transfer if not; cotangents flow in the opposite direction.
Inputs are available wherever they are read. Sums over pieces, and gradients of weights that several devices hold, are all-reduces
in rings.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from unity.base.gc_pause import uncollected
from unity.baselines.flexflow.delta.columns import ByColumn, Numbers
from unity.baselines.flexflow.delta.simulation import Change
from unity.baselines.flexflow.strategy.configs import ParallelConfig
from unity.baselines.flexflow.strategy.encoding import (
    NOTHING,
    TRANSFERS,
    WAYS,
    AffectedTasks,
    affected_by,
    change_between,
    check_named,
    operand_block,
    operator_block,
    task_name,
    weight_block,
)
from unity.baselines.flexflow.strategy.operators import OperandEdge, Operators
from unity.baselines.flexflow.strategy.regions import numbered
from unity.baselines.flexflow.strategy.task_builder import build_tasks
from unity.baselines.flexflow.strategy.wiring import Wiring
from unity.search.simulator.tasks import SimulationError, TaskGraph, TimedTask

T = TypeVar("T", bound=Hashable)


class _Before(NamedTuple):
    """The state of an operator and its surroundings before a change of its configuration."""

    operator: int
    config: ParallelConfig
    pieces: Numbers
    waits: dict[tuple[int, int], Numbers]
    parts: dict[int, Numbers]


class Strategy:
    """A configuration for every operator, and the resulting task graph.

    `change` gives one operator another configuration, and `back` undoes the last change.

    Raises:
        SimulationError: an operator has no configuration, or one that it cannot have.
        MachineError: a configuration names devices that do not exist.
    """

    @uncollected()
    def __init__(self, operators: Operators, configs: Mapping[int, ParallelConfig], overlap: bool = True) -> None:
        """Build the tasks of a strategy.

        Args:
            operators: the operators and the topology.
            configs: a configuration for the number of every operator.
            overlap: whether devices communicate while they compute.
        """
        self.operators, self.wiring = operators, Wiring(operators.topology, overlap)
        missing = [operators.nodes[k] for k in operators.numbers if k not in configs]
        if missing:
            raise SimulationError(f"{len(missing)} operators have no configuration, the first is {missing[0].source or missing[0]}")
        check_named(operators)
        self.configs: dict[int, ParallelConfig] = {}
        for k in operators.numbers:
            operators.check(k, configs[k])
            self.configs[k] = configs[k]
        # operator blocks and waiting blocks (see `encoding`), and records by the lowest name that they may have
        self._pieces: dict[int, Numbers] = {}
        self._waits: dict[tuple[int, int], Numbers] = {}
        self._parts: dict[int, Numbers] = {}
        self._affected: dict[int, AffectedTasks] = {}
        self._blocks: dict[Hashable, Numbers] = {}  # of operators, operands and weights, by degrees
        self._before: _Before | None = None
        self._rebuild(affected_by(operators, operators.numbers))

    @property
    def graph(self) -> TaskGraph:
        """The task graph of all operators."""
        return TaskGraph(ByColumn[TimedTask](change_between(NOTHING, self._records(sorted(self._parts)))), self.wiring.resources)

    @uncollected()
    def change(self, operator: int, config: ParallelConfig) -> Change:
        """Give an operator another configuration, rebuild its tasks and those around it, and return the change of the task graph.

        Raises what the constructor raises; then nothing is changed.
        """
        self.operators.check(operator, config)
        affected = self._affected.get(operator)
        if affected is None:
            affected = self._affected[operator] = affected_by(self.operators, (operator,))
        before = self._records(affected.ordered)
        waits, parts = {e: self._waits[e] for e in affected.names}, {first: self._parts[first] for first in affected.first_names}
        self._before = _Before(operator, self.configs[operator], self._pieces[operator], waits, parts)
        self.configs[operator] = config
        self._rebuild(affected)
        return ByColumn[TimedTask | None](change_between(before, self._records(affected.ordered)))

    def back(self) -> None:
        """Undo the last change without rebuilding anything.

        Raises:
            SimulationError: there was no change, or it has been undone already.
        """
        old = self._before
        if old is None:
            raise SimulationError("there is no change of the strategy to be taken back")
        self._before = None
        self.configs[old.operator], self._pieces[old.operator] = old.config, old.pieces
        self._waits |= old.waits
        self._parts |= old.parts

    def transfers(self, edge: OperandEdge) -> Mapping[int, TimedTask]:
        """Return the transfers of an operand."""
        k, p = edge[:2]
        return ByColumn[TimedTask](change_between(NOTHING, self._parts[task_name(k, TRANSFERS + p * WAYS)]))

    def _rebuild(self, affected: AffectedTasks) -> None:
        """Rebuild all tasks that depend on the configurations of some operators."""
        o, configs = self.operators, self.configs
        blocks = [block for k in affected.changed for block in self._operator(k)]
        blocks += [self._pieces[k] for k in affected.referenced]
        blocks += self._weights(affected)
        blocks += [self._operand(name, e) for name, e in zip(affected.names, affected.edges, strict=True)]
        facts, reused = (np.concatenate([NOTHING, *some]) for some in (blocks, [self._waits[e[:2]] for e in affected.reused]))
        buffers, waits, ends, ringed, sent = build_tasks(affected.header, facts, reused, self.wiring.wires)
        seconds = np.array([o.seconds(k, configs[k].degrees)[way] for k, way in affected.computations])
        self.wiring.time(buffers, ringed, sent, seconds)
        self._pieces.update(_named(affected.changed, facts))
        self._waits.update(_named(affected.names, waits))
        records, begin = buffers.records[: buffers.used[0]].copy(), 0  # without the spare room
        for first, end in zip(affected.first_names, ends.tolist(), strict=True):
            self._parts[first], begin = records[begin:end], end

    def _operator(self, k: int) -> tuple[Numbers, Numbers]:
        """Return an operator's block in two parts."""
        o, config = self.operators, self.configs[k]
        key = o.alike[k], config.degrees
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = operator_block(config.pieces, o.runs_backward(k), o.reductions(k, config.degrees))
        return block, np.array(config.devices, np.int64)

    def _operand(self, name: tuple[int, int], e: OperandEdge) -> Numbers:
        """Return an operand's block."""
        o, producer_degrees, user_degrees = self.operators, self.configs[e.producer].degrees, self.configs[e.user].degrees
        key = name, producer_degrees, user_degrees
        block = self._blocks.get(key)
        if block is None:
            result_slices = o.slices(e.producer, producer_degrees, len(o.nodes[e.producer].operands) + e.result)
            block = self._blocks[key] = operand_block(result_slices, o.slices(e.user, user_degrees, e.position))
        return block

    def _weights(self, affected: AffectedTasks) -> list[Numbers]:
        """Return the blocks of the weights that a change affects.

        The devices of pieces matter to these blocks only if several operators, or several pieces on one device, read a weight.
        """
        config = self.configs[affected.changed[0]] if affected.weight_positions is not None else None
        if config is None or len(set(config.devices)) < len(config.devices):
            return [self._weight(w) for w in affected.weights]
        key = self.operators.alike[affected.changed[0]], config.degrees, affected.weight_positions
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = np.concatenate([NOTHING, *[self._weight(w) for w in affected.weights]])
        return [block]

    def _weight(self, weight: tuple[int, int]) -> Numbers:
        """Return a weight's block."""
        o, configs, (node, result) = self.operators, self.configs, weight
        cuts = tuple([(o.slices(k, configs[k].degrees, p), configs[k].devices) for k, p in o.weights[weight]])
        return weight_block(numbered(cuts), o.nodes[node].tensors[result].itemsize)

    def _records(self, ordered: Iterable[int]) -> Numbers:
        """Concatenate the records of several parts."""
        return np.concatenate([NOTHING, *[self._parts[first] for first in ordered]])


def _named(names: Sequence[T], blocks: Numbers) -> Iterator[tuple[T, Numbers]]:
    """Pair each name with its block, in order; further blocks are ignored."""
    begin = 0
    for name in names:
        end = begin + int(blocks[begin])
        yield name, blocks[begin:end]
        begin = end
