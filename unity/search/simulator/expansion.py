"""From an SPMD program to a task graph: one task of every instruction for every device, or for one that stands for all.

A collective is one task for each member of a group, on that member's link of the outermost level that the group spans. All of a
group's tasks start together: they wait for a barrier, a task that takes no time, which waits for all members.

On a machine of equal devices all do the same at the same time. They are one class, and one of them is simulated ("folded"); the
other tasks would be copies. On a topology each device has its own speed, and a collective is a ring.

A loop's steps are simulated once. It then holds the device for as long as all steps take, and each link for as long as they use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from unity.machine.machine import Machine
from unity.search.simulator.program import Instruction, Loop, Program, Sent
from unity.search.simulator.tasks import Names, Resource, SimulationError, Task, TaskGraph, union
from unity.search.simulator.timeline import Timeline, full
from unity.search.simulator.topology import Topology, grid_groups, sent

PARTS, MEMBERS = 1 << 2, 1 << 22  # how task names are packed: instruction, part; device, group or link
MAIN, BARRIER, LINK = range(3)  # parts of an instruction; the last is a loop's on each link


@dataclass(frozen=True)
class Target:
    """What a program is simulated on.

    Args:
        machine: its formulas price collectives, unless there is a topology.
        topology: devices that are not alike; as many as the machine has.
        folded: one device stands for all.
        overlap: whether devices communicate while they compute.

    Raises:
        SimulationError: the topology has another number of devices, or is to be folded.
    """

    machine: Machine
    topology: Topology | None = None
    folded: bool = True
    overlap: bool = True

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
        """How many devices are simulated."""
        return 1 if self.folded else self.machine.devices

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """The devices, the barriers' own, and the links."""
        names = [f"each of {self.machine.devices} devices"] if self.folded else [f"device {i}" for i in range(self.devices)]
        found = [*(Resource(n, "compute") for n in names), Resource("barriers", "barrier")]
        if not self.overlap:
            return tuple(found)
        if self.topology is not None:
            return (*found, *(Resource(link.name, "link") for link in self.topology.links))
        return (*found, *(Resource(f"{n}, link to {level.name}s", "link") for n in names for level in self.machine.levels))

    @property
    def barrier(self) -> int:
        """The barriers' device."""
        return self.devices

    def groups(self, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The devices that a collective over mesh axes joins, group by group; folded: the one."""
        return ((0,),) if self.folded else grid_groups(tuple(a.size for a in self.machine.axes), axes)

    def links(self, axes: tuple[int, ...], members: Sequence[int]) -> Sequence[int]:
        """The device of the task graph by which each member sends."""
        if not self.overlap:
            return members
        first = self.devices + 1
        if self.topology is not None:
            return [first + k for k in self.topology.ring(members)]
        level = min(self.machine.axes[a].level for a in axes)
        return [first + m * len(self.machine.levels) + level for m in members]

    def seconds(self, instruction: Instruction, what: Sent, members: Sequence[int]) -> float:
        """How long a collective takes in one group."""
        if self.topology is None:
            return instruction.seconds
        return what.runs * self.topology.collective_seconds(what.kind, members, what.nbytes, what.merged, what.turned)

    def speed(self, device: int) -> float:
        return 1.0 if self.topology is None else self.topology.speeds[device]


def expand(program: Program, target: Target) -> tuple[TaskGraph, Mapping[int, str]]:
    """The task graph of a program, and every task's label."""
    tasks: dict[int, Task] = {}
    labels: dict[int, str] = {}
    ends: dict[int, list[Names]] = {}  # by instruction: for each device, what to wait for
    for instruction in program.instructions:
        before = [union(ends[b][d] for b in instruction.before) for d in range(target.devices)]
        found, ends[instruction.name] = _tasks(instruction, before, target)
        tasks |= found
        labels.update(dict.fromkeys(found, instruction.label))
    return TaskGraph(tasks, target.resources), labels


Expanded = tuple[dict[int, Task], list[Names]]


def _tasks(instruction: Instruction, before: list[Names], target: Target) -> Expanded:
    """One instruction's tasks, and for each device which of them end it there."""
    what, base = instruction.what, instruction.name * PARTS
    if isinstance(what, Sent):
        return _collective(instruction, what, before, target)
    if isinstance(what, Loop):
        return _loop(instruction, what, before, target)
    names = [base * MEMBERS + d for d in range(target.devices)]
    return (
        {n: Task(d, instruction.seconds / target.speed(d), before[d]) for d, n in enumerate(names)},
        [(n,) for n in names],
    )


def _collective(instruction: Instruction, what: Sent, before: list[Names], target: Target) -> Expanded:
    base = instruction.name * PARTS
    size = prod(target.machine.axes[a].size for a in what.axes)
    each = what.runs * sent(what.kind, size, what.nbytes)
    tasks: dict[int, Task] = {}
    ends: list[Names] = [()] * target.devices
    for g, members in enumerate(target.groups(what.axes)):
        barrier = (base + BARRIER) * MEMBERS + g
        tasks[barrier] = Task(target.barrier, 0.0, union(before[m] for m in members))
        seconds = target.seconds(instruction, what, members)
        for m, link in zip(members, target.links(what.axes, members), strict=True):
            name = base * MEMBERS + m
            tasks[name] = Task(link, seconds, (barrier,), each)
            ends[m] = (name,)
    return tasks, ends


def _loop(instruction: Instruction, what: Loop, before: list[Names], target: Target) -> Expanded:
    base, every = instruction.name * PARTS, range(target.devices)
    step = full(expand(what.program, target)[0])
    tasks: dict[int, Task] = {}
    spans = [step.busy[d] for d in every]
    if communicates(what.program):  # then its steps keep the devices together
        barrier = (base + BARRIER) * MEMBERS
        tasks[barrier] = Task(target.barrier, 0.0, union(before))
        before, spans = [(barrier,)] * target.devices, [step.makespan] * target.devices
    names = [base * MEMBERS + d for d in every]
    tasks |= {n: Task(d, what.length * spans[d], before[d], what.length * step.nbytes[d]) for d, n in enumerate(names)}
    links = {(base + LINK) * MEMBERS + k: k for k, r in enumerate(target.resources) if r.kind == "link" and step.order[k]}
    tasks |= {n: Task(k, what.length * step.busy[k], before[0], what.length * step.nbytes[k]) for n, k in links.items()}
    return tasks, [(n, *links) for n in names]


def moments_on(timeline: Timeline, device: int) -> Mapping[int, tuple[float, float]]:
    """When each instruction of an expanded program runs on a device: from when to when, by its name."""
    found: dict[int, tuple[float, float]] = {}
    for name, start in timeline.start.items():
        part, member = divmod(name, MEMBERS)
        instruction, part = divmod(part, PARTS)
        if (part == MAIN and member == device) or part == LINK:
            first, last = found.get(instruction, (start, timeline.end[name]))
            found[instruction] = (min(first, start), max(last, timeline.end[name]))
    return found


def communicates(program: Program) -> bool:
    """Whether any of its instructions, in loops too, is a collective."""
    found = (i.what for i in program.instructions)
    return any(isinstance(w, Sent) or (isinstance(w, Loop) and communicates(w.program)) for w in found)
