"""Pipelines as operators of a graph: a scan whose steps are divided among devices, and whose samples come in micro-batches.

Along the axes of a pipeline device k, *stage* k, has the k-th part of the steps' weights and runs only these steps, one
micro-batch after the other; what it carries goes on to the next stage. With S stages, M micro-batches and L steps:

    tick   0    1    2    3    4         M = 3, S = 3
    stage 0  b0   b1   b2
    stage 1       b0   b1   b2
    stage 2            b0   b1   b2      M + S - 1 ticks, of which every device idles in S - 1

Outside, a pipeline is an operator like any other: what it carries is partitioned in the samples before and after it, and what it
takes steps of in the steps. So every device starts with its own samples, ends with its own, and no weight is on two stages.
Inside, a step is the scan's, on a micro-batch's samples: partitioned in the samples, with replicated weights. What runs is
`unity.exec.pipelines.gpipe`.

Under GPipe's schedule the gradient is the same backwards, so that what every micro-batch keeps is there at once. Under 1F1B
(`unity.pcg.parallel.timetable`) a micro-batch's backward pass starts as soon as its last stage is done; so its loss must be known
then. What leads from the last stage to the loss is an operator of its own that follows the pipeline, its *tail*: computed for one
micro-batch after the other by the last stage, its results sums over all samples. As many ticks have a forward pass as have a
backward one, M + S - 1, so the time is GPipe's; but no more than S micro-batches are between the two on any stage.

2BW is 1F1B that does not drain between two steps: a step's first ticks end the step before (`unity.exec.two_buffered_weights`). So
it has M ticks. What is differentiated is then not a function of one batch, and it is never chosen but where it was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from unity.base.errors import ParallelTypeError
from unity.pcg.ir.graph import PCG, PIPELINE, TAIL, THROUGH, Node, Value, carried_by
from unity.pcg.parallel.timetable import drained, exchanges
from unity.pcg.propagation.choices import Choice, choice_of, choices
from unity.pcg.propagation.solver import Unmatched, solve
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, partitioned

GPIPE, ONE_F_ONE_B, TWO_BW = "gpipe", "1f1b", "2bw"
SCHEDULES = (ONE_F_ONE_B, GPIPE, TWO_BW)
FOLLOWED = (ONE_F_ONE_B, TWO_BW)  # a tail follows the pipeline, and backward passes follow their forward passes at once


@dataclass(frozen=True)
class Schedule:
    """How a pipeline runs: its stages, micro-batches and steps, as in the tables above."""

    stages: int
    micro_batches: int
    steps: int
    kind: str = GPIPE

    @property
    def ticks(self) -> int:
        """How often each device runs its stage, or idles, in a step."""
        return self.micro_batches + (0 if self.kind == TWO_BW else self.stages - 1)

    @property
    def slots(self) -> int:
        """How many steps the largest stage has; others may have one less."""
        return -(-self.steps // self.stages)

    @property
    def runs(self) -> int:
        """How often one device runs a step, idle ticks included."""
        return self.ticks * self.slots

    @property
    def held(self) -> int:
        """For how many micro-batches a device has room to keep what the backward pass needs. (GPipe keeps idle ticks', too.)"""
        return self.stages if self.kind in FOLLOWED else self.ticks

    @property
    def kept(self) -> int:
        """For how many runs of a step that is. By 1F1B what a pass makes, or reads, lies beside the places."""
        return (self.held + (self.kind in FOLLOWED)) * self.slots

    @property
    def rounds(self) -> int:
        """How many micro-batches start on each device."""
        return self.micro_batches // self.stages

    @property
    def turns(self) -> int:
        """How many ticks a step's loop by 1F1B has, those at the end included that only bring gradients home; or one by 2BW."""
        return self.ticks + (0 if self.kind == TWO_BW else drained(self.stages, self.rounds))

    @property
    def done(self) -> int:
        """After how many of a step's ticks no stage has a backward pass left: of the batch before, if steps do not drain."""
        return self.stages - 1 if self.kind == TWO_BW else self.ticks

    @property
    def flushed(self) -> Schedule:
        """The same, if every step drains."""
        return replace(self, kind=ONE_F_ONE_B) if self.kind == TWO_BW else self

    @property
    def bubble(self) -> float:
        """The part of the time that a device idles."""
        return (self.ticks - self.micro_batches) / self.ticks


def schedule_of(node: Node) -> Schedule:
    """The schedule of a pipeline, or of the one that a tail follows."""
    a = node.attributes
    return Schedule(int(a["stages"]), int(a["micro_batches"]), int(a["steps"]), str(a.get("schedule", GPIPE)))


def runs_of(loop: Node, flow: Callable[[Value], bool]) -> int:
    """How often a loop's inside runs on a device. Without a gradient a tail runs after its pipeline, and all stages share it."""
    if loop.kind in (PIPELINE, TAIL) and not any(map(flow, loop.results)):
        return schedule_of(loop).rounds if loop.kind == TAIL else schedule_of(loop).flushed.runs
    return int(loop.attributes.get("length", 1))


def names_of(node: Node) -> tuple[str, ...]:
    """The axes along which a pipeline's stages lie."""
    return tuple(str(node.attributes["along"]).split())


def positions_of(node: Node, axes: Sequence[Axis]) -> tuple[int, ...]:
    """These axes, by position. Raises ParallelTypeError if they are no axes of the mesh, or give another number of stages."""
    names = names_of(node)
    found = tuple(k for k, axis in enumerate(axes) if axis.name in names)
    if len(found) != len(names) or prod(axes[k].size for k in found) != schedule_of(node).stages:
        mesh = " ".join(f"{axis.name}={axis.size}" for axis in axes)
        raise ParallelTypeError(
            f"{node.source}: a pipeline of {schedule_of(node).stages} stages along {' '.join(names)} cannot be on a mesh of {mesh}"
        )
    return found


@dataclass(frozen=True)
class Ends:
    """The operands of a pipeline, by position: constants, what has samples and is read by every step, what is carried from step to
    step, what is taken in steps. Of a tail what is `carried` are the pipeline's results."""

    constants: range
    read: range
    carried: range
    stepped: range

    @property
    def sampled(self) -> range:
        """What has samples."""
        return range(self.read.start, self.carried.stop)


def ends_of(node: Node) -> Ends:
    """The operands of a pipeline, or of a tail."""
    c, r, k = (int(node.attributes[name]) for name in ("consts", "read", "arriving" if node.kind == TAIL else "carry"))
    return Ends(range(c), range(c, c + r), range(c + r, c + r + k), range(c + r + k, len(node.operands)))


def samples_of(node: Node) -> dict[int, int]:
    """For each operand that has samples, by position: which dimension they are, in a step. Outside it is one more."""
    return dict(zip(ends_of(node).sampled, map(int, str(node.attributes["samples"]).split()), strict=True))


def entering(node: Node) -> frozenset[int]:
    """The operands with samples, by position, that the first stage is given: all, unless stages are of different operators and
    only some hand it on."""
    ends = ends_of(node)
    chosen = node.attributes.get("entering")
    return frozenset(ends.sampled) if chosen is None else frozenset(ends.carried.start + int(k) for k in str(chosen).split())


def leaving(node: Node) -> frozenset[int]:
    """The operands, by position, whose values after the last stage are results that are read."""
    ends = ends_of(node)
    chosen = node.attributes.get("leaving")
    return frozenset(ends.carried) if chosen is None else frozenset(ends.carried.start + int(k) for k in str(chosen).split())


def sends(node: Node, position: int, flow: Callable[[Value], bool]) -> tuple[int, int]:
    """How often the stages send each other pieces of an operand, and backward of its gradient.

    By 1F1B a message goes both ways, and is counted once, as a forward one: samples go on against gradients that go back; and
    samples that come down against gradients that go home. What the tail reads goes on with the samples.
    """
    assert node.inside is not None
    ends, schedule = ends_of(node), schedule_of(node)
    followed = any(map(flow, node.results)) and schedule.kind in FOLLOWED
    messages = exchanges(schedule.stages) * schedule.turns
    if node.kind == TAIL:
        return messages if followed and position in ends.read else 0, 0
    if position not in ends.sampled:
        return 0, 0
    if followed:
        return (1 + (position in entering(node))) * messages, 0
    ticks = schedule.flushed.ticks
    onward = 1 + (position in leaving(node))  # samples go on, and so does what left the last stage; those that wait come nearer
    waiting = position in entering(node)
    back = onward * flow(Value(node.inside.inputs[position])) + (waiting and flow(node.operands[position]))
    return (onward + waiting) * ticks, back * ticks


def in_flight(node: Node, position: int, flow: Callable[[Value], bool]) -> int:
    """How many times an operand of a pipeline by 2BW, or of its tail, is held for the batch before: once as that batch found it,
    but for samples that have begun, and once for what its gradients add up to."""
    if schedule_of(node).kind != TWO_BW or not any(map(flow, node.results)):
        return 0
    ends = ends_of(node)
    if node.kind == TAIL and position in ends.carried:
        return 0
    begun = node.kind == PIPELINE and position in ends.sampled
    return (not begun) + flow(node.operands[position])


def scaled_over(node: Node, flow: Callable[[Value], bool]) -> tuple[int, ...]:
    """The axes, by position, along which devices must agree on the gradient of the loss of a tail: where it is replicated for use,
    as its gradient is a partial sum; and where it is a partial sum, though something that it, or its pipeline, is differentiated by
    is the same on all devices. (There they do agree, but JAX cannot know.)"""
    if node.kind != TAIL or not any(map(flow, node.results)):
        return ()
    ends = ends_of(node)
    pipeline = node.operands[ends.carried.start].node
    read = (*pipeline.operands, *(node.operands[p] for p in range(ends.carried.start)))
    loss = node.types[int(node.attributes["loss"])]
    moving = [v for v in read if flow(v)]
    alike = [any(v.type[k] == UNUSED for v in moving) for k in range(len(loss))]
    return tuple(k for k, s in enumerate(loss) if moving and (s == REPLICATED or (s != UNUSED and alike[k])))


def outside_state(node: Node, position: int) -> State:
    """The state of an operand along a stage axis."""
    ends = ends_of(node)
    if position in ends.constants:
        return REPLICATED
    return partitioned(samples_of(node)[position] + 1) if position in ends.sampled else partitioned(0)


def inside_state(node: Node, position: int) -> State:
    """The state, along a stage axis, in which a step finds an operand."""
    samples = samples_of(node)
    return partitioned(samples[position]) if position in samples else REPLICATED


def one_more(state: State) -> State:
    """The state of a tensor that stacks tensors of this state, along an axis without stages."""
    return State("P", state.dim + 1, state.outer) if state.kind == "P" else state


class Mixed(Exception):
    """A step does not work on each sample by itself. The message says which operator, where, and why."""


def staged(node: Node) -> Mapping[int, Choice]:
    """What every operator inside of a pipeline, or of its tail, does along the stage axes, by id. Raises Mixed."""
    assert node.inside is not None
    made: dict[int, Choice] = {}
    states = tuple(inside_state(node, p) for p in range(len(node.operands)))
    results = _graph(node.inside, states, made, sums=node.kind == TAIL)
    if node.kind == TAIL:
        for k, state in enumerate(results):
            if state != PARTIAL:
                raise Mixed(f"{_where(node.inside.outputs[k].node)} gives no sum over the samples")
        return made
    for k, (state, position) in enumerate(zip(results, ends_of(node).carried, strict=True)):
        if state != inside_state(node, position):
            raise Mixed(f"{_where(node.inside.outputs[k].node)} gives what is carried, but not sample by sample")
    return made


def first_mixed(scan: Node) -> None:
    """Raises Mixed with the first operator of a scan's steps that mixes samples, where these are first dimensions."""
    assert scan.inside is not None
    carried = carried_by(scan)
    states = [partitioned(0) if p in carried else REPLICATED for p in range(len(scan.operands))]
    _graph(scan.inside, states, {})


def _graph(graph: PCG, given: Sequence[State], made: dict[int, Choice], sums: bool = False) -> list[State]:
    """The states of a graph's outputs. `sums`: whether there may be sums over the samples."""
    at: dict[Value, State] = {Value(n): s for n, s in zip(graph.inputs, given, strict=True)}
    for node in graph.nodes:
        if node.kind == "input":
            continue
        operands = tuple(at[v] for v in node.operands)
        if node.kind in THROUGH:
            assert node.inside is not None
            results: Sequence[State] = _graph(node.inside, operands, made, sums)
        elif node.body is None:
            raise Mixed(f"{_where(node)} is a loop inside of the steps")
        else:
            made[id(node)] = _choice(node, operands, sums)
            results = made[id(node)].results
        # a constant is the same for all, whichever way that is written
        at.update((v, REPLICATED if s == UNUSED else s) for v, s in zip(node.results, results, strict=True))
    return [at[v] for v in graph.outputs]


def _choice(node: Node, operands: tuple[State, ...], sums: bool) -> Choice:
    assert node.body is not None
    body = node.body
    if all(s == REPLICATED for s in operands):
        whole = (REPLICATED,) * len(node.tensors) if operands else (UNUSED,) * len(node.tensors)
        found = [c for c in choices(body) if c.states == operands + whole]
        if not found:
            raise Mixed(f"{_where(node)} cannot be repeated by every stage")
        return found[0]
    try:
        solution = solve(body, dict(zip(body.inputs, operands, strict=True)))
    except Unmatched:
        raise Mixed(f"{_where(node)} does not work on each sample by itself") from None
    if solution.reduced or (PARTIAL in solution.results and not sums):
        raise Mixed(f"{_where(node)} reduces over the samples")
    choice = choice_of(body, solution)
    if choice.halos:
        raise Mixed(f"{_where(node)} looks at neighbouring samples")
    if solution.communicates:
        raise Mixed(f"{_where(node)} looks at all samples before it decides what to do")
    found = [c for c in choices(body) if c.states == choice.states]
    return found[0] if found else choice


def _where(node: Node) -> str:
    return f"{node.kind} at {node.source}" if node.source else node.kind
