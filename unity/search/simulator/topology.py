"""Devices that may differ from each other, and the links between any two of them (FlexFlow, section 3: the device topology graph).

A `Machine` is uniform: its devices have one speed, and the link between two of them follows from the outermost level that separates
them. A topology lists devices and links one by one. Each direction between two devices is a separate link, unless several are
declared to share one. Its collectives are rings of any size of message: links have no protocols.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from unity.machine.collectives import Price, collective, most_merged
from unity.machine.hardware import Device, Level, MachineError, check_not_negative, check_positive
from unity.machine.machine import Machine


@dataclass(frozen=True)
class DirectedLink:
    """A link in one direction: bytes/s, and seconds per message.

    Raises:
        MachineError: a figure is missing, negative, or not finite.
    """

    name: str
    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        check_positive(f"link {self.name!r}: bandwidth", self.bandwidth, "bytes/s")
        check_not_negative(f"link {self.name!r}: latency", self.latency, "seconds")

    def seconds(self, nbytes: float) -> float:
        """Return the time that `nbytes` bytes take."""
        return sending(self.latency, self.bandwidth, nbytes)


@dataclass(frozen=True)
class Topology:
    """Devices and links.

    Args:
        name: the name for reports.
        machine: prices operators on a device of speed 1. Its network is not used.
        speeds: each device's speed, relative to that device.
        links: all links.
        between: `between[i][j]` is the number of the link from device i to device j; `between[i][i]` is not read.

    Raises:
        MachineError: the topology has no devices, a speed is not positive, or two devices have no link.
    """

    name: str
    machine: Machine
    speeds: tuple[float, ...]
    links: tuple[DirectedLink, ...]
    between: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        n = len(self.speeds)
        if not n:
            raise MachineError(f"topology {self.name!r}: there is no device")
        for i, speed in enumerate(self.speeds):
            check_positive(f"topology {self.name!r}: the speed of device {i}", speed, "times the device's")
        if [len(row) for row in self.between] != [n] * n:
            raise MachineError(f"topology {self.name!r}: between must have {n} rows of {n} links, as there are {n} devices")
        for i, row in enumerate(self.between):
            for j, link in enumerate(row):
                if i != j and not 0 <= link < len(self.links):
                    raise MachineError(f"topology {self.name!r}: no link from device {i} to device {j}")

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.speeds)

    @classmethod
    def joined(
        cls,
        name: str,
        machine: Machine,
        speeds: Sequence[float],
        links: Mapping[tuple[int, int], DirectedLink | tuple[float, float]],
    ) -> Topology:
        """Build a topology from its links.

        Args:
            name: the name for reports.
            machine: prices operators on a device of speed 1.
            speeds: each device's speed, relative to that device.
            links: for two devices (from, to) a link, shared by all pairs that are given the same one, or (bytes/s, seconds per
                message). A missing direction gets a separate link with the figures of the other.

        Raises:
            MachineError: a figure is impossible, two devices have no link, or a link belongs to a device that does not exist.
        """
        n = len(speeds)
        every, numbers = [], {}
        between = [[-1] * n for _ in range(n)]
        reverse = {(j, i): _figures(link) for (i, j), link in links.items() if (j, i) not in links}
        for (i, j), figures in [*links.items(), *reverse.items()]:
            if not (0 <= i < n and 0 <= j < n and i != j):
                raise MachineError(f"topology {name!r}: a link from device {i} to device {j}; there are {n} devices, from 0")
            link = figures if isinstance(figures, DirectedLink) else DirectedLink(f"{i} → {j}", *figures)
            if link not in numbers:
                numbers[link] = len(every)
                every.append(link)
            between[i][j] = numbers[link]
        return cls(name, machine, tuple(speeds), tuple(every), tuple(map(tuple, between)))

    @classmethod
    def uniform(cls, machine: Machine) -> Topology:
        """Build the topology of a machine: each device has a port on every level, and sends through that of the outermost level
        that separates it from the receiver.
        """
        levels, n = machine.levels, machine.devices
        inside = [prod(level.size for level in levels[k + 1 :]) for k in range(len(levels))]
        links = tuple(
            DirectedLink(f"device {i}, {level.name}s", level.bandwidth, level.latency) for i in range(n) for level in levels
        )
        parted = [
            tuple(i * len(levels) + next((k for k, m in enumerate(inside) if i // m != j // m), 0) for j in range(n))
            for i in range(n)
        ]
        return cls(machine.name, machine, (1.0,) * n, links, tuple(parted))

    def link(self, i: int, j: int) -> DirectedLink:
        """Return the link from one device to another."""
        return self.links[self.between[i][j]]

    def ring(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return the links from each member to the next, by number."""
        return tuple(self.between[i][j] for i, j in zip(members, [*members[1:], *members[:1]], strict=True))

    def collective_seconds(
        self, kind: str, members: Sequence[int], nbytes: float, merged: bool = False, turned: bool = False
    ) -> float:
        """Return the seconds of a collective among some devices: a ring that is as slow as its slowest link.

        `machine.collectives` defines a ring's cost, which bytes count, and what one that is merged with others takes.
        """
        if len(members) < 2:
            return 0.0
        links = [self.links[k] for k in self.ring(members)]
        price = self.ring_of(kind, len(members), min(x.bandwidth for x in links), max(x.latency for x in links), turned)
        return price.merged(nbytes, most_merged(self.machine)) if merged else price(nbytes)

    def ring_of(self, kind: str, size: int, bandwidth: float, latency: float, turned: bool = False) -> Price:
        """Return the cost, by bytes, of a collective among `size` devices whose slowest link has these figures."""
        return _ring(self.machine.device, kind, size, bandwidth, latency, turned)

    def has(self, devices: Collection[int]) -> bool:
        """Whether `devices` is not empty and all of them exist."""
        return bool(devices) and min(devices) >= 0 and max(devices) < self.devices

    def check_devices(self, devices: Collection[int], where: str) -> None:
        """Raise MachineError unless `devices` is not empty and all of them exist; `where` says for the message whose they are."""
        if self.has(devices):
            return
        strangers = sorted({d for d in devices if not 0 <= d < self.devices})
        if not devices or len(strangers) == len(set(devices)):
            raise MachineError(
                f"{where}: none of the devices {sorted(devices)} is one of {self.name!r}, which are 0 to {self.devices - 1}"
            )
        raise MachineError(f"{where}: {self.name!r} has no devices {strangers}; its devices are 0 to {self.devices - 1}")


@cache
def grid_groups(sizes: tuple[int, ...], over: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Group the numbers of a row-major grid of these sizes: the members of a group differ along the dimensions `over` alone.

    The grid is a mesh of devices, or the pieces of an operator.
    """
    rest = [k for k in range(len(sizes)) if k not in over]
    grid = np.arange(prod(sizes)).reshape(sizes).transpose(*rest, *over)
    return tuple(map(tuple, grid.reshape(-1, prod(sizes[k] for k in over)).tolist()))


@cache
def _ring(device: Device, kind: str, size: int, bandwidth: float, latency: float, turned: bool) -> Price:
    """Return the cost of a collective in a ring of `size` members: that on a machine of one level."""
    machine = Machine("ring", device, (Level("ring", size, bandwidth, latency),))
    return collective(machine, kind, machine.axes, turned)


def _figures(link: DirectedLink | tuple[float, float]) -> tuple[float, float]:
    return (link.bandwidth, link.latency) if isinstance(link, DirectedLink) else link


F = TypeVar("F", float, NDArray[np.float64])


def sending(latency: F, bandwidth: F, nbytes: F) -> F:
    """Return the seconds that bytes take over a link."""
    return latency + nbytes / bandwidth


def bytes_sent(kind: str, size: int, nbytes: float) -> float:
    """Return the bytes that each of `size` members of a ring sends in a collective with `nbytes` bytes on the full side."""
    return nbytes if kind == "collective-permute" else nbytes * (size - 1) / size * (2 if kind == "all-reduce" else 1)
