"""A topology's devices and links as devices of a task graph, and what is sent over them as tasks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from unity.base.compiled_loops import compiled
from unity.baselines.flexflow.delta.columns import Moments, Numbers, in_ticks
from unity.baselines.flexflow.strategy.records import NBYTES, RING, SECONDS, TASK, Made
from unity.search.simulator.tasks import Resource
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
        each, sends = self._rings_of(made.rings[: made.used[2]])
        wires, moments = self.wires, made.records.view(np.float64)
        _timed(moments, made.tasks[: made.used[1]], ringed, sent, each, sends, wholes, self._speeds, wires.latency, wires.bandwidth)

    def _rings_of(self, rings: Numbers) -> tuple[Moments, Moments]:
        """Seconds and bytes of each member of rings; and at the end those of a barrier (BARRIER)."""
        known, found = self._rings, []
        for figures in zip(*[iter(rings.tolist())] * RING, strict=True):
            each = known.get(figures)
            if each is None:
                each = known[figures] = self._ring(*figures)
            found.append(each)
        seconds, nbytes = np.array([*found, (0.0, 0.0)]).T
        return seconds, nbytes

    def _ring(self, size: int, bits: int, slow: int, late: int) -> tuple[float, float]:
        """Seconds and bytes of each member of an all-reduce, by its figures (`Made`)."""
        links, nbytes = self.topology.links, float(np.int64(bits).view(np.float64))
        line = self.topology.ring_of("all-reduce", size, links[slow].bandwidth, links[late].latency)
        return line(nbytes), sent("all-reduce", size, nbytes)

    @cached_property
    def _rings(self) -> dict[tuple[int, ...], tuple[float, float]]:
        """These, of all rings that there were."""
        return {}


@partial(compiled, parts=(sending, in_ticks))
def _timed(
    moments: Moments,
    tasks: Numbers,
    ringed: int,
    sent: int,
    each: Moments,
    sends: Moments,
    wholes: Moments,
    speeds: Moments,
    latency: Moments,
    bandwidth: Moments,
) -> None:
    """Writes seconds and bytes into records, `moments` by their bits. `each`, `sends`: of the rings."""
    for k in range(len(tasks) // TASK):
        at, what, amount = tasks[TASK * k], tasks[TASK * k + 1], tasks[TASK * k + 2]
        seconds, nbytes = 0.0, 0.0
        if k < ringed:
            seconds, nbytes = each[what], sends[what]
        elif k < sent:
            nbytes = float(amount)
            seconds = sending(float(latency[what]), float(bandwidth[what]), nbytes)
        else:
            seconds = wholes[what] / speeds[amount]
        moments[at + SECONDS], moments[at + NBYTES] = in_ticks(float(seconds)), nbytes
