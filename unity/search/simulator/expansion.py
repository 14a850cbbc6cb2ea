"""Expansion of an SPMD program into a task graph: one task of each instruction for every device, or for one that stands for all.

A collective is one task for each member of a group, on that member's link of the outermost level that the group spans. All tasks of
a group start together: they wait for a barrier, a task that takes no time, which waits for all members.

On a machine of equal devices all do the same at the same time, so it is enough to simulate one of them ("folded"); the tasks of the
others would be copies. On a topology each device has its own speed, and a collective is a ring.

One step of a loop is simulated, once. The loop then occupies the device for as long as all steps take, and each link for as long as
they use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from unity.machine.machine import Machine
from unity.search.simulator.program import Communication, HostTransfer, ProgramLoop, SpmdInstruction, SpmdProgram
from unity.search.simulator.tasks import Names, Resource, SimulationError, TaskGraph, TimedTask, union
from unity.search.simulator.timeline import Timeline, full
from unity.search.simulator.topology import Topology, bytes_sent, grid_groups

PARTS, MEMBERS = 1 << 2, 1 << 22  # a task's name packs its instruction, its part, and its device, group or link
MAIN, BARRIER, LINK = range(3)  # parts of an instruction; LINK is a loop's use of each link


@dataclass(frozen=True)
class Target:
    """The machine or topology that a program is simulated on.

    Args:
        machine: its formulas price collectives, unless there is a topology.
        topology: devices that differ from each other, as many as the machine has.
        folded: whether one device stands for all.
        overlap: whether devices communicate while they compute.
        offloads: whether values are sent to the host, for which each device has a link.

    Raises:
        SimulationError: the topology has another number of devices, or is to be folded.
    """

    machine: Machine
    topology: Topology | None = None
    folded: bool = True
    overlap: bool = True
    offloads: bool = False

    def __post_init__(self) -> None:
        if self.topology is None:
            return
        if self.topology.devices != self.machine.devices:
            raise SimulationError(
                f"the program is for {self.machine.devices} devices ({self.machine.name}), but {self.topology.name!r} has"
                f" {self.topology.devices}"
            )
        if self.folded:
            raise SimulationError(
                f"{self.topology.name!r} has devices that are not alike: they cannot be simulated as one (folded)"
            )

    @cached_property
    def devices(self) -> int:
        """The number of devices that are simulated."""
        return 1 if self.folded else self.machine.devices

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """The devices, one resource for all barriers, and the links."""
        names = [f"each of {self.machine.devices} devices"] if self.folded else [f"device {i}" for i in range(self.devices)]
        resources = [*(Resource(n, "compute") for n in names), Resource("barriers", "barrier")]
        if not self.overlap:
            return tuple(resources)
        ends = [f"{level.name}s" for level in self.machine.levels] if self.topology is None else []
        ends += ["the host"] if self.offloads else []
        shared = () if self.topology is None else self.topology.links
        links = (*(link.name for link in shared), *(f"{n}, link to {end}" for n in names for end in ends))
        return (*resources, *(Resource(name, "link") for name in links))

    @property
    def barrier(self) -> int:
        """The resource on which barriers run."""
        return self.devices

    def groups(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of devices that a collective over mesh axes joins; if folded, the only one."""
        return ((0,),) if self.folded else grid_groups(tuple(a.size for a in self.machine.axes), axes)

    def links(self, axes: tuple[int, ...], members: Sequence[int]) -> Sequence[int]:
        """Return the resource through which each member sends."""
        if not self.overlap:
            return members
        first = self.devices + 1
        if self.topology is not None:
            return [first + k for k in self.topology.ring(members)]
        level = min(self.machine.axes[a].level for a in axes)
        return [first + m * (len(self.machine.levels) + self.offloads) + level for m in members]

    def host_link(self, device: int) -> int:
        """Return the resource through which a device exchanges values with its host."""
        each = 1 if self.topology is not None else len(self.machine.levels) + 1
        return len(self.resources) - (self.devices - 1 - device) * each - 1 if self.overlap else device

    def seconds(self, instruction: SpmdInstruction, sent: Communication, members: Sequence[int]) -> float:
        """Return the time that a collective takes in one group."""
        if self.topology is None:
            return instruction.seconds
        return sent.runs * self.topology.collective_seconds(sent.kind, members, sent.nbytes, sent.merged, sent.turned)

    def speed(self, device: int) -> float:
        return 1.0 if self.topology is None else self.topology.speeds[device]


def expand(program: SpmdProgram, target: Target) -> tuple[TaskGraph, Mapping[int, str]]:
    """Return the task graph of a program, and every task's label."""
    tasks: dict[int, TimedTask] = {}
    labels: dict[int, str] = {}
    ends: dict[int, list[Names]] = {}  # by instruction: for each device, the tasks that end it
    for instruction in program.instructions:
        before = [union(ends[b][d] for b in instruction.before) for d in range(target.devices)]
        expanded, ends[instruction.name] = _tasks(instruction, before, target)
        tasks |= expanded
        labels.update(dict.fromkeys(expanded, instruction.label))
    return TaskGraph(tasks, target.resources), labels


Expanded = tuple[dict[int, TimedTask], list[Names]]


def _tasks(instruction: SpmdInstruction, before: list[Names], target: Target) -> Expanded:
    """Return the tasks of an instruction, and for each device the tasks that end it there."""
    action, base = instruction.action, instruction.name * PARTS
    if isinstance(action, Communication):
        return _collective(instruction, action, before, target)
    if isinstance(action, ProgramLoop):
        return _loop(instruction, action, before, target)
    names = [base * MEMBERS + d for d in range(target.devices)]
    if isinstance(action, HostTransfer):
        sent = {n: TimedTask(target.host_link(d), instruction.seconds, before[d], action.nbytes) for d, n in enumerate(names)}
        return sent, [(n,) for n in names]
    return (
        {n: TimedTask(d, instruction.seconds / target.speed(d), before[d]) for d, n in enumerate(names)},
        [(n,) for n in names],
    )


def _collective(instruction: SpmdInstruction, sent: Communication, before: list[Names], target: Target) -> Expanded:
    base = instruction.name * PARTS
    size = prod(target.machine.axes[a].size for a in sent.axes)
    each = sent.runs * bytes_sent(sent.kind, size, sent.nbytes)
    tasks: dict[int, TimedTask] = {}
    ends: list[Names] = [()] * target.devices
    for g, members in enumerate(target.groups(sent.axes)):
        barrier = (base + BARRIER) * MEMBERS + g
        tasks[barrier] = TimedTask(target.barrier, 0.0, union(before[m] for m in members))
        seconds = target.seconds(instruction, sent, members)
        for m, link in zip(members, target.links(sent.axes, members), strict=True):
            name = base * MEMBERS + m
            tasks[name] = TimedTask(link, seconds, (barrier,), each)
            ends[m] = (name,)
    return tasks, ends


def _loop(instruction: SpmdInstruction, loop: ProgramLoop, before: list[Names], target: Target) -> Expanded:
    base, every = instruction.name * PARTS, range(target.devices)
    step = full(expand(loop.program, target)[0])
    tasks: dict[int, TimedTask] = {}
    spans = [step.busy[d] for d in every]
    if loop.program.has(Communication, HostTransfer):  # its steps keep the devices in lockstep
        barrier = (base + BARRIER) * MEMBERS
        tasks[barrier] = TimedTask(target.barrier, 0.0, union(before))
        before, spans = [(barrier,)] * target.devices, [step.makespan] * target.devices
    names = [base * MEMBERS + d for d in every]
    tasks |= {n: TimedTask(d, loop.length * spans[d], before[d], loop.length * step.nbytes[d]) for d, n in enumerate(names)}
    links = {(base + LINK) * MEMBERS + k: k for k, r in enumerate(target.resources) if r.kind == "link" and step.order[k]}
    tasks |= {n: TimedTask(k, loop.length * step.busy[k], before[0], loop.length * step.nbytes[k]) for n, k in links.items()}
    return tasks, [(n, *links) for n in names]


def moments_on(timeline: Timeline, device: int) -> Mapping[int, tuple[float, float]]:
    """Return when each instruction of an expanded program runs on a device: start and end, by the instruction's name."""
    moments: dict[int, tuple[float, float]] = {}
    for name, start in timeline.start.items():
        part, member = divmod(name, MEMBERS)
        instruction, part = divmod(part, PARTS)
        if (part == MAIN and member == device) or part == LINK:
            first, last = moments.get(instruction, (start, timeline.end[name]))
            moments[instruction] = (min(first, start), max(last, timeline.end[name]))
    return moments
