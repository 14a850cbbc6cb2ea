"""A topology's devices and links as devices of a task graph, and what is sent over them as tasks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from unity.search.simulator.columns import Moments, Numbers
from unity.search.simulator.records import NBYTES, RING, SECONDS, TASK, Made, bits
from unity.search.simulator.tasks import Resource
from unity.search.simulator.ticks import in_ticks
from unity.search.simulator.topology import Topology, sending, sent

OWN = -1  # instead of a link's device: sending takes the sender's own time


class Wires(NamedTuple):
    """What joins devices.

    Args:
        between: the link from each device to each.
        bandwidth, latency: of links: bytes/s, and seconds per message.
        barrier: the barriers' device.
        first: the device of the task graph that is the first link, or OWN.
    """

    between: Numbers
    bandwidth: Moments
    latency: Moments
    barrier: int
    first: int


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

    @cached_property
    def wires(self) -> Wires:
        """The same by number."""
        bandwidth, latency = (np.array([getattr(link, of) for link in self.topology.links]) for of in ("bandwidth", "latency"))
        first = self.barrier + 1 if self.overlap else OWN
        return Wires(np.array(self.topology.between, np.int64), bandwidth, latency, self.barrier, first)

    @cached_property
    def _speeds(self) -> Moments:
        """By device."""
        return np.array(self.topology.speeds)

    def time(self, made: Made, ringed: int, sent: int, wholes: Moments) -> None:
        """Writes the seconds and bytes of tasks into their records.

        Args:
            made: the tasks.
            ringed, sent: how many of them are of rings, and of rings or transfers. The others compute.
            wholes: seconds of each of what computes, where the device has speed 1.
        """
        _, tasks, rings = made.used.tolist()
        at, what, amount = made.tasks[:tasks].reshape(-1, TASK).T
        seconds, nbytes = np.empty(len(at)), np.zeros(len(at))
        if ringed:
            each, sends = self._rings_of(made.rings[:rings])
            seconds[:ringed], nbytes[:ringed] = each[what[:ringed]], sends[what[:ringed]]
        if sent > ringed:
            link, nbytes[ringed:sent] = what[ringed:sent], amount[ringed:sent]
            seconds[ringed:sent] = sending(self.wires.latency[link], self.wires.bandwidth[link], nbytes[ringed:sent])
        seconds[sent:] = wholes[what[sent:]] / self._speeds[amount[sent:]]
        made.records[at + SECONDS], made.records[at + NBYTES] = bits(in_ticks(seconds)), bits(nbytes)

    def _rings_of(self, rings: Numbers) -> tuple[Moments, Moments]:
        """Seconds and bytes of each member of rings; and at the end those of a barrier (BARRIER)."""
        links = self.topology.links
        sizes, of_bytes, slowest, latest = np.ascontiguousarray(rings.reshape(-1, RING).T)
        found = zip(*map(np.ndarray.tolist, (sizes, of_bytes.view(np.float64), slowest, latest)), strict=True)
        each = [self._ring(size, n, links[slow].bandwidth, links[late].latency) for size, n, slow, late in found]
        seconds, nbytes = np.array([*each, (0.0, 0.0)]).T
        return seconds, nbytes

    def _ring(self, *figures: Any) -> tuple[float, float]:
        """Seconds and bytes of each member of an all-reduce: its members, its bytes, and the figures of its slowest links."""
        found = self._rings.get(figures)
        if found is None:
            size, nbytes, bandwidth, latency = figures
            seconds = self.topology.ring_of("all-reduce", size, bandwidth, latency)(nbytes)
            found = self._rings[figures] = (seconds, sent("all-reduce", size, nbytes))
        return found

    @cached_property
    def _rings(self) -> dict[tuple[Any, ...], tuple[float, float]]:
        """These, of all rings that there were."""
        return {}
