"""The task graph of a FlexFlow strategy: every operator split and placed on its own (section 5.1), and changed one at a time.

A piece of an operator is a task; so is its backward pass. Where two operators' pieces share elements of a tensor, one waits for
the other: directly on one device, through a transfer between two; cotangents go the other way. Inputs are there wherever they
are read. What pieces sum up, and weights' gradients on several devices, are rings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unity.search.simulator.columns import NO_TASKS, ByColumn, Columns, Numbers, joined, packed
from unity.search.simulator.configs import ParallelConfig
from unity.search.simulator.exchange import ROW, difference, exchanged, held, summed, waiting
from unity.search.simulator.operators import Edge, Operators
from unity.search.simulator.pieces import overlap
from unity.search.simulator.regions import shared
from unity.search.simulator.schedule import Change
from unity.search.simulator.tasks import SimulationError, Task, TaskGraph
from unity.search.simulator.ticks import in_ticks
from unity.search.simulator.wiring import Wiring
from unity.uncollected import uncollected

FORWARD, BACKWARD, REDUCTIONS, TRANSFERS = 0, 1, 2, 1 << 13  # what a task of an operator is for; from the last two on, by number
GRADIENT = 0  # of a weight, from here on, by number
WAYS, ENDS = 2, 2  # forward and backward; a barrier and what waits for it
PURPOSE, PURPOSES = ROW * ROW, 1 << 14  # between the names of what is for one purpose and for the next; how many there are
OPERATORS = 1 << 16

NOTHING = np.empty(0, np.int64)

Pairs = tuple[Numbers, Numbers] | Numbers  # a piece (by number) or a device, and the name of a task: two arrays, or two rows of one


def name_of(operator: int, purpose: int, i: int = 0, j: int = 0) -> int:
    """A task's name: it says nothing about other tasks, and orders those of one operator as listed above."""
    return (operator * PURPOSES + purpose) * PURPOSE + i * ROW + j


def said_by(name: int) -> tuple[int, int, int, int]:
    """What a task's name was made of."""
    operator, purpose = divmod(name // PURPOSE, PURPOSES)
    return operator, purpose, name // ROW % ROW, name % ROW


def _check_named(o: Operators) -> None:
    """Raises SimulationError unless there are names for all tasks that there may be."""
    operands = (PURPOSES - TRANSFERS) // WAYS
    wide = next((node for node in o.nodes if len(node.operands) > operands), None)
    if wide is not None:
        raise SimulationError(f"{wide.source or wide}: {len(wide.operands)} operands; a strategy has names for {operands}")
    for what, count, most in (("operators", len(o.nodes), OPERATORS), ("devices", o.topology.devices, ROW)):
        if count > most:
            raise SimulationError(f"{count} {what}; a strategy has names for the tasks of {most}")


@dataclass(frozen=True)
class _Before:
    """What there was for an operator and around it: all that a change of its configuration makes anew."""

    operator: int
    config: ParallelConfig
    pieces: _Pieces
    edges: dict[tuple[int, int], _Edge]
    parts: dict[int, Columns]


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
        _check_named(operators)
        self.configs: dict[int, ParallelConfig] = {}
        for k in operators.numbers:
            operators.check(k, configs[k])
            self.configs[k] = configs[k]
        self._speeds = np.array(operators.topology.speeds)
        self._pieces = {k: _Pieces(self, k) for k in operators.numbers}
        self._edges = {e[:2]: _Edge(self, e) for k in operators.numbers for e in operators.incoming[k]}
        every = operators.numbers
        self._parts = self._made(every, every, every, self._edges, operators.weights)  # by the name of the first that there may be
        self._before: _Before | None = None

    @property
    def graph(self) -> TaskGraph:
        """The task graph of all operators."""
        tasks = ByColumn[Task](joined([self._parts[first] for first in sorted(self._parts)]))
        return TaskGraph(tasks, self.wiring.resources)

    def _made(
        self,
        anew: Iterable[int],
        forward: Iterable[int],
        backward: Iterable[int],
        edges: Iterable[tuple[int, int]],
        weights: Iterable[tuple[int, int]],
    ) -> dict[int, Columns]:
        """The tasks of edges, of weights' gradients and of operators: of those with other pieces, forward and backward."""
        found = {name_of(k, REDUCTIONS): self._pieces[k].reductions for k in anew}
        found |= {name_of(k, FORWARD): self._forward(k) for k in forward}
        found |= {name_of(k, BACKWARD): self._backward(k) for k in backward}
        found |= {name_of(k, TRANSFERS + p * WAYS): self._edges[k, p].tasks for k, p in edges}
        return found | {name_of(k, GRADIENT + r * ENDS): self._synchronize((k, r)) for k, r in weights}

    @uncollected()
    def change(self, operator: int, config: ParallelConfig) -> Change:
        """Gives an operator another configuration. Only its own tasks, and those around it, are made anew: what changes.

        Raises as making a strategy does; then nothing is changed.
        """
        o = self.operators
        o.check(operator, config)
        incoming, outgoing = o.incoming[operator], o.outgoing[operator]
        edges = {e[:2]: e for e in (*incoming, *outgoing)}
        before = self.configs[operator], self._pieces[operator], {e: self._edges[e] for e in edges}
        self.configs[operator] = config
        self._pieces[operator] = _Pieces(self, operator)
        for e in edges:
            self._edges[e] = _Edge(self, edges[e])
        readers = dict.fromkeys((operator, *(e.reader for e in outgoing)))
        makers = dict.fromkeys((operator, *(e.maker for e in incoming if e.flows)))
        made = self._made((operator,), readers, makers, edges, o.reads[operator])
        self._before = _Before(operator, *before, {first: self._parts[first] for first in made})
        self._parts |= made
        order = sorted(made)
        old, new = (joined([parts[first] for first in order]) for parts in (self._before.parts, made))
        return ByColumn[Task | None](packed(*difference(old, new)))

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
        self._edges |= old.edges
        self._parts |= old.parts

    def of_edge(self, edge: Edge) -> Mapping[int, Task]:
        """The transfers of an operand."""
        return ByColumn[Task](self._edges[edge[:2]].tasks)

    def _forward(self, k: int) -> Columns:
        """The tasks of an operator's pieces."""
        pieces = self._pieces[k]
        found = [self._edges[e[:2]].forward for e in self.operators.incoming[k]]
        return self._computing(pieces.names, pieces, pieces.forward, found)

    def _backward(self, k: int) -> Columns:
        """The tasks of the backward passes of an operator's pieces."""
        o, pieces = self.operators, self._pieces[k]
        if not pieces.backward:
            return NO_TASKS
        found = [self._edges[e[:2]].backward for e in o.outgoing[k] if e.flows]
        if k in o.ends:
            found.append(np.array([np.arange(len(pieces.devices)), pieces.done]))
        return self._computing(pieces.names + BACKWARD * PURPOSE, pieces, pieces.backward, found)

    def _computing(self, names: Numbers, pieces: _Pieces, whole: float, found: Sequence[Pairs]) -> Columns:
        """What computes an operator's pieces, each after others. `whole`: seconds of a piece where the device has speed 1."""
        waits, before = waiting(*_pairs(found), len(names))
        return Columns(names, pieces.devices, in_ticks(whole / self._speeds[pieces.devices]), np.zeros(len(names)), waits, before)

    def _synchronize(self, weight: tuple[int, int]) -> Columns:
        """The all-reduces of a weight's gradient: one for each part of it that is read on the same devices."""
        o, (node, result) = self.operators, weight
        readers = [(self._pieces[k], k, p) for k, p in o.weights[weight]]
        cuts = tuple([(o.slices(k, self.configs[k].degrees, p), self.configs[k].devices) for _, k, p in readers])
        found = shared(cuts)
        if not len(found.counts):
            return NO_TASKS
        there = _pairs([(pieces.devices, pieces.undone) for pieces, _, _ in readers if len(pieces.undone)])
        waits, before = held(*there, o.topology.devices, found.devices, found.counts)
        nbytes = (float(o.nodes[node].tensors[result].itemsize) * found.elements).tolist()
        barrier = name_of(node, GRADIENT + result * ENDS)
        return self.wiring.all_reduces(waits, before, found.devices, found.counts, nbytes, barrier, barrier + PURPOSE)


def _pairs(found: Sequence[Pairs]) -> Pairs:
    """All of them."""
    if len(found) == 1:
        return found[0]
    pieces, names = zip(*found, strict=True) if found else ((NOTHING,), (NOTHING,))
    return np.concatenate(pieces), np.concatenate(names)


class _Pieces:
    """An operator's pieces under its configuration: what ends each, forward and backward, and the tasks of what they sum up."""

    def __init__(self, strategy: Strategy, k: int) -> None:
        config, o = strategy.configs[k], strategy.operators
        self.devices = np.array(config.devices, np.int64)
        self.forward, self.backward = o.seconds(k, config.degrees)
        first = name_of(k, FORWARD)
        self.done = self.names = np.arange(first, first + config.pieces)
        self.undone = self.names + BACKWARD * PURPOSE if self.backward else NOTHING
        reductions: list[Columns] = []
        for r, (_, members, nbytes, backward) in enumerate(o.reductions(k, config.degrees)):
            there, back = (name_of(k, REDUCTIONS + (r * WAYS + way) * ENDS) for way in range(WAYS))
            found, self.done = self._reduced(strategy.wiring, there, members, self.done, nbytes)
            reductions.append(found)
            if backward and len(self.undone):
                found, self.undone = self._reduced(strategy.wiring, back, members, self.undone, nbytes)
                reductions.append(found)
        self.reductions = joined(reductions)

    def _reduced(self, w: Wiring, barrier: int, members: Numbers, ends: Numbers, nbytes: float) -> tuple[Columns, Numbers]:
        """The tasks that sum up among groups of pieces, and what ends each piece then."""
        first = barrier + PURPOSE
        waits, before, ring, counts, after = summed(members, self.devices, ends, barrier, first)
        return w.all_reduces(waits, before, ring, counts, [nbytes] * len(members), barrier, first), after


class _Edge:
    """An operand: its transfers, what each piece of its reader waits for, and backward each piece of its maker."""

    def __init__(self, strategy: Strategy, e: Edge) -> None:
        o, configs = strategy.operators, strategy.configs
        maker, reader = strategy._pieces[e.maker], strategy._pieces[e.reader]
        node = o.nodes[e.maker]
        made = o.slices(e.maker, configs[e.maker].degrees, len(node.operands) + e.result)
        read = o.slices(e.reader, configs[e.reader].degrees, e.position)
        parts = made.slices if made.copied else 0
        there, back = (name_of(e.reader, TRANSFERS + e.position * WAYS + way) for way in range(WAYS))
        sides = maker.devices, reader.devices, maker.done, reader.undone if e.flows else NOTHING
        wiring = strategy.wiring
        found = exchanged(*overlap(made, read), made.slice_of, parts, *sides, there, back, wiring.between)
        transfers, self.forward, self.backward = found
        self.tasks = wiring.transfers(transfers, node.tensors[e.result].itemsize)
