"""The task graph of a FlexFlow strategy: every operator split and placed on its own (section 5.1), and changed one at a time.

A piece of an operator is a task; so is its backward pass. Where two operators' pieces share elements of a tensor, one waits for
the other: directly on one device, through a transfer between two; cotangents go the other way. Inputs are there wherever they
are read. What pieces sum up, and weights' gradients on several devices, are rings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from unity.search.simulator.configs import ParallelConfig
from unity.search.simulator.grids import groups
from unity.search.simulator.operators import Edge, Operators
from unity.search.simulator.pieces import Overlap, Slices, overlap
from unity.search.simulator.regions import shared
from unity.search.simulator.schedule import Change
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


def said_by(name: int) -> tuple[int, int, int, int]:
    """What a task's name was made of."""
    return name >> 48, name >> 32 & 0xFFFF, name >> 16 & 0xFFFF, name & 0xFFFF


def names_of(operator: int, purpose: int, pieces: int) -> range:
    """The names of the tasks of so many pieces."""
    return range(name_of(operator, purpose), name_of(operator, purpose, pieces), name_of(0, 0, 1))


Part = tuple[str, int, int]  # what some tasks are for: an operator's pieces forward or backward, an edge, or a weight's gradient


@dataclass(frozen=True)
class _Made:
    """What was made for an operator and around it: all that a change of its configuration makes anew."""

    operator: int
    config: ParallelConfig
    pieces: _Pieces
    edges: dict[tuple[int, int], _Transfers]
    parts: dict[Part, Tasks]


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
            operators.check(k, configs[k])
            self.configs[k] = configs[k]
        self._pieces = {k: _Pieces(self, k) for k in operators.numbers}
        self._edges = {e[:2]: _Transfers(self, e) for k in operators.numbers for e in operators.incoming[k]}
        self._parts: dict[Part, Tasks] = {}
        for k in operators.numbers:
            self._parts["forward", k, 0], self._parts["backward", k, 0] = self._forward(k), self._backward(k)
        self._parts |= {("edge", *e): found.tasks for e, found in self._edges.items()}
        self._parts |= {("gradient", *w): self._synchronize(w) for w in operators.weights}
        self._before: _Made | None = None

    @property
    def graph(self) -> TaskGraph:
        """The task graph of all operators."""
        tasks: Tasks = {}
        for part in self._parts.values():
            tasks |= part
        return TaskGraph(tasks, self.wiring.resources)

    @uncollected()
    def change(self, operator: int, config: ParallelConfig) -> Change:
        """Gives an operator another configuration. Only its own tasks, and those around it, are made anew: what changes.

        Raises as making a strategy does; then nothing is changed.
        """
        o = self.operators
        o.check(operator, config)
        incoming, outgoing = o.incoming[operator], o.outgoing[operator]
        edges = {e[:2]: self._edges[e[:2]] for e in (*incoming, *outgoing)}
        self._before = _Made(operator, self.configs[operator], self._pieces[operator], edges, {})
        self.configs[operator] = config
        self._pieces[operator] = _Pieces(self, operator)
        found: dict[int, Task | None] = {}
        for e in (*incoming, *outgoing):
            made = self._edges[e[:2]] = _Transfers(self, e)
            self._put(("edge", *e[:2]), made.tasks, found)
        for k in dict.fromkeys((operator, *(e.reader for e in outgoing))):
            self._put(("forward", k, 0), self._forward(k), found)
        for k in dict.fromkeys((operator, *(e.maker for e in incoming if e.flows))):
            self._put(("backward", k, 0), self._backward(k), found)
        for w in o.reads[operator]:
            self._put(("gradient", *w), self._synchronize(w), found)
        return found

    def _put(self, part: Part, tasks: Tasks, found: dict[int, Task | None]) -> None:
        """Puts tasks in the place of others, and adds what is different to what was found."""
        assert self._before is not None
        before = self._before.parts[part] = self._parts[part]
        self._parts[part] = tasks
        found.update(dict.fromkeys(before.keys() - tasks.keys()))
        found.update((name, task) for name, task in tasks.items() if before.get(name) != task)

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
        return self._edges[edge[:2]].tasks

    def _forward(self, k: int) -> Tasks:
        """The tasks of an operator's pieces, and of what they sum up, forward and backward."""
        o, pieces = self.operators, self._pieces[k]
        before = _united([self._edges[e[:2]].forward for e in o.incoming[k]], len(pieces.devices))
        return pieces.reductions | self._computing(FORWARD, k, pieces.forward, before)

    def _backward(self, k: int) -> Tasks:
        """The tasks of the backward passes of an operator's pieces."""
        o, pieces = self.operators, self._pieces[k]
        if not pieces.backward:
            return {}
        found = [self._edges[e[:2]].backward for e in o.outgoing[k] if e.flows]
        before = _united([*found, pieces.done] if k in o.ends else found, len(pieces.devices))
        return self._computing(BACKWARD, k, pieces.backward, before)

    def _computing(self, purpose: int, k: int, whole: float, before: Sequence[Names]) -> Tasks:
        """What computes an operator's pieces, each after others. `whole`: seconds of a piece where the device has speed 1."""
        devices = self._pieces[k].devices
        seconds = {d: in_ticks(whole / self.operators.topology.speeds[d]) for d in set(devices)}
        names = names_of(k, purpose, len(devices))
        return {name: Task(d, seconds[d], after) for name, d, after in zip(names, devices, before, strict=True)}

    def _synchronize(self, weight: tuple[int, int]) -> Tasks:
        """The all-reduces of a weight's gradient: one for each part of it that is read on the same devices."""
        o, tasks = self.operators, {}
        readers = [(self._pieces[k], o.slices(k, self.configs[k].degrees, p)) for k, p in o.weights[weight]]
        found = [(devices, n) for devices, n in shared(tuple((cut, pieces.devices) for pieces, cut in readers)) if len(devices) > 1]
        if not found:
            return tasks
        node, result = weight
        size = o.nodes[node].tensors[result].itemsize
        on: dict[int, list[int]] = {}  # by device: the backward passes that add to the gradient there
        for pieces, _ in readers:
            for device, undone in zip(pieces.devices, pieces.undone, strict=True):
                on.setdefault(device, []).extend(undone)
        for g, (devices, elements) in enumerate(found):
            names = name_of(node, GRADIENT, g, result), name_of(node, GRADIENT + 1 + result, g)
            before = (n for d in devices for n in on[d])
            tasks |= self.wiring.all_reduce(*names, before, devices, elements * size)
        return tasks


def _united(found: Sequence[Sequence[Names]], pieces: int) -> Sequence[Names]:
    """For every piece all names, each once."""
    if len(found) == 1:
        return found[0]
    return [union(names) for names in zip(*found, strict=True)] if found else [()] * pieces


class _Pieces:
    """An operator's pieces under its configuration: when each is done, and the tasks of what they sum up."""

    def __init__(self, strategy: Strategy, k: int) -> None:
        config, o = strategy.configs[k], strategy.operators
        self.devices = config.devices
        self.forward, self.backward = o.seconds(k, config.degrees)
        self.done: list[Names] = [(name,) for name in names_of(k, FORWARD, len(self.devices))]
        self.undone: list[Names] = [(name,) if self.backward else () for name in names_of(k, BACKWARD, len(self.devices))]
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
        o, transfer = strategy.operators, strategy.wiring.transfer
        maker, reader = strategy._pieces[e.maker], strategy._pieces[e.reader]
        makers, readers = maker.devices, reader.devices
        node = o.nodes[e.maker]
        made = o.slices(e.maker, strategy.configs[e.maker].degrees, len(node.operands) + e.result)
        read = o.slices(e.reader, strategy.configs[e.reader].degrees, e.position)
        size = node.tensors[e.result].itemsize
        tasks: Tasks = {}
        forward: list[list[int]] = [[] for _ in readers]
        backward: list[list[int]] = [[] for _ in makers]
        rows = names_of(0, 0, len(makers))  # of a name: from a piece, to the first one
        there, back = (name_of(e.reader, TRANSFERS + e.position * WAYS + way) for way in range(WAYS))
        common = overlap(made, read)
        sources = set(_sources(common, made, makers, readers)) if made.copied else None
        for i, j, elements in zip(common.first, common.second, common.elements, strict=True):
            a, b, done, undone = makers[i], readers[j], maker.done[i], reader.undone[j]
            source = sources is None or (i, j) in sources
            if a != b:
                name = rows[i] + j
                if source:
                    tasks[there + name] = transfer(a, b, elements * size, done)
                    done = (there + name,)
                if e.flows and undone:
                    tasks[back + name] = transfer(b, a, elements * size, undone)
                    undone = (back + name,)
            if source:
                forward[j] += done
            backward[i] += undone
        self.tasks = tasks
        self.forward: list[Names] = [tuple(dict.fromkeys(names)) for names in forward]
        self.backward: list[Names] = [tuple(dict.fromkeys(names)) for names in backward]


def _sources(common: Overlap, made: Slices, makers: Sequence[int], readers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where several pieces of a maker hold the same slice: from which each reader takes it, from its own device if it can."""
    parts = list(zip(*(made.parts(dim).tolist() for dim in range(len(made.shape))), strict=True)) or [()] * len(makers)
    best: dict[tuple[int, tuple[int, ...]], int] = {}
    for i, j in zip(common.first, common.second, strict=True):
        key = (j, parts[i])
        if key not in best or (makers[i] == readers[j] != makers[best[key]]):
            best[key] = i
    return ((i, j) for (j, _), i in best.items())
