"""A topology's devices and links as devices of a task graph, and what is sent over them as tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from unity.search.simulator.tasks import Resource, Task
from unity.search.simulator.ticks import in_ticks
from unity.search.simulator.topology import Topology, sent


@dataclass(frozen=True)
class Wiring:
    """`overlap`: whether devices communicate while they compute; if not, sending takes the sender's own time."""

    topology: Topology
    overlap: bool = True

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """The devices, the barriers' own, and the links."""
        devices = (Resource(f"device {i}", "compute") for i in range(self.topology.devices))
        links = self.topology.links if self.overlap else ()
        return (*devices, Resource("barriers", "barrier"), *(Resource(link.name, "link") for link in links))

    @cached_property
    def barrier(self) -> int:
        """The barriers' device."""
        return self.topology.devices

    def wire(self, i: int, j: int) -> int:
        """The device of the task graph that sends from device i to device j."""
        return self.topology.devices + 1 + self.topology.between[i][j] if self.overlap else i

    def ring(self, members: Sequence[int]) -> list[int]:
        """The devices of the task graph by which each member of a ring sends to the next."""
        return [self.wire(i, j) for i, j in zip(members, [*members[1:], *members[:1]], strict=True)]

    def transfer(self, i: int, j: int, nbytes: float, before: tuple[int, ...]) -> Task:
        """Sends from device i to device j."""
        link = self.topology.between[i][j]
        seconds = self._seconds.get((link, nbytes))
        if seconds is None:
            seconds = self._seconds[link, nbytes] = in_ticks(self.topology.links[link].seconds(nbytes))
        return Task(self.barrier + 1 + link if self.overlap else i, seconds, before, nbytes)

    @cached_property
    def _seconds(self) -> dict[tuple[int, float], float]:
        """Of so many bytes over a link, as soon as they are sent."""
        return {}

    def all_reduce(self, barrier: int, first: int, before: Iterable[int], members: Sequence[int], nbytes: float) -> dict[int, Task]:
        """A ring of devices: a task named `barrier`, and one for each member, from `first` on. A single device sends nothing."""
        tasks = {barrier: Task(self.barrier, 0.0, tuple(dict.fromkeys(before)))}
        if len(members) > 1:
            seconds = in_ticks(self.topology.collective_seconds("all-reduce", members, nbytes))
            each = sent("all-reduce", len(members), nbytes)
            tasks |= {first + k: Task(link, seconds, (barrier,), each) for k, link in enumerate(self.ring(members))}
        return tasks
