"""The SPMD program of one training step of a parallel graph: the instructions that every device runs, and their order.

The seconds are those of `predict`, term by term. In the forward pass an operator runs after the producers of its operands. In the
backward pass it runs after its users have, if a gradient flows there; recomputation and repeated gathers come directly before it,
since JAX ties them to the cotangent. Nothing waits for the gradient of a weight, so its communication may overlap with the rest of
the backward pass.

The graph of a remat is part of the program around it. A scan's is a separate program that runs as a unit `length` times: a
compiled loop is one operation, and the communication of a step does not overlap with other steps. So one step is simulated. The
same holds for every tick of a pipeline; the transfers between its stages come after all ticks. A pipeline that does not drain (2BW)
has finished with a batch's weights before its last ticks.

A value that is offloaded is sent to the host as soon as it is computed, and nothing waits for that. It is fetched when the backward
pass of its remat begins, since JAX ties it to the cotangent, too.

Optimizer's state in the memory of the host is fetched after all gradients are computed, one weight after the other, and sent back.
What the update computes takes no time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from unity.machine.machine import Machine
from unity.pcg.analysis.recomputation_marks import runs_again, through_marked_changes
from unity.pcg.ir.gradient_flow import Gradients, gradients, losses
from unity.pcg.ir.graph import PARALLELIZATION, PCG, PIPELINE, TAIL, Node, Value
from unity.pcg.parallel.stages import ends_of, runs_of, schedule_of
from unity.pcg.parallel.traffic import FORWARD
from unity.search.cost.prediction import CollectiveTerm, Prediction, TransferTerm, predict
from unity.search.cost.state_sizes import NO_STATE, StateSizes
from unity.search.simulator.tasks import Names, union


class Phase(IntEnum):
    """A phase of a training step. `RECOMPUTE` also covers gathers that are repeated for the backward pass.

    Of the `UPDATE`, there are only the transfers of the optimizer's state.
    """

    FORWARD = 0
    RECOMPUTE = 1
    BACKWARD = 2
    UPDATE = 3


PHASES = ("forward", "again", "backward", "update")  # the phases in labels
OPERATORS, CHANGES, PARTS = 4, 1 << 12, 1 << 8  # names pack phases, changes of a result's type, and parts of an operator
LATER = PARTS - 1  # the part for a loop's last steps
TRANSFER = PARTS - 2  # the part for transfers to the host and back
RETURN = PARTS - 3  # the part for the second of two transfers in one phase


@dataclass(frozen=True)
class Communication:
    """A collective.

    Args:
        kind: its name in XLA.
        axes: the positions of the mesh axes that its groups span.
        nbytes: the bytes of its full side on one device.
        runs: how often it runs; a collective hoisted out of a loop counts for a fraction in each step.
        merged: whether a compiler merges it with others.
        turned: whether its layout is transposed.
    """

    kind: str
    axes: tuple[int, ...]
    nbytes: float
    runs: float
    merged: bool
    turned: bool


@dataclass(frozen=True)
class HostTransfer:
    """A transfer of `nbytes` bytes between a device and its host, in either direction."""

    nbytes: float


@dataclass(frozen=True)
class ProgramLoop:
    """A program that runs `length` times."""

    program: SpmdProgram
    length: int


@dataclass(frozen=True)
class SpmdInstruction:
    """An instruction that every device runs once. `seconds` are those on a device of speed 1, or of a collective by the machine's
    formulas.
    """

    name: int
    label: str
    seconds: float
    before: Names
    action: Communication | HostTransfer | ProgramLoop | None = None  # None: a computation


@dataclass(frozen=True)
class SpmdProgram:
    """Instructions, each after those that it waits for."""

    instructions: tuple[SpmdInstruction, ...]

    def has(self, *kinds: type) -> bool:
        """Return whether any instruction, in loops too, has an action of some kinds."""
        actions = [i.action for i in self.instructions]
        return any(isinstance(a, kinds) or (isinstance(a, ProgramLoop) and a.program.has(*kinds)) for a in actions)


def program_of(
    graph: PCG,
    machine: Machine,
    differentiated: Collection[int],
    prediction: Prediction | None = None,
    state: StateSizes = NO_STATE,
) -> SpmdProgram:
    """Return the program of a parallel graph.

    Args:
        graph: the parallel graph.
        machine: its formulas price operators and collectives.
        differentiated: the inputs with respect to which gradients are taken; if there are none, the program is the forward pass.
        prediction: the predicted terms of the step, if they are known.
        state: the optimizer's state.
    """
    prediction = predict(graph, machine, differentiated, state) if prediction is None else prediction
    costs = _costs(graph, prediction, differentiated)
    region = _Region(graph, costs, [()] * len(graph.inputs))
    region.forward()
    if differentiated:
        ends = [graph.outputs[k] for k in losses(graph) if costs.flow(graph.outputs[k])]
        after = union(region.done[v] for v in ends)
        gradients_after = region.backward(dict.fromkeys(ends, after))
        region.update(union(gradients_after))
    return SpmdProgram(tuple(region.instructions))


@dataclass(frozen=True)
class _Costs:
    """The cost of everything in one run, and the number of every operator, which is the same in all parallel graphs of one serial
    graph.
    """

    flow: Gradients
    compute: Mapping[int, tuple[float, float, float]]  # by id(node): seconds forward, again, backward
    collectives: Mapping[int, list[CollectiveTerm]]
    transfers: Mapping[int, list[TransferTerm]]
    numbers: Mapping[int, int]


def _costs(graph: PCG, prediction: Prediction, differentiated: Collection[int]) -> _Costs:
    compute = dict[int, tuple[float, float, float]]()
    for t in prediction.operators:  # an operator hoisted out of a loop counts for a fraction in each step
        if t.runs and t.count:  # nothing runs in a scan of zero steps
            once = t.forward / t.runs / t.count
            compute[id(t.node)] = (once * t.first, once * (t.runs - t.first), t.backward / t.count)
    collectives: dict[int, list[CollectiveTerm]] = {}
    for term in prediction.collectives:
        if term.collective.count:
            collectives.setdefault(id(term.collective.node), []).append(term)
    transfers: dict[int, list[TransferTerm]] = {}
    for transfer in prediction.transfers:
        if transfer.count:
            transfers.setdefault(id(transfer.node), []).append(transfer)
    return _Costs(gradients(graph, differentiated), compute, collectives, transfers, numbers(graph))


def numbers(graph: PCG) -> dict[int, int]:
    """Return a number for every node. Changes of a result's type are numbered after its producer."""
    number_of: dict[int, int] = {}
    for k, node in enumerate(n for n, _ in graph.walk() if n.kind not in PARALLELIZATION):
        number_of[id(node)] = k * CHANGES
    changes: dict[int, int] = {}
    for node, _ in graph.walk():
        if node.kind in PARALLELIZATION:
            producer = number_of[id(node.operands[0].node)] // CHANGES
            changes[producer] = changes.get(producer, 0) + 1
            number_of[id(node)] = producer * CHANGES + changes[producer]
    return number_of


def moments_of_nodes(graph: PCG, moments: Mapping[int, tuple[float, float]]) -> dict[tuple[int, int], tuple[float, float]]:
    """Return by id(node) and phase when the nodes of the outermost graph run, given when each instruction does; a remat is one
    node.
    """
    number_of = numbers(graph)
    outside = {number_of[id(n)]: id(n) for n in graph.nodes if id(n) in number_of}
    outside |= {
        number_of[id(n)]: id(r) for r in graph.nodes if r.kind == "remat" and r.inside is not None for n, _ in r.inside.walk()
    }
    moments_by_node: dict[tuple[int, int], tuple[float, float]] = {}
    for name, (start, end) in moments.items():
        number, phase = divmod(name // PARTS, OPERATORS)
        key = (outside[number], phase)
        first, last = moments_by_node.get(key, (start, end))
        moments_by_node[key] = (min(first, start), max(last, end))
    return moments_by_node


class _Region:
    """Appends a graph's instructions, and those of the remats inside it, to `instructions`."""

    def __init__(
        self, graph: PCG, costs: _Costs, inputs: Iterable[Names], instructions: list[SpmdInstruction] | None = None
    ) -> None:
        """Start without instructions. `inputs` are for each input the instructions after which it is available."""
        self.graph, self.costs = graph, costs
        self.instructions: list[SpmdInstruction] = [] if instructions is None else instructions
        self.done: dict[Value, Names] = {Value(n): after for n, after in zip(graph.inputs, inputs, strict=True)}
        self.remats: dict[int, _Region] = {}
        self.repeated: dict[int, Names] = {}  # by id(node): the instructions that compute it again
        self.offloaded: dict[int, Names] = {}  # by id(node): the instructions that send its values to the host

    def forward(self) -> None:
        """Append the forward pass."""
        for node in self.graph.nodes:
            if node.kind == "input":
                continue
            after = union(self.done[v] for v in node.operands)
            if node.kind == "remat":
                inside = self.remats[id(node)] = self.inside(node, [self.done[v] for v in node.operands], self.instructions)
                inside.forward()
                self.done.update((v, inside.done[w]) for v, w in zip(node.results, inside.graph.outputs, strict=True))
                continue
            if node.inside is not None:
                step = self.inside(node, [()] * len(node.operands), [])
                step.forward()
                length = runs_of(node, self.costs.flow)
                after = self.communicate(node, Phase.FORWARD, self.loop(node, Phase.FORWARD, step.instructions, length, after))
            else:
                after = self.compute(node, Phase.FORWARD, after)
                self.offloaded[id(node)] = self.transfer(node, Phase.FORWARD, after)
                after = self.communicate(node, Phase.FORWARD, after)
            self.done.update((v, after) for v in node.results)

    def backward(self, cotangents: dict[Value, Names]) -> list[Names]:
        """Append the backward pass, given the instructions after which the cotangents of outputs are available. Returns those of
        the inputs.
        """
        flow = self.costs.flow
        for node in reversed(self.graph.nodes):
            if node.kind == "input" or not any(v in cotangents for v in node.results):
                continue
            after = union(cotangents.get(v, ()) for v in node.results)
            if node.kind == "remat":
                inside = self.remats[id(node)]
                inside.recompute(after)
                ends = {w: cotangents[v] for v, w in zip(node.results, inside.graph.outputs, strict=True) if v in cotangents}
                gradients_after = inside.backward(ends)
            elif node.inside is not None:
                gradients_after = self._loop_backward(node, after)
            else:
                gradients_after = [self._operator_backward(node, after)] * len(node.operands)
            for v, names in zip(node.operands, gradients_after, strict=True):
                if flow(v):
                    cotangents[v] = union((cotangents.get(v, ()), names))
        return [cotangents.get(Value(n), ()) for n in self.graph.inputs]

    def update(self, after: Names) -> None:
        """Append the transfers of the optimizer's state that is in the memory of the host, after instructions."""
        for node in reversed(self.graph.inputs):
            for t in self.costs.transfers.get(id(node), ()):
                for part, label in ((TRANSFER, "slots from the host"), (RETURN, "slots to the host")):
                    after = self.add(node, Phase.UPDATE, part, label, t.seconds / 2, after, HostTransfer(t.nbytes))

    def _operator_backward(self, node: Node, after: Names) -> Names:
        """Append one operator's backward pass, and before it the gathers, recomputation and transfers for it."""
        if node.kind not in PARALLELIZATION:
            after = self._recompute_operands(node, after)
            if id(node) not in self.repeated:
                after = self.transfer(node, Phase.RECOMPUTE, union((after, self.offloaded.get(id(node), ()))))
                after = self.communicate(node, Phase.RECOMPUTE, self.compute(node, Phase.RECOMPUTE, after))
        after = union((after, self.repeated.get(id(node), ())))
        return self.communicate(node, Phase.BACKWARD, self.compute(node, Phase.BACKWARD, after))

    def _loop_backward(self, node: Node, after: Names) -> list[Names]:
        """Append a loop's backward pass. Returns the instructions after which each operand's gradient is available.

        The gradients of weights of a pipeline that does not drain are complete before the last ticks of a step, which run while
        they are sent.
        """
        step, length = self._step_backward(node), runs_of(node, self.costs.flow)
        early, sampled = length, range(0)
        if node.kind == PIPELINE:
            schedule = schedule_of(node)
            early, sampled = length * schedule.backward_ticks // schedule.ticks, ends_of(node).sampled
        first = self.loop(node, Phase.BACKWARD, step, early, after)
        last = self.communicate(node, Phase.BACKWARD, self.loop(node, Phase.BACKWARD, step, length - early, first, LATER))
        first = last if early == length else first
        return [last if p in sampled else first for p in range(len(node.operands))]

    def _recompute_operands(self, node: Node, after: Names) -> Names:
        """Append the recomputation of an operator's operands that are not residuals, their producers and changes of type
        included.
        """
        for v in node.operands:
            *changed, unchanged = through_marked_changes(v)
            producer = unchanged.node
            while producer.kind == "view":
                producer = producer.operands[0].node
            if runs_again(producer):
                if id(producer) not in self.repeated:  # its runs for several readers are one instruction
                    ready = self._recompute_operands(producer, after)
                    self.repeated[id(producer)] = self.compute(producer, Phase.RECOMPUTE, ready)
                after = union((after, self.repeated[id(producer)]))
            for value in reversed(changed):
                after = self.communicate(value.node, Phase.RECOMPUTE, after)
        return after

    def recompute(self, after: Names) -> None:
        """Append the recomputation of a remat, or of a loop's step in one, once its cotangents have arrived."""
        done: dict[Value, Names] = {Value(n): after for n in self.graph.inputs}
        for node in self.graph.nodes:
            if node.kind == "input":
                continue
            ready = union(done[v] for v in node.operands) or after
            if id(node) in self.costs.transfers:
                ready = union((ready, self.transfer(node, Phase.RECOMPUTE, union((after, self.offloaded.get(id(node), ()))))))
            if node.inside is not None:
                ready = ready if any(map(self.costs.flow, node.results)) else self._recompute_nested(node, ready)
            elif not node.again:
                ready = self.repeated[id(node)] = self.communicate(
                    node, Phase.RECOMPUTE, self.compute(node, Phase.RECOMPUTE, ready)
                )
            done.update((v, ready) for v in node.results)

    def _recompute_nested(self, node: Node, after: Names) -> Names:
        """Append the recomputation of a remat or a loop to which no gradient flows."""
        if node.kind != "remat":
            return self.loop(node, Phase.RECOMPUTE, self._step_backward(node), runs_of(node, self.costs.flow), after)
        start = len(self.instructions)
        self.remats[id(node)].recompute(after)
        return union((i.name,) for i in self.instructions[start:]) or after

    def _step_backward(self, node: Node) -> list[SpmdInstruction]:
        """Return the backward pass of one step of a scan, whose forward pass is over, with what is recomputed for it."""
        step = self.inside(node, [()] * len(node.operands), [])
        step.forward()
        forward = {i.name for i in step.instructions}
        step.instructions.clear()
        step.recompute(())  # inside of a remat
        step.backward({v: () for v in step.graph.outputs if self.costs.flow(v)})
        return [replace(i, before=tuple(n for n in i.before if n not in forward)) for i in step.instructions]

    def inside(self, node: Node, inputs: Iterable[Names], instructions: list[SpmdInstruction]) -> _Region:
        assert node.inside is not None
        return _Region(node.inside, self.costs, inputs, instructions)

    def compute(self, node: Node, phase: Phase, after: Names) -> Names:
        """Append an operator, if it takes any time. Returns the instructions to wait for then."""
        seconds = self.costs.compute.get(id(node), (0.0, 0.0, 0.0))[phase]
        return self.add(node, phase, 0, node.kind, seconds, after, None) if seconds > 0 else after

    def transfer(self, node: Node, phase: Phase, after: Names) -> Names:
        """Append the transfers of an operator's offloaded values, to the host or back. Returns the instructions to wait for."""
        terms = self.costs.transfers.get(id(node), ())
        if not terms:
            return after
        seconds = sum(t.seconds / (2 * t.count) for t in terms)
        label = f"{node.kind} to the host" if phase == Phase.FORWARD else f"{node.kind} from the host"
        return self.add(node, phase, TRANSFER, label, seconds, after, HostTransfer(sum(t.nbytes for t in terms)))

    def communicate(self, node: Node, phase: Phase, after: Names) -> Names:
        """Append a node's collectives of a phase, one after the other. Those of a pipeline are the transfers of all its ticks,
        outside of any loop.
        """
        for part, term in enumerate(self.costs.collectives.get(id(node), ())):
            c = term.collective
            once = c.count if node.kind in (PIPELINE, TAIL) else 1
            if c.direction == FORWARD:  # a collective hoisted out of a loop counts for a fraction in each step
                first = c.count - c.repeats
                runs = {Phase.FORWARD: once / c.hoisted, Phase.RECOMPUTE: c.repeats // (first * c.hoisted), Phase.BACKWARD: 0}
            else:
                runs = {Phase.BACKWARD: once}
            if n := runs.get(phase, 0):
                sent = Communication(c.kind, c.axes, c.nbytes, n, c.merged, c.turned)
                after = self.add(node, phase, 1 + part, f"{c.kind} of {node.kind}", n * term.seconds / c.count, after, sent)
        return after

    def loop(self, node: Node, phase: Phase, step: list[SpmdInstruction], length: int, after: Names, part: int = 0) -> Names:
        """Append `length` steps of a loop."""
        if not step or not length:
            return after
        seconds = length * sum(i.seconds for i in step)
        return self.add(node, phase, part, f"{length} × {node.kind}", seconds, after, ProgramLoop(SpmdProgram(tuple(step)), length))

    def add(
        self,
        node: Node,
        phase: Phase,
        part: int,
        label: str,
        seconds: float,
        after: Names,
        action: Communication | HostTransfer | ProgramLoop | None,
    ) -> Names:
        name = (self.costs.numbers[id(node)] * OPERATORS + phase) * PARTS + part
        self.instructions.append(
            SpmdInstruction(name, label if phase == Phase.FORWARD else f"{label}, {PHASES[phase]}", seconds, after, action)
        )
        return (name,)
