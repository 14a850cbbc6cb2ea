"""Machines: a kind of device, levels of network, and the mesh that they span, of prime axes or of the user's."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from unity.base.atomic_files import write
from unity.base.documents import MACHINE, Misfit, at, document_kind, parsed, plain, refuse_unknown, typed
from unity.base.errors import PlanFileError
from unity.machine.hardware import Curve, Device, HostLink, Level, MachineError, Protocol, check_count
from unity.machine.mesh import check_mesh, extents_of
from unity.machine.presets import CLUSTERS, DEVICES, KINDS, LINKS, USUAL_LINKS, Link
from unity.machine.profiles.profile import Profile
from unity.pcg.types.axis import Axis

__all__ = ["SCHEMA", "Curve", "Device", "HostLink", "Level", "Machine", "MachineError", "Protocol", "device_name"]

T = TypeVar("T")

CPU = "cpu"  # the name of a device whose memory is its host's
SCHEMA = 1  # of the JSON that `save` writes; raised whenever a field changes its meaning


@dataclass(frozen=True)
class Machine:
    """Devices of one kind, joined by levels of network, outermost (slowest) first.

    Args:
        name: what reports call it.
        device: every device; there are `devices` of them.
        levels: outermost first; the last one joins devices.
        profile: measured times of operators on such devices; without one, the roofline predicts them.
        reduce_in: the narrow type whose partial sums are added in that type (`unity.optimize`).
        mesh: the names and sizes of the user's mesh axes, outermost first, in place of prime ones (`with_mesh`).
        host: the link between each device and its host's memory. Without one, values that a checkpoint policy offloads are
            priced as if they stayed on the device.

    Raises:
        MachineError: the machine has no level, or two levels of one name; levels have no protocol in common; the mesh does not fit
            the levels; or a CPU has a link to its host.
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    profile: Profile | None = field(default=None, repr=False)
    reduce_in: str = ""
    mesh: tuple[tuple[str, int], ...] = ()
    host: HostLink | None = None

    def __post_init__(self) -> None:
        if not self.levels:
            raise MachineError(f"machine {self.name!r}: levels is empty; one device alone is one level of size 1")
        for name, times in Counter(level.name for level in self.levels).items():
            if times > 1:
                raise MachineError(f"machine {self.name!r}: {times} levels are named {name!r}; rename all but one")
        protocols = [{protocol.name for protocol in level.protocols} for level in self.levels if level.protocols and level.size > 1]
        if protocols and not set.intersection(*protocols):
            raise MachineError(f"machine {self.name!r}: no protocol is on all levels that have protocols; a group uses one on all")
        if self.mesh:
            check_mesh(self.name, self.levels, self.mesh)
        if self.host is not None and self.device.name == CPU:
            raise MachineError(f"machine {self.name!r}: a {CPU} is its own host, so its devices have no link to one: omit host")

    @property
    def devices(self) -> int:
        """The number of devices."""
        return prod(level.size for level in self.levels)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The mesh axes of more than one device: by default the prime factors of each level's size, largest first, levels outermost
        first.

        An axis is named by the first letter of its level's name and a number: 32 nodes of 6 devices are n0 to n4 of
        size 2, d0 of size 3 and d1 of size 2. Levels with the same first letter share the count.
        """
        if self.mesh:
            extents = extents_of([size for _, size in self.mesh], [level.size for level in self.levels]) or []
            named_extents = zip(self.mesh, extents, strict=True)
            return tuple(Axis(n, size, at[0][0], self.reduce_in, at[1:]) for (n, size), at in named_extents if size > 1)
        axes: list[Axis] = []
        named: Counter[str] = Counter()
        for index, level in enumerate(self.levels):
            letter = level.name[0]
            for size in _primes(level.size):
                axes.append(Axis(f"{letter}{named[letter]}", size, index, self.reduce_in))
                named[letter] += 1
        return tuple(axes)

    @property
    def mesh_shape(self) -> dict[str, int]:
        """The names and sizes of all mesh axes, outermost first; one device has one axis of size 1."""
        return dict(self.mesh) or {axis.name: axis.size for axis in self.axes} or {"d0": 1}

    @property
    def named_levels(self) -> tuple[str, ...]:
        """The names of the levels, which users see in place of axes of prime size; empty with a mesh of the user's."""
        return () if self.mesh else tuple(level.name for level in self.levels)

    def with_mesh(self, shape: Mapping[str, int]) -> Machine:
        """Return this machine with the user's mesh axes, which plans do not divide, in place of prime ones.

        Devices are counted as in a mesh, the last axis fastest: those of a node follow each other. An axis may be a level, several,
        or a part of one.

        Args:
            shape: the names and sizes of the axes, outermost first.

        Raises:
            MachineError: the sizes do not multiply to the number of devices, an axis cuts the units of a level unevenly, or a name
                cannot be written in a plan.
        """
        return replace(self, mesh=tuple(shape.items()))

    def has_mesh(self, shape: Mapping[str, int]) -> bool:
        """Return whether plans for this machine use the axes of a mesh of this shape, as after `with_mesh(shape)`."""
        return self.mesh == tuple(shape.items())

    def with_memory(self, nbytes: int) -> Machine:
        """Return this machine with `nbytes` bytes of memory on each device."""
        return replace(self, device=replace(self.device, memory=nbytes))

    @property
    def alone(self) -> Machine:
        """A machine of one of these devices."""
        levels = tuple(replace(level, size=1) for level in self.levels)
        return replace(self, name=f"one device of {self.name}", levels=levels, mesh=())

    def with_profile(self, profile: Profile | None) -> Machine:
        """Return this machine with measured times of operators.

        Raises:
            MachineError: the profile is of another kind of device, or of another number of virtual devices, which share a
                host's cores.
        """
        if profile is None:
            return replace(self, profile=None)
        where, own = profile.where, f"machine {self.name!r} has {self.devices} x {self.device.name}"
        if device_name(where.kind) != self.device.name:
            raise MachineError(f"the profile was measured on {where}, {own}: measure there, with `unity profile`")
        if where.kind not in KINDS and where.devices != self.devices:
            raise MachineError(
                f"the profile was measured on {where}, {own}: such devices share a host, and take another time when there are "
                "more of them: measure as many, with `unity profile`"
            )
        return replace(self, profile=profile)

    @classmethod
    def grid(
        cls,
        nodes: int = 1,
        devices_per_node: int = 8,
        device: str | Device = "v100",
        intra: str | Level | tuple[float, float] | None = None,
        inter: str | Level | tuple[float, float] | None = None,
        memory: int | None = None,
        cards_per_node: int | None = None,
        host: str | HostLink | tuple[float, float] | None = None,
    ) -> Machine:
        """Build a machine of equal nodes: two levels, "node" and "device".

        Args:
            nodes: how many nodes.
            devices_per_node: devices in each.
            device: a preset's name (`unity.machine.presets.DEVICES`), or a Device.
            intra: the link inside a node. A preset's name (`presets.LINKS`): every device has one such port, and collectives
                its protocols. A Level, or a pair, which has none: (bytes/s per device in one direction, seconds per message).
                Default: the device's usual.
            inter: the link between nodes. A preset's name: network cards of that kind, which the node's devices share
                (`Level.bandwidth`). A Level or a pair is taken as it is: per device. Default: the device's usual.
            memory: bytes per device, if other than the device's own.
            cards_per_node: network cards per node, for an `inter` given by name. Default: the device's usual: one per
                device for A100 and newer, one per node for older devices and for a Device of your own.
            host: the link between each device and its host's memory: a preset's name, one such port for each device, or a
                HostLink or a pair like `intra`. Default: the device's usual; none for a Device of your own.

        Raises:
            MachineError: a name is not known, a figure is not positive, or no link is usual for the device.
        """
        check_count("nodes", nodes, "nodes")
        check_count("devices_per_node", devices_per_node, "devices")
        chosen = device if isinstance(device, Device) else _known("device", device, DEVICES)
        usual = USUAL_LINKS.get(chosen.name)
        if usual is None and (intra is None or inter is None):
            raise MachineError(
                f"no link is usual for device {chosen.name!r}: give intra= and inter=, each one of "
                f"{', '.join(sorted(LINKS))}, or (bytes/s per device, seconds per message)"
            )
        if cards_per_node is None:
            cards_per_node = devices_per_node if usual and usual.card_per_device else 1
        check_count("cards_per_node", cards_per_node, "network cards")
        inner = _level("device", devices_per_node, intra if intra is not None or usual is None else usual.intra, 1.0)
        share = cards_per_node / devices_per_node
        outer = _level("node", nodes, inter if inter is not None or usual is None else usual.inter, share)
        link = _host(host if host is not None or usual is None else usual.host)
        machine = cls(f"{chosen.name}-{nodes}x{devices_per_node}", chosen, (outer, inner), host=link)
        return machine if memory is None else machine.with_memory(memory)

    @classmethod
    def preset(cls, name: str) -> Machine:
        """Return a known cluster: "summit-32x6", "flexflow-p100", "dgx-h100", "dgx-h100-4x8".

        The name is one of `unity.machine.presets.CLUSTERS`, which has a usual number of nodes, and may end in another:
        "-<nodes>x<devices per node>".

        Raises:
            MachineError: no cluster has that name, or its nodes have another number of devices.
        """
        base, nodes, per_node = name, None, None
        if counted := re.fullmatch(r"(.+)-([1-9]\d*)x([1-9]\d*)", name):
            base, nodes, per_node = counted[1], int(counted[2]), int(counted[3])
        if base not in CLUSTERS and base in DEVICES:
            raise MachineError(
                f"machine {name!r}: {base!r} is a kind of device; unity.Machine.grid({nodes or 1}, {per_node or 8}, {base!r}) is a"
                " machine of these"
            )
        cluster = _known("machine", base, CLUSTERS)
        inside = prod(level.size for level in cluster.inside)
        if per_node not in (None, inside):
            raise MachineError(f"machine {name!r}: its nodes have {inside} devices, not {per_node}; use Machine.grid")
        between = replace(cluster.between, size=nodes or cluster.nodes)
        host = _host(USUAL_LINKS[cluster.device].host) if cluster.host is None else _host(cluster.host)
        return cls(f"{base}-{between.size}x{inside}", DEVICES[cluster.device], (between, *cluster.inside), host=host)

    @classmethod
    def local(cls, devices: Sequence[Any] | None = None) -> Machine:
        """Describe the devices that this process sees: known GPUs by their presets, others by measurements, which are cached on
        disk.

        Args:
            devices: the jax.Devices to describe, all of one kind. Default: `jax.devices()`.

        Raises:
            MachineError: see `unity.exec.measure.local_machine.describe`.
        """
        # Imported here because it imports this module, and because planning for another machine needs no devices.
        from unity.exec.measure.local_machine import describe

        return describe(devices)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the machine as JSON. The file is replaced as a whole, or not at all."""
        write(path, json.dumps(self.to_json(), indent=2) + "\n")

    def to_json(self) -> dict[str, Any]:
        """Return the machine as JSON data, measurements included."""
        data = {"schema": SCHEMA, **plain(replace(self, profile=None))}
        data["levels"] = [{k: v for k, v in level.items() if v != []} for level in data["levels"]]
        data |= {"profile": self.profile.to_json()} if self.profile is not None else {}
        return {k: v for k, v in data.items() if v not in (None, "", [])}

    @staticmethod
    def from_json(data: Any) -> Machine:
        """Read what `to_json` returned. Raises MachineError as `load` does."""
        try:
            if (kind := document_kind(data)) not in ("", MACHINE):
                raise MachineError(f"it is {kind}, not {MACHINE} (Machine.save and `unity machine` write machines)")
            fields = dict(typed(data, dict))
            if (schema := fields.pop("schema", None)) != SCHEMA:
                raise MachineError(f"schema is version {schema!r}, this release reads {SCHEMA}: write it again (Machine.save)")
            profile = fields.pop("profile", None)
            machine = typed(fields, Machine)
            refuse_unknown(machine, fields)
            with at(".profile"):
                return machine if profile is None else machine.with_profile(Profile.from_json(profile))
        except Misfit as fault:
            raise MachineError(f"${fault.place}: {fault.cause}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Machine:
        """Read a machine's file, written by `save`, or by hand with the fields of `Machine`, `Device` and `Level`.

        Raises:
            MachineError: the file is not JSON, has another schema version, lacks a field or has one that is not known, or has an
                impossible figure.
            OSError: the file cannot be read.
        """
        try:
            return Machine.from_json(parsed(Path(path).read_bytes()))
        except (PlanFileError, MachineError) as error:
            raise MachineError(f"{path}: {error}") from error

    def __str__(self) -> str:
        return self.described()

    def described(self, dtypes: Collection[str] = ()) -> str:
        """Return the machine in one line, with the peak of its device for the fastest of some types that it has, or of all."""
        levels = " > ".join(f"{level.size} {level.name} {level.bandwidth / 1e9:.4g} GB/s" for level in self.levels)
        flops = self.device.flops
        fastest = max([dtype for dtype in flops if dtype in dtypes] or flops, key=lambda dtype: flops[dtype])  # the first of equals
        return (
            f"{self.name}: {self.devices} x {self.device.name} ({self.device.memory / 2**30:.4g} GiB, "
            f"{flops[fastest] / 1e12:.4g} TFLOP/s {fastest}), {levels}"
            + (f", mesh {' × '.join(f'{name} of {size}' for name, size in self.mesh)}" if self.mesh else "")
        )


def device_name(kind: str) -> str:
    """Return the preset's name for a kind of device that JAX reports, or JAX's own name in lower case."""
    return KINDS.get(kind) or re.sub(r"\s+", "-", kind.lower())


def _known(what: str, name: str, table: Mapping[str, T]) -> T:
    if name not in table:
        raise MachineError(f"no {what} is named {name!r}; known are {', '.join(sorted(table))}")
    return table[name]


def _level(name: str, size: int, link: str | Level | tuple[float, float] | None, share: float) -> Level:
    """Build a level of a grid. `share`: each device's part of a link given by name; other links are per device already."""
    if isinstance(link, Level):
        return replace(link, name=name, size=size)
    if isinstance(link, tuple):
        return Level(name, size, *link)
    known = _known("link", link or "", LINKS)
    return Level(name, size, known.bandwidth * share, known.latency, protocols=known.protocols)


def _host(link: str | HostLink | Link | tuple[float, float] | None) -> HostLink | None:
    """Build the link to a host's memory, of which every device has one."""
    if link is None or isinstance(link, HostLink):
        return link
    if isinstance(link, tuple):
        return HostLink(*link)
    known = link if isinstance(link, Link) else _known("link", link, LINKS)
    return HostLink(known.bandwidth, known.latency)


def _primes(size: int) -> list[int]:
    """Return the prime factors, largest first."""
    factors, factor = [], 2
    while factor * factor <= size:
        while size % factor == 0:
            factors.append(factor)
            size //= factor
        factor += 1
    if size > 1:
        factors.append(size)
    return factors[::-1]
