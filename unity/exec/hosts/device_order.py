"""The order of devices in a plan's mesh, in which the axes of the slow levels are those that cross hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, TypeAlias

from unity.base.errors import PlanError
from unity.machine.machine import Machine

JaxDevice: TypeAlias = Any  # jax.Device, which is no type to a type checker: jaxlib has no stubs


def host_of(device: JaxDevice) -> int:
    """Return the number of the host that a device is in.

    On GPUs that is JAX's slice, however many processes run there. On CPUs it is the process, as processes communicate by network.
    """
    slice_index = getattr(device, "slice_index", None)
    return device.process_index if slice_index is None or device.platform == "cpu" else slice_index


def by_host(devices: Sequence[JaxDevice]) -> list[list[JaxDevice]]:
    """Return the devices of each host, those of a process adjacent, otherwise in JAX's order."""
    hosts: dict[int, list[JaxDevice]] = {}
    for device in sorted(devices, key=lambda d: (host_of(d), d.process_index)):
        hosts.setdefault(host_of(device), []).append(device)
    return list(hosts.values())


def in_mesh_order(machine: Machine, devices: Sequence[JaxDevice]) -> list[JaxDevice]:
    """Return the devices of a machine's mesh, in order: levels are filled from the innermost, and whole hosts are units of a level.

    Raises:
        PlanError: a link that the machine has inside of a unit would cross hosts, or a process would have no device.
    """
    hosts = by_host(devices)
    if len(hosts) == 1:
        chosen = hosts[0][: machine.devices]
    else:
        inside = _inside(machine, hosts)
        chosen = [device for host in hosts for device in host[:inside]]
    idle = sorted({d.process_index for d in devices} - {d.process_index for d in chosen})
    if idle:
        raise PlanError(
            f"this plan is for {machine.devices} devices ({machine.name}), of {len(devices)} that there are: process"
            f"{'es' * (len(idle) > 1)} {', '.join(map(str, idle))} would have none of them.\n    Start fewer processes, or plan for"
            " all devices. (docs: hosts#machines)"
        )
    return chosen


def check_order(machine: Machine, devices: Iterable[JaxDevice]) -> None:
    """Raise PlanError unless devices, in the order of a mesh, follow each other by hosts as the levels of a machine do."""
    listed = list(devices)
    hosts = by_host(listed)
    if len(hosts) == 1:
        return
    inside = _inside(machine, hosts)
    for first in range(0, len(listed), inside):
        if len({host_of(device) for device in listed[first : first + inside]}) > 1:
            raise PlanError(
                f"the mesh has devices of several hosts among {first} to {first + inside - 1}, which are within a host in"
                f" {machine.name}.\n    Order its axes so that the devices of a host follow each other. (docs:"
                " moving#plan-for-a-mesh-of-your-own)"
            )


def _inside(machine: Machine, hosts: Sequence[Sequence[JaxDevice]]) -> int:
    """Return the number of devices of each host in the mesh: those inside of the levels that cross hosts."""
    sizes = [level.size for level in machine.levels]
    room = min(len(host) for host in hosts)
    # hosts with one device each may be processes of one host, so that any level may cross them
    for cut in range(1, len(sizes) + (room == 1)):
        if prod(sizes[:cut]) == len(hosts) and prod(sizes[cut:]) <= room:
            return prod(sizes[cut:])
    levels = " > ".join(f"{level.size} {level.name}" for level in machine.levels)
    raise PlanError(
        f"this plan is for {machine.name} ({levels}), but here are {len(hosts)} hosts with {room} devices each: links that the plan"
        " takes for those inside of a host would cross hosts, or the other way round.\n    Plan with"
        f" machine=unity.Machine.local(), or unity.Machine.grid(nodes={len(hosts)}, devices_per_node={room}, ...)."
        " (docs: hosts#machines)"
    )
