"""Pipelines as operators of a graph: a scan whose steps are divided among devices, and whose samples come in micro-batches.

Along the axes of a pipeline, device k is *stage* k: it has the weights of the k-th part of the steps and runs only these steps, on
one micro-batch after the other, and sends the carry to the next stage. With S stages, M micro-batches and L steps:

    tick   0    1    2    3    4         M = 3, S = 3
    stage 0  b0   b1   b2
    stage 1       b0   b1   b2
    stage 2            b0   b1   b2      M + S - 1 ticks, of which every device idles in S - 1

From outside, a pipeline is an operator like any other: the carry is partitioned in the samples, before and after it, and the
stacked operands in the steps. So every device starts and ends with its own samples, and no weight is on two stages. Inside, a step
is the scan's step on the samples of one micro-batch: partitioned in the samples, with replicated weights.
`unity.exec.pipelines.gpipe` runs it.

Under GPipe's schedule the backward pass mirrors the forward pass, so the residuals of all micro-batches are live at once. Under
1F1B (`unity.pcg.parallel.timetable`) the backward pass of a micro-batch starts as soon as its last stage is done, so its loss must
be known then. The program from the last stage to the loss is therefore a separate operator that follows the pipeline, its *tail*:
the last stage runs it for one micro-batch after the other, and its results are sums over all samples. There are M + S - 1 ticks
with a forward pass and as many with a backward pass, so the time is GPipe's; but at most S micro-batches are in flight on any
stage.

2BW is 1F1B that does not drain between two training steps: the first ticks of a step finish the step before it
(`unity.exec.two_buffered_weights`). So it has M ticks. What is differentiated is then not a function of one batch, so the search
chooses 2BW only on request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from unity.base.errors import ParallelTypeError
from unity.pcg.ir.gradient_flow import Gradients
from unity.pcg.ir.graph import PCG, PIPELINE, TAIL, THROUGH, Node, Value, carried_by, reserved_axes, times_inside
from unity.pcg.ir.payloads import Pipeline, PipelineTail, ScheduleKind
from unity.pcg.parallel.timetable import drain_ticks, exchanges_per_tick
from unity.pcg.propagation.choice import Choice, choice_of
from unity.pcg.propagation.choices import choices
from unity.pcg.propagation.propagation import Unmatched
from unity.pcg.propagation.solver import replicable, solve
from unity.pcg.types.accumulation import growth
from unity.pcg.types.axis import Axis
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, UNUSED, State, partitioned

GPIPE, ONE_F_ONE_B, TWO_BW = ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.TWO_BW
SCHEDULES = (ONE_F_ONE_B, GPIPE, TWO_BW)
FOLLOWED = (ONE_F_ONE_B, TWO_BW)  # a tail follows the pipeline, and each backward pass its forward pass without delay


@dataclass(frozen=True)
class Schedule:
    """The schedule of a pipeline.

    Attributes:
        stages: the number of stages, S.
        micro_batches: the number of micro-batches, M.
        steps: the number of steps of the scan, L.
        kind: the kind of schedule.
    """

    stages: int
    micro_batches: int
    steps: int
    kind: ScheduleKind = GPIPE

    @property
    def ticks(self) -> int:
        """The number of times that each device runs its stage, or idles, in a training step."""
        return self.micro_batches + (0 if self.kind == TWO_BW else self.stages - 1)

    @property
    def slots(self) -> int:
        """The number of scan steps of the largest stage; others may have one fewer."""
        return -(-self.steps // self.stages)

    @property
    def runs(self) -> int:
        """The number of scan steps that one device runs, idle ticks included."""
        return self.ticks * self.slots

    @property
    def buffered_micro_batches(self) -> int:
        """The number of micro-batches whose residuals a device has buffers for. (GPipe has one for each idle tick, too.)"""
        return self.stages if self.kind in FOLLOWED else self.ticks

    @property
    def residual_steps(self) -> int:
        """The number of scan steps whose residuals are live on a device: of all buffers and, under 1F1B, of the current pass."""
        return (self.buffered_micro_batches + (self.kind in FOLLOWED)) * self.slots

    @property
    def rounds(self) -> int:
        """The number of micro-batches that start on each device."""
        return self.micro_batches // self.stages

    @property
    def loop_ticks(self) -> int:
        """The number of ticks of a training step's loop under 1F1B or 2BW, with those that only send the last gradients home."""
        return self.ticks + (0 if self.kind == TWO_BW else drain_ticks(self.stages, self.rounds))

    @property
    def backward_ticks(self) -> int:
        """The number of ticks until all backward passes are over: of this batch or, under 2BW, of the batch before."""
        return self.stages - 1 if self.kind == TWO_BW else self.ticks

    @property
    def flushed(self) -> Schedule:
        """This schedule if every training step drains: 1F1B in place of 2BW."""
        return replace(self, kind=ONE_F_ONE_B) if self.kind == TWO_BW else self

    @property
    def bubble(self) -> float:
        """The fraction of the time that a device idles."""
        return (self.ticks - self.micro_batches) / self.ticks


def _payload(node: Node) -> Pipeline | PipelineTail:
    assert isinstance(node.payload, (Pipeline, PipelineTail)), node
    return node.payload


def schedule_of(node: Node) -> Schedule:
    """Return the schedule of a pipeline, or of the pipeline that a tail follows."""
    payload = _payload(node)
    return Schedule(payload.stages, payload.micro_batches, payload.steps, payload.schedule or GPIPE)


def runs_of(loop: Node, flow: Callable[[Value], bool]) -> int:
    """Return the number of times that a device runs the nested graph of a loop.

    Without a gradient a tail runs after its pipeline, and all stages share its micro-batches.
    """
    if loop.kind in (PIPELINE, TAIL) and not any(map(flow, loop.results)):
        return schedule_of(loop).rounds if loop.kind == TAIL else schedule_of(loop).flushed.runs
    return times_inside(loop)


def stage_axes(node: Node, axes: Sequence[Axis]) -> tuple[int, ...]:
    """Return the positions in the mesh of the axes along which a pipeline's stages lie.

    Raises:
        ParallelTypeError: the mesh lacks one of them, or their sizes do not multiply to the number of stages.
    """
    stages = schedule_of(node).stages
    return positions_along(node, axes, stages, f"a pipeline of {stages} stages")


def positions_along(node: Node, axes: Sequence[Axis], devices: int, parts: str) -> tuple[int, ...]:
    """Return the positions in the mesh of the axes along which the parts of an operator lie: its stages, or groups of branches.

    Raises:
        ParallelTypeError: the mesh lacks one of them, or their sizes do not multiply to the number of `devices`. The message names
            axes of the mesh only: those that it lacks have no names for users.
    """
    names = reserved_axes(node)
    positions = tuple(k for k, axis in enumerate(axes) if axis.name in names)
    size = prod(axes[k].size for k in positions)
    if len(positions) != len(names) or size != devices:
        mesh, along = " ".join(f"{axis.name}={axis.size}" for axis in axes), " ".join(axes[k].name for k in positions)
        lacking = f", and {len(names) - len(positions)} that the mesh lacks" if len(positions) != len(names) else ""
        raise ParallelTypeError(
            f"{node.source}: {parts} along {along or 'no axis'} of the mesh {mesh}: expected axes of {devices} devices, got {size}"
            f"{lacking}"
        )
    return positions


@dataclass(frozen=True)
class OperandRanges:
    """The operands of a pipeline or of its tail, by position.

    Attributes:
        constants: values without samples that every step reads.
        read: values with samples that every step reads.
        carried: the carry of a pipeline; for a tail, the results of its pipeline.
        stepped: stacked values, of which each step reads its own slice.
    """

    constants: range
    read: range
    carried: range
    stepped: range

    @property
    def sampled(self) -> range:
        """The operands that have samples."""
        return range(self.read.start, self.carried.stop)


def ends_of(node: Node) -> OperandRanges:
    """Return the ranges of the operands of a pipeline, or of a tail."""
    payload = _payload(node)
    c, r, k = payload.consts, payload.read, payload.arriving if isinstance(payload, PipelineTail) else payload.carry
    return OperandRanges(range(c), range(c, c + r), range(c + r, c + r + k), range(c + r + k, len(node.operands)))


def samples_of(node: Node) -> dict[int, int]:
    """Return, for each operand that has samples, their dimension in a step. Outside of the pipeline it is one higher."""
    return dict(zip(ends_of(node).sampled, _payload(node).samples, strict=True))


def entering(node: Node) -> frozenset[int]:
    """Return the operands with samples, by position, that the first stage receives.

    These are all of them, unless stages consist of different operators and only some operands come from outside.
    """
    ranges, numbers = ends_of(node), node.of(Pipeline).entering
    return frozenset(ranges.sampled) if numbers is None else frozenset(ranges.carried.start + k for k in numbers)


def leaving(node: Node) -> frozenset[int]:
    """Return the operands, by position, whose values after the last stage are results that something reads."""
    ranges, numbers = ends_of(node), node.of(Pipeline).leaving
    return frozenset(ranges.carried) if numbers is None else frozenset(ranges.carried.start + k for k in numbers)


def has_gradient(node: Node, position: int, flow: Callable[[Value], bool]) -> bool:
    """Return whether a pipeline or its tail computes a gradient of an operand; other users of the operand may, too."""
    assert node.inside is not None
    return flow(node.operands[position]) and flow(Value(node.inside.inputs[position]))


def sends(node: Node, position: int, flow: Gradients) -> tuple[int, int]:
    """Return the numbers of messages between stages for pieces of an operand, and for those of its gradient.

    Under 1F1B a message goes both ways and counts once, as a forward one: activations go on while gradients come back, and stored
    samples approach the first stage while their gradients return to where the samples are stored. The operands of the tail go on
    with the activations.

    Under GPipe's schedule JAX derives the backward pass, with a stage as one function of all that it reads: so all of a stage's
    operands that depend on what is differentiated have a gradient, even where it is zero, unless they are marked as inactive.
    """
    assert node.inside is not None
    ranges, schedule = ends_of(node), schedule_of(node)
    followed = any(map(flow, node.results)) and schedule.kind in FOLLOWED
    messages = exchanges_per_tick(schedule.stages) * schedule.loop_ticks
    if node.kind == TAIL:
        return messages if followed and position in ranges.read else 0, 0
    if position not in ranges.sampled:
        return 0, 0
    if followed:
        return (1 + (position in entering(node))) * messages, 0
    ticks = schedule.flushed.ticks
    home, approaching = position in leaving(node), position in entering(node)
    active = any(map(flow, node.results)) and position not in (node.of(Pipeline).inactive or ())
    backward = 0
    if active and flow.has_tangent(Value(node.inside.inputs[position])):
        returned = home and flow(Value(node, position - ranges.carried.start))
        backward = 1 + returned + (approaching and flow.has_tangent(node.operands[position]))
    return (1 + home + approaching) * ticks, backward * ticks


def in_flight(node: Node, position: int, flow: Callable[[Value], bool]) -> float:
    """Return the live size of an operand for the previous batch, in a 2BW pipeline or its tail, as a multiple of the operand's.

    One array is the operand's value for that batch, unless it has samples, whose forward pass has begun already. Another holds its
    gradients: those of samples in their own type, and the sum of all others in the accumulation type.
    """
    if schedule_of(node).kind != TWO_BW or not any(map(flow, node.results)):
        return 0
    ranges = ends_of(node)
    if node.kind == TAIL and position in ranges.carried:
        return 0
    begun, operand = node.kind == PIPELINE and position in ranges.sampled, node.operands[position]
    if not has_gradient(node, position, flow):
        return float(not begun)
    return (not begun) + (1.0 if position in ranges.sampled else growth(operand.tensor.dtype))


def loss_gradient_axes(node: Node, flow: Callable[[Value], bool]) -> tuple[int, ...]:
    """Return the axes, by position, along which an all-reduce makes the gradient of a tail's loss equal on all devices.

    These are the axes along which the loss is replicated for use, since its gradient is a partial sum there; and those along which
    the loss is partial or partitioned, but some differentiated operand of the tail or its pipeline is the same on all devices. (In
    this case devices agree already, but JAX cannot know.)
    """
    if node.kind != TAIL or not any(map(flow, node.results)):
        return ()
    first_result = ends_of(node).carried.start
    pipeline = node.operands[first_result].node
    operands = [(pipeline, p) for p in range(len(pipeline.operands))] + [(node, p) for p in range(first_result)]
    loss = node.types[node.of(PipelineTail).loss]
    active = [n.operands[p] for n, p in operands if has_gradient(n, p, flow)]
    has_unused = [any(v.type[k] == UNUSED for v in active) for k in range(len(loss))]
    return tuple(k for k, s in enumerate(loss) if active and (s == REPLICATED or (s != UNUSED and has_unused[k])))


def outside_state(node: Node, position: int) -> State:
    """Return the state of an operand along a stage axis."""
    ranges = ends_of(node)
    if position in ranges.constants:
        return REPLICATED
    return partitioned(samples_of(node)[position] + 1) if position in ranges.sampled else partitioned(0)


def inside_state(node: Node, position: int) -> State:
    """Return the state of an operand in a step, along a stage axis."""
    samples = samples_of(node)
    return partitioned(samples[position]) if position in samples else REPLICATED


def stacked_state(state: State) -> State:
    """Return the state of a stack of tensors of this state, along an axis without stages."""
    return State("P", state.dim + 1, state.outer) if state.kind == "P" else state


class Mixed(Exception):
    """Raised for a step that does not treat samples independently. The message names the operator, its line and the reason."""


def staged(node: Node) -> Mapping[int, Choice]:
    """Return the choice of every operator inside of a pipeline, or of its tail, along the stage axes, by id.

    Raises:
        Mixed: an operator does not treat samples independently.
    """
    assert node.inside is not None
    by_node: dict[int, Choice] = {}
    states = tuple(inside_state(node, p) for p in range(len(node.operands)))
    results = _propagate(node.inside, states, by_node, sums=node.kind == TAIL)
    if node.kind == TAIL:
        for k, state in enumerate(results):
            if state != PARTIAL:
                raise Mixed(f"{_where(node.inside.outputs[k].node)} gives no sum over the samples")
        return by_node
    for k, (state, position) in enumerate(zip(results, ends_of(node).carried, strict=True)):
        if state != inside_state(node, position):
            raise Mixed(f"{_where(node.inside.outputs[k].node)} gives what is carried, but not sample by sample")
    return by_node


def check_samples_independent(scan: Node, independent: Collection[int] = ()) -> None:
    """Raise Mixed if an operator of a scan's step mixes samples, which are the first dimension of every carried value.

    The carries `independent`, by number, have no samples.
    """
    assert scan.inside is not None
    carried = [p for k, p in enumerate(carried_by(scan)) if k not in independent]
    states = [partitioned(0) if p in carried else REPLICATED for p in range(len(scan.operands))]
    _propagate(scan.inside, states, {})


def _propagate(graph: PCG, inputs: Sequence[State], by_node: dict[int, Choice], sums: bool = False) -> list[State]:
    """Propagate the states of a graph's inputs along a stage axis and return those of its outputs.

    Args:
        graph: the graph.
        inputs: the states of its inputs.
        by_node: receives the choice of every operator, by id.
        sums: whether values may be sums over the samples.
    """
    at: dict[Value, State] = {Value(n): s for n, s in zip(graph.inputs, inputs, strict=True)}
    for node in graph.nodes:
        if node.kind == "input":
            continue
        operands = tuple(at[v] for v in node.operands)
        if node.kind in THROUGH:
            assert node.inside is not None
            results: Sequence[State] = _propagate(node.inside, operands, by_node, sums)
        elif node.body is None:
            raise Mixed(f"{_where(node)} is a loop inside of the steps")
        else:
            by_node[id(node)] = _choice(node, operands, sums)
            results = by_node[id(node)].results
        # a constant is the same on all devices, in either state
        at.update((v, REPLICATED if s == UNUSED else s) for v, s in zip(node.results, results, strict=True))
    return [at[v] for v in graph.outputs]


def _choice(node: Node, operands: tuple[State, ...], sums: bool) -> Choice:
    """Return an operator's choice for these states of its operands. Raises Mixed."""
    assert node.body is not None
    body = node.body
    if all(s == REPLICATED for s in operands):
        results = (REPLICATED if operands else UNUSED,) * len(node.tensors)
        if operands and not replicable(body):
            raise Mixed(f"{_where(node)} cannot be repeated by every stage")
        own = Choice("replicated", operands, results, 0, 0.0)
        return next((c for c in choices(body) if c.states == own.states), own)
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
    return next((c for c in choices(body) if c.states == choice.states), choice)


def _where(node: Node) -> str:
    return f"{node.kind} at {node.source}" if node.source else node.kind
