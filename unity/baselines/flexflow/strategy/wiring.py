"""The devices and links of a topology as resources of a task graph, and the times of the tasks on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np

from unity.base.compiled_loops import compiled
from unity.baselines.flexflow.delta.columns import Moments, Numbers, in_ticks
from unity.baselines.flexflow.strategy.encoding import NBYTES, RING, SECONDS, TASK, TaskBuffers
from unity.search.simulator.tasks import Resource
from unity.search.simulator.topology import Topology, bytes_sent, sending

OWN = -1  # in place of the first link: sending takes the sender's own time


class Wires(NamedTuple):
    """Arrays that describe how devices are connected.

    Args:
        between: the number of the link from each device to each other.
        bandwidth: bytes/s of each link.
        latency: seconds per message of each link.
        barrier: the resource on which barriers run.
        first: the resource that is the first link, or OWN.
    """

    between: Numbers
    bandwidth: Moments
    latency: Moments
    barrier: int
    first: int


@dataclass(frozen=True)
class Wiring:
    """A topology's devices and links as resources. Without `overlap`, sending takes the sender's own time."""

    topology: Topology
    overlap: bool = True

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """The devices, one resource for all barriers, and the links."""
        devices = (Resource(f"device {i}", "compute") for i in range(self.topology.devices))
        links = self.topology.links if self.overlap else ()
        return (*devices, Resource("barriers", "barrier"), *(Resource(link.name, "link") for link in links))

    @cached_property
    def barrier(self) -> int:
        """The resource on which barriers run."""
        return self.topology.devices

    def wire(self, i: int, j: int) -> int:
        """Return the resource that sends from device i to device j."""
        return self.topology.devices + 1 + self.topology.between[i][j] if self.overlap else i

    @cached_property
    def wires(self) -> Wires:
        """The connections as arrays."""
        bandwidth, latency = (np.array([getattr(link, of) for link in self.topology.links]) for of in ("bandwidth", "latency"))
        first = self.barrier + 1 if self.overlap else OWN
        return Wires(np.array(self.topology.between, np.int64), bandwidth, latency, self.barrier, first)

    @cached_property
    def _speeds(self) -> Moments:
        """The speed of each device."""
        return np.array(self.topology.speeds)

    def time(self, buffers: TaskBuffers, ringed: int, sent: int, compute_seconds: Moments) -> None:
        """Write the seconds and bytes of tasks into their records.

        Args:
            buffers: the tasks: first those of rings, then transfers, then computations.
            ringed: how many tasks belong to rings.
            sent: how many tasks belong to rings or are transfers.
            compute_seconds: seconds of each computation on a device of speed 1.
        """
        each, sends = self._rings_of(buffers.rings[: buffers.used[2]])
        wires, moments = self.wires, buffers.records.view(np.float64)
        _write_times(
            moments,
            buffers.tasks[: buffers.used[1]],
            ringed,
            sent,
            each,
            sends,
            compute_seconds,
            self._speeds,
            wires.latency,
            wires.bandwidth,
        )

    def _rings_of(self, rings: Numbers) -> tuple[Moments, Moments]:
        """Return seconds and bytes of each member of the rings, and at the end those of a barrier (BARRIER)."""
        cache, members = self._rings, []
        for figures in zip(*[iter(rings.tolist())] * RING, strict=True):
            each = cache.get(figures)
            if each is None:
                each = cache[figures] = self._ring(*figures)
            members.append(each)
        seconds, nbytes = np.array([*members, (0.0, 0.0)]).T
        return seconds, nbytes

    def _ring(self, size: int, bits: int, slow: int, late: int) -> tuple[float, float]:
        """Return seconds and bytes of each member of an all-reduce, from a ring's entry in `TaskBuffers`."""
        links, nbytes = self.topology.links, float(np.int64(bits).view(np.float64))
        line = self.topology.ring_of("all-reduce", size, links[slow].bandwidth, links[late].latency)
        return line(nbytes), bytes_sent("all-reduce", size, nbytes)

    @cached_property
    def _rings(self) -> dict[tuple[int, ...], tuple[float, float]]:
        """Seconds and bytes of every ring met so far."""
        return {}


@partial(compiled, parts=(sending, in_ticks))
def _write_times(
    moments: Moments,
    tasks: Numbers,
    ringed: int,
    sent: int,
    each: Moments,
    sends: Moments,
    compute_seconds: Moments,
    speeds: Moments,
    latency: Moments,
    bandwidth: Moments,
) -> None:
    """Write seconds and bytes into records, given as `moments`. `each` and `sends` are those of the rings' members."""
    for k in range(len(tasks) // TASK):
        offset, index, amount = tasks[TASK * k], tasks[TASK * k + 1], tasks[TASK * k + 2]
        seconds, nbytes = 0.0, 0.0
        if k < ringed:
            seconds, nbytes = each[index], sends[index]
        elif k < sent:
            nbytes = float(amount)
            seconds = sending(float(latency[index]), float(bandwidth[index]), nbytes)
        else:
            seconds = compute_seconds[index] / speeds[amount]
        moments[offset + SECONDS], moments[offset + NBYTES] = in_ticks(float(seconds)), nbytes
