"""The SPMD program of one training step: what every device runs, in what order it could, from a parallel graph.

Seconds are those of `predict`, term by term. Forward, an operator runs after what makes its operands. Backward, it runs after its
users have, if a gradient flows there; what is computed or gathered again is so just before, as JAX ties it to the cotangent.
Nothing waits for a weight's gradient, so what is sent for it may overlap with the rest of the backward pass.

A remat's graph is part of the program around it. A scan's is a program of its own, run as a unit `length` times: a compiled loop
is one operation, and what its steps communicate does not overlap with other steps. So a step is simulated once.
So is a pipeline's, for every tick; what its stages send each other comes after all of them. One that does not drain (2BW) is done
with a batch's weights before its last ticks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from unity.machine.machine import Machine
from unity.pcg.analysis.rematerialization import runs_again
from unity.pcg.ir.gradient_flow import Gradients, gradients, losses
from unity.pcg.ir.graph import PARALLELIZATION, PCG, PIPELINE, TAIL, Node, Value
from unity.pcg.parallel.stages import ends_of, runs_of, schedule_of
from unity.pcg.parallel.traffic import FORWARD
from unity.search.cost.prediction import CollectiveTerm, predict
from unity.search.simulator.tasks import Names, union

FORTH, AGAIN, BACK = range(3)  # the phases of a step
OPERATORS, CHANGES, PARTS = 4, 1 << 12, 1 << 8  # how names are packed: phases, changes of one result's type, parts of an operator
LATER = PARTS - 1  # the part that is a loop's last steps


@dataclass(frozen=True)
class Sent:
    """A collective: its kind, the mesh axes (by position) that its groups span, the bytes of its full side on one device, how often
    it runs (a step of a loop has a part of what runs before the loop), and whether a compiler merges it with others."""

    kind: str
    axes: tuple[int, ...]
    nbytes: float
    runs: float
    merged: bool
    turned: bool


@dataclass(frozen=True)
class Loop:
    """A program that is run so many times."""

    program: Program
    length: int


@dataclass(frozen=True)
class Instruction:
    """What every device runs once. `seconds`: on a device of speed 1, of a collective as the machine's formulas say."""

    name: int
    label: str
    seconds: float
    before: Names
    what: Sent | Loop | None = None  # None: it computes


@dataclass(frozen=True)
class Program:
    """Instructions, each after those that it waits for."""

    instructions: tuple[Instruction, ...]


def program_of(graph: PCG, machine: Machine, differentiated: Collection[int]) -> Program:
    """The program of a parallel graph. `differentiated`: the inputs that gradients are taken for; none: the forward pass."""
    costs = _costs(graph, machine, differentiated)
    region = _Region(graph, costs, [()] * len(graph.inputs))
    region.forward()
    if differentiated:
        ends = [graph.outputs[k] for k in losses(graph) if costs.flow(graph.outputs[k])]
        after = union(region.done[v] for v in ends)
        region.backward(dict.fromkeys(ends, after))
    return Program(tuple(region.made))


@dataclass(frozen=True)
class _Costs:
    """What everything takes in one run, and the number of every operator: the same in all parallel graphs of one serial one."""

    flow: Gradients
    compute: Mapping[int, tuple[float, float, float]]  # by id(node): seconds forward, again, backward
    collectives: Mapping[int, list[CollectiveTerm]]
    numbers: Mapping[int, int]


def _costs(graph: PCG, machine: Machine, differentiated: Collection[int]) -> _Costs:
    prediction = predict(graph, machine, differentiated)
    compute = dict[int, tuple[float, float, float]]()
    for t in prediction.operators:  # what runs before a loop, each of its steps has a part of
        if t.runs and t.count:  # of a scan of no steps nothing runs
            once = t.forward / t.runs / t.count
            compute[id(t.node)] = (once * t.first, once * (t.runs - t.first), t.backward / t.count)
    collectives: dict[int, list[CollectiveTerm]] = {}
    for term in prediction.collectives:
        if term.collective.count:
            collectives.setdefault(id(term.collective.node), []).append(term)
    return _Costs(gradients(graph, differentiated), compute, collectives, numbers(graph))


def numbers(graph: PCG) -> dict[int, int]:
    """A number for every node. Changes of a result's type are numbered after what makes it."""
    found: dict[int, int] = {}
    for k, node in enumerate(n for n, _ in graph.walk() if n.kind not in PARALLELIZATION):
        found[id(node)] = k * CHANGES
    changes: dict[int, int] = {}
    for node, _ in graph.walk():
        if node.kind in PARALLELIZATION:
            made = found[id(node.operands[0].node)] // CHANGES
            changes[made] = changes.get(made, 0) + 1
            found[id(node)] = made * CHANGES + changes[made]
    return found


def moments_of_nodes(graph: PCG, moments: Mapping[int, tuple[float, float]]) -> dict[tuple[int, int], tuple[float, float]]:
    """By id(node) and phase: when the nodes of the outermost graph run, given when each instruction does; remats as wholes."""
    named = numbers(graph)
    outside = {named[id(n)]: id(n) for n in graph.nodes if id(n) in named}
    outside |= {named[id(n)]: id(r) for r in graph.nodes if r.kind == "remat" and r.inside is not None for n, _ in r.inside.walk()}
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for name, (start, end) in moments.items():
        number, phase = divmod(name // PARTS, OPERATORS)
        key = (outside[number], phase)
        first, last = found.get(key, (start, end))
        found[key] = (min(first, start), max(last, end))
    return found


class _Region:
    """Adds a graph's instructions to `made`, those of remats inside it too."""

    def __init__(self, graph: PCG, costs: _Costs, inputs: Iterable[Names], made: list[Instruction] | None = None) -> None:
        """`inputs`: after which instructions each input is there."""
        self.graph, self.costs = graph, costs
        self.made: list[Instruction] = [] if made is None else made
        self.done: dict[Value, Names] = {Value(n): after for n, after in zip(graph.inputs, inputs, strict=True)}
        self.remats: dict[int, _Region] = {}
        self.repeated: dict[int, Names] = {}  # by id(node): the instructions that compute it again

    def forward(self) -> None:
        """What the forward pass runs."""
        for node in self.graph.nodes:
            if node.kind == "input":
                continue
            after = union(self.done[v] for v in node.operands)
            if node.kind == "remat":
                inside = self.remats[id(node)] = self.inside(node, [self.done[v] for v in node.operands], self.made)
                inside.forward()
                self.done.update((v, inside.done[w]) for v, w in zip(node.results, inside.graph.outputs, strict=True))
                continue
            if node.inside is not None:
                step = self.inside(node, [()] * len(node.operands), [])
                step.forward()
                length = runs_of(node, self.costs.flow)
                after = self.communicate(node, FORTH, self.loop(node, FORTH, step.made, length, after))
            else:
                after = self.compute(node, FORTH, after)
                after = self.communicate(node, FORTH, after)
            self.done.update((v, after) for v in node.results)

    def backward(self, cotangents: dict[Value, Names]) -> list[Names]:
        """What the backward pass runs, given after which instructions the outputs' cotangents are there. Gives the inputs'."""
        flow = self.costs.flow
        for node in reversed(self.graph.nodes):
            if node.kind == "input" or not any(v in cotangents for v in node.results):
                continue
            after = union(cotangents.get(v, ()) for v in node.results)
            if node.kind == "remat":
                inside = self.remats[id(node)]
                inside.again(after)
                ends = {w: cotangents[v] for v, w in zip(node.results, inside.graph.outputs, strict=True) if v in cotangents}
                found = inside.backward(ends)
            elif node.inside is not None:
                found = self.loop_back(node, after)
            else:
                found = [self.operator_back(node, after)] * len(node.operands)
            for v, names in zip(node.operands, found, strict=True):
                if flow(v):
                    cotangents[v] = union((cotangents.get(v, ()), names))
        return [cotangents.get(Value(n), ()) for n in self.graph.inputs]

    def operator_back(self, node: Node, after: Names) -> Names:
        """One operator's backward pass, and before it what is gathered and computed again for it."""
        if node.kind not in PARALLELIZATION:
            after = self.made_for(node, after)
            if id(node) not in self.repeated:
                after = self.communicate(node, AGAIN, self.compute(node, AGAIN, after))
        after = union((after, self.repeated.get(id(node), ())))
        return self.communicate(node, BACK, self.compute(node, BACK, after))

    def loop_back(self, node: Node, after: Names) -> list[Names]:
        """A loop's backward pass, and after which instructions each operand's gradient is there. Weights of a pipeline that does
        not drain have theirs before a step's last ticks, which run while these are sent (`exec.homeward`)."""
        step, length = self.step_back(node), runs_of(node, self.costs.flow)
        early, sampled = length, range(0)
        if node.kind == PIPELINE:
            schedule = schedule_of(node)
            early, sampled = length * schedule.done // schedule.ticks, ends_of(node).sampled
        first = self.loop(node, BACK, step, early, after)
        last = self.communicate(node, BACK, self.loop(node, BACK, step, length - early, first, LATER))
        first = last if early == length else first
        return [last if p in sampled else first for p in range(len(node.operands))]

    def made_for(self, node: Node, after: Names) -> Names:
        """What is made again for an operator: its operands, as far as they are not kept, by what makes and by what changes them."""
        for v in node.operands:
            changes = _gathered_for(v)
            made = (changes[-1].operands[0] if changes else v).node
            while made.kind == "view":
                made = made.operands[0].node
            if runs_again(made):
                after = self.compute(made, AGAIN, self.made_for(made, after))
                self.repeated[id(made)] = after
            for change in reversed(changes):
                after = self.communicate(change, AGAIN, after)
        return after

    def again(self, after: Names) -> None:
        """Issues the recomputation of a remat, or of a loop's step in one, once its cotangents have arrived."""
        done: dict[Value, Names] = {Value(n): after for n in self.graph.inputs}
        for node in self.graph.nodes:
            if node.kind == "input":
                continue
            ready = union(done[v] for v in node.operands) or after
            if node.inside is None and not node.attributes.get("again"):
                ready = self.repeated[id(node)] = self.communicate(node, AGAIN, self.compute(node, AGAIN, ready))
            done.update((v, ready) for v in node.results)

    def step_back(self, node: Node) -> list[Instruction]:
        """The backward pass of one step of a scan; its forward pass is over."""
        step = self.inside(node, [()] * len(node.operands), [])
        step.forward()
        forward = {i.name for i in step.made}
        step.made.clear()
        step.again(())  # inside of a remat
        step.backward({v: () for v in step.graph.outputs if self.costs.flow(v)})
        return [replace(i, before=tuple(n for n in i.before if n not in forward)) for i in step.made]

    def inside(self, node: Node, inputs: Iterable[Names], made: list[Instruction]) -> _Region:
        assert node.inside is not None
        return _Region(node.inside, self.costs, inputs, made)

    def compute(self, node: Node, phase: int, after: Names) -> Names:
        """Runs an operator, if that takes any time; what is to be waited for then."""
        seconds = self.costs.compute.get(id(node), (0.0, 0.0, 0.0))[phase]
        return self.add(node, phase, 0, node.kind, seconds, after, None) if seconds > 0 else after

    def communicate(self, node: Node, phase: int, after: Names) -> Names:
        """Runs a node's collectives of a phase, one after the other; of a pipeline all that its ticks send, which is in no loop."""
        for part, term in enumerate(self.costs.collectives.get(id(node), ())):
            c = term.collective
            once = c.count if node.kind in (PIPELINE, TAIL) else 1
            if c.direction == FORWARD:  # what runs before a loop, each of its steps has a part of
                first = c.count - c.repeats
                runs = {FORTH: once / c.hoisted, AGAIN: c.repeats // (first * c.hoisted), BACK: 0}
            else:
                runs = {BACK: once}
            if n := runs.get(phase, 0):
                sent = Sent(c.kind, c.axes, c.nbytes, n, c.merged, c.turned)
                after = self.add(node, phase, 1 + part, f"{c.kind} of {node.kind}", n * term.seconds / c.count, after, sent)
        return after

    def loop(self, node: Node, phase: int, step: list[Instruction], length: int, after: Names, part: int = 0) -> Names:
        """Runs so many of a loop's steps."""
        if not step or not length:
            return after
        seconds = length * sum(i.seconds for i in step)
        return self.add(node, phase, part, f"{length} × {node.kind}", seconds, after, Loop(Program(tuple(step)), length))

    def add(self, node: Node, phase: int, part: int, label: str, seconds: float, after: Names, what: Sent | Loop | None) -> Names:
        name = (self.costs.numbers[id(node)] * OPERATORS + phase) * PARTS + part
        self.made.append(Instruction(name, label if phase == FORTH else f"{label}, {PHASES[phase]}", seconds, after, what))
        return (name,)


PHASES = ("forward", "again", "backward")


def _gathered_for(v: Value) -> list[Node]:
    """The changes of type that are made again for an operand, the last one first."""
    found = []
    while v.node.kind in PARALLELIZATION and v.node.attributes.get("again"):
        found.append(v.node)
        v = v.node.operands[0]
    return found
