"""The task graph of a FlexFlow strategy: every operator split and placed on its own (section 5.1), and changed one at a time.

A piece of an operator is a task; so is its backward pass. Where two operators' pieces share elements of a tensor, one waits for
the other: directly on one device, through a transfer between two; cotangents go the other way. Inputs are there wherever they
are read. What pieces sum up, and weights' gradients on several devices, are rings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unity.search.simulator.configs import ParallelConfig, check_config
from unity.search.simulator.delta import Change
from unity.search.simulator.grids import groups
from unity.search.simulator.operators import Edge, Operators
from unity.search.simulator.pieces import Overlap, Slices, overlap, slices
from unity.search.simulator.regions import shared
from unity.search.simulator.tasks import Names, SimulationError, Task, TaskGraph, union
from unity.search.simulator.ticks import in_ticks
from unity.search.simulator.wiring import Wiring
from unity.uncollected import uncollected

Tasks = dict[int, Task]

FORWARD, BACKWARD, GRADIENT, REDUCTIONS, TRANSFERS = 0, 1, 2, 16, 64  # what a task of an operator is for; from these on, by number
WAYS, ENDS = 2, 2  # forward and backward; a barrier and what waits for it


def name_of(operator: int, purpose: int, i: int = 0, j: int = 0) -> int:
    """A task's name: it says nothing about other tasks, and orders those of one operator as listed above."""
    return ((operator << 16 | purpose) << 16 | i) << 16 | j


@dataclass(frozen=True)
class _Made:
    """What was made for an operator and around it: all that a change of its configuration makes anew."""

    operator: int
    config: ParallelConfig
    pieces: _Pieces
    edges: dict[tuple[int, int], _Transfers]
    computing: dict[int, Tasks]
    gradients: dict[tuple[int, int], Tasks]

    @property
    def tasks(self) -> Tasks:
        """All tasks of it."""
        tasks: Tasks = {}
        for part in (*(e.tasks for e in self.edges.values()), *self.computing.values(), *self.gradients.values()):
            tasks |= part
        return tasks


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
        self.configs: dict[int, ParallelConfig] = {}
        for k in operators.numbers:
            check_config(operators.nodes[k], configs[k], operators.topology)
            self.configs[k] = configs[k]
        self._pieces = {k: _Pieces(self, k) for k in operators.numbers}
        self._edges = {e[:2]: _Transfers(self, e) for k in operators.numbers for e in operators.incoming[k]}
        self._computing = {k: self._compute(k) for k in operators.numbers}
        self._gradients = {w: self._synchronize(w) for w in operators.weights}
        self._before: _Made | None = None

    @property
    def graph(self) -> TaskGraph:
        """The task graph of all operators."""
        tasks: Tasks = {}
        for part in (*self._computing.values(), *(e.tasks for e in self._edges.values()), *self._gradients.values()):
            tasks |= part
        return TaskGraph(tasks, self.wiring.resources)

    @uncollected()
    def change(self, operator: int, config: ParallelConfig) -> Change:
        """Gives an operator another configuration. Only its own tasks, and those around it, are made anew: what changes.

        Raises as making a strategy does; then nothing is changed.
        """
        check_config(self.operators.nodes[operator], config, self.operators.topology)
        old = self._made(operator)
        self.configs[operator] = config
        self._pieces[operator] = _Pieces(self, operator)
        self._edges.update({e[:2]: _Transfers(self, e) for e in self._around(operator)})
        self._computing.update({k: self._compute(k) for k in old.computing})
        self._gradients.update({w: self._synchronize(w) for w in old.gradients})
        self._before = old
        before, after = old.tasks, self._made(operator).tasks
        return {**dict.fromkeys(before.keys() - after.keys()), **{n: t for n, t in after.items() if before.get(n) != t}}

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
        self._computing |= old.computing
        self._gradients |= old.gradients

    def of_edge(self, edge: Edge) -> Mapping[int, Task]:
        """The transfers of an operand."""
        return self._edges[edge[:2]].tasks

    def _around(self, operator: int) -> tuple[Edge, ...]:
        return (*self.operators.incoming[operator], *self.operators.outgoing[operator])

    def _made(self, operator: int) -> _Made:
        """What there is now of an operator, of its edges, of the operators that these join it to, and of the weights it reads."""
        edges = self._around(operator)
        ends = dict.fromkeys((operator, *(k for e in edges for k in (e.maker, e.reader))))
        return _Made(
            operator,
            self.configs[operator],
            self._pieces[operator],
            {e[:2]: self._edges[e[:2]] for e in edges},
            {k: self._computing[k] for k in ends},
            {w: self._gradients[w] for w in self.operators.reads[operator]},
        )

    def _compute(self, k: int) -> Tasks:
        """The tasks of an operator's pieces, and of what they sum up."""
        o, pieces = self.operators, self._pieces[k]
        tasks = dict(pieces.reductions)
        incoming = [self._edges[e[:2]].forward for e in o.incoming[k]]
        outgoing = [self._edges[e[:2]].backward for e in o.outgoing[k] if e.flows]
        end = k in o.ends
        for i, device in enumerate(pieces.devices):
            speed = o.topology.speeds[device]
            before = union(found[i] for found in incoming)
            tasks[name_of(k, FORWARD, i)] = Task(device, in_ticks(pieces.forward / speed), before)
            if pieces.backward:
                before = union((*(found[i] for found in outgoing), *((pieces.done[i],) if end else ())))
                tasks[name_of(k, BACKWARD, i)] = Task(device, in_ticks(pieces.backward / speed), before)
        return tasks

    def _synchronize(self, weight: tuple[int, int]) -> Tasks:
        """The all-reduces of a weight's gradient: one for each part of it that is read on the same devices."""
        o, tasks = self.operators, {}
        readers = [(self._pieces[k], slices(o.nodes[k], self.configs[k].degrees, p)) for k, p in o.weights[weight]]
        node, result = weight
        size = o.nodes[node].tensors[result].itemsize
        on: dict[int, list[int]] = {}  # by device: the backward passes that add to the gradient there
        for pieces, _ in readers:
            for i, device in enumerate(pieces.devices):
                on.setdefault(device, []).extend(pieces.undone[i])
        found = shared(tuple((cut, pieces.devices) for pieces, cut in readers))
        for g, (devices, elements) in enumerate(found):
            if len(devices) > 1:
                names = name_of(node, GRADIENT, g, result), name_of(node, GRADIENT + 1 + result, g)
                before = (n for d in devices for n in on[d])
                tasks |= self.wiring.all_reduce(*names, before, devices, elements * size)
        return tasks


class _Pieces:
    """An operator's pieces under its configuration: when each is done, and the tasks of what they sum up."""

    def __init__(self, strategy: Strategy, k: int) -> None:
        config, o = strategy.configs[k], strategy.operators
        self.devices = config.devices
        self.forward, self.backward = o.seconds(k, config.degrees)
        self.done: list[Names] = [(name_of(k, FORWARD, i),) for i in range(config.pieces)]
        self.undone: list[Names] = [(name_of(k, BACKWARD, i),) if self.backward else () for i in range(config.pieces)]
        self.reductions: Tasks = {}
        for r, reduction in enumerate(o.reductions(k, config.degrees)):
            for way, ends in enumerate((self.done, self.undone)[: 1 + reduction.backward]):
                purpose = REDUCTIONS + (r * WAYS + way) * ENDS
                for g, members in enumerate(groups(config.degrees, reduction.dims)):
                    self._reduce(strategy.wiring, k, purpose, g, members, ends, reduction.nbytes)

    def _reduce(self, w: Wiring, k: int, purpose: int, g: int, members: Sequence[int], ends: list[Names], nbytes: float) -> None:
        devices = list(dict.fromkeys(self.devices[i] for i in members))
        barrier, first = name_of(k, purpose, g), name_of(k, purpose + 1, g)
        self.reductions |= w.all_reduce(barrier, first, (n for i in members for n in ends[i]), devices, nbytes)
        for i in members:
            ends[i] = (first + devices.index(self.devices[i]),) if len(devices) > 1 else (barrier,)


class _Transfers:
    """An edge: what each piece of its reader waits for, and each piece of its maker backward; the transfers between devices."""

    def __init__(self, strategy: Strategy, e: Edge) -> None:
        o, wiring = strategy.operators, strategy.wiring
        maker, reader = strategy._pieces[e.maker], strategy._pieces[e.reader]
        node = o.nodes[e.maker]
        made = slices(node, strategy.configs[e.maker].degrees, len(node.operands) + e.result)
        read = slices(o.nodes[e.reader], strategy.configs[e.reader].degrees, e.position)
        size = node.tensors[e.result].itemsize
        self.tasks: Tasks = {}
        self.forward: list[Names] = [()] * len(reader.devices)
        self.backward: list[Names] = [()] * len(maker.devices)
        there, back = TRANSFERS + e.position * WAYS, TRANSFERS + e.position * WAYS + 1
        common = overlap(made, read)
        sources = set(_sources(common, made, maker.devices, reader.devices)) if made.copied else None
        for i, j, elements in zip(common.first, common.second, common.elements, strict=True):
            a, b, done, undone = maker.devices[i], reader.devices[j], maker.done[i], reader.undone[j]
            if a != b:
                if sources is None or (i, j) in sources:
                    name = name_of(e.reader, there, i, j)
                    self.tasks[name] = wiring.transfer(a, b, elements * size, done)
                    done = (name,)
                if e.flows and undone:
                    name = name_of(e.reader, back, i, j)
                    self.tasks[name] = wiring.transfer(b, a, elements * size, undone)
                    undone = (name,)
            if sources is None or (i, j) in sources:
                self.forward[j] += done
            self.backward[i] += undone


def _sources(common: Overlap, made: Slices, makers: Sequence[int], readers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where several pieces of a maker hold the same slice: from which each reader takes it, from its own device if it can."""
    parts = list(zip(*(made.parts(dim).tolist() for dim in range(len(made.shape))), strict=True)) or [()] * len(makers)
    best: dict[tuple[int, tuple[int, ...]], int] = {}
    for i, j in zip(common.first, common.second, strict=True):
        key = (j, parts[i])
        if key not in best or (makers[i] == readers[j] != makers[best[key]]):
            best[key] = i
    return ((i, j) for (j, _), i in best.items())
