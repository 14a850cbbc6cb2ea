"""A topology's devices and links as devices of a task graph, and what is sent over them as tasks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from unity.search.collectives import Linear
from unity.search.simulator.columns import Columns, Moments, Numbers, packed
from unity.search.simulator.exchange import ring_links, ring_tasks
from unity.search.simulator.tasks import Resource
from unity.search.simulator.ticks import in_ticks
from unity.search.simulator.topology import Topology, sending, sent


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
    def between(self) -> Numbers:
        """The link from each device to each."""
        return np.array(self.topology.between, np.int64)

    @cached_property
    def _bandwidth(self) -> Moments:
        """By link: bytes/s."""
        return np.array([link.bandwidth for link in self.topology.links])

    @cached_property
    def _latency(self) -> Moments:
        """By link: seconds per message."""
        return np.array([link.latency for link in self.topology.links])

    def _wires(self, senders: Numbers, links: Numbers) -> Numbers:
        """The devices of the task graph that send over links."""
        return links + (self.barrier + 1) if self.overlap else senders

    def transfers(self, found: Numbers, itemsize: int) -> Columns:
        """What sends elements of so many bytes from devices to devices (`exchanged`)."""
        name, senders, links, elements, waits, after = found
        nbytes = np.multiply(elements, itemsize, dtype=np.float64)
        seconds = in_ticks(sending(self._latency[links], self._bandwidth[links], nbytes))
        return Columns(name, self._wires(senders, links), seconds, nbytes, waits, after)

    def all_reduces(
        self, waits: Numbers, before: Numbers, devices: Numbers, counts: Numbers, nbytes: list[float], barrier: int, first: int
    ) -> Columns:
        """Rings of devices: for each a task that waits, and one for each member. A single device sends nothing.

        Args:
            waits, before: for how many tasks each ring waits, and their names, ring after ring.
            devices, counts: of each ring, ring after ring, and how many these are.
            nbytes: of the buffer of each.
            barrier, first: the names of the first ring's first task, and of its first member's.
        """
        links, bandwidths, latencies = ring_links(devices, counts, self.between, self._bandwidth, self._latency)
        sizes = counts.tolist()
        figures = zip(sizes, bandwidths.tolist(), latencies.tolist(), nbytes, strict=True)
        seconds = in_ticks(np.array([self._ring(k, bandwidth, latency)(n) for k, bandwidth, latency, n in figures]))
        each = np.array([sent("all-reduce", k, n) for k, n in zip(sizes, nbytes, strict=True)])
        on = self._wires(devices, links)
        return packed(*ring_tasks(waits, before, on, counts, seconds, each, barrier, first, self.barrier))

    def _ring(self, size: int, bandwidth: float, latency: float) -> Linear:
        found = self._rings.get((size, bandwidth, latency))
        if found is None:
            found = self._rings[size, bandwidth, latency] = self.topology.ring_of("all-reduce", size, bandwidth, latency)
        return found

    @cached_property
    def _rings(self) -> dict[tuple[int, float, float], Linear]:
        """All-reduces by the size of their rings, and the figures of the slowest links."""
        return {}
