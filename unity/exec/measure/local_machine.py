"""Description of the machine that this process sees: a preset for known devices, else measured once and cached."""

from __future__ import annotations

import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import jax
import platformdirs

from unity.base.errors import file_fault
from unity.base.processes import check_alike, check_devices, exchanged, from_first
from unity.exec.hosts.device_order import by_host, host_of
from unity.exec.measure.machine import between, measure
from unity.machine.hardware import Device, Level, MachineError
from unity.machine.machine import Machine, device_name
from unity.machine.presets import DEVICES, KINDS
from unity.machine.profiles.profile import Where
from unity.machine.profiles.store import ProfileError, Store
from unity.pcg.jaxprs.trace_contexts import unset

METHOD_VERSION = 3  # of the measurement: a new number discards cached machines
JaxDevice: TypeAlias = Any  # jax.Device, which is no type to a type checker: jaxlib has no stubs


def describe(devices: Sequence[JaxDevice] | None = None) -> Machine:
    """Describe `devices` (default: `jax.devices()`), in the order of a mesh: devices of a node are adjacent.

    Known GPUs have presets, with the usual links between their nodes; in a single process their memory is the limit that JAX
    reports. Other devices, virtual CPU devices among them, are measured together. That takes about half a minute, once: the result
    is cached as JSON in the user's cache directory, by kind, number, JAX version and number of cores.

    If operators were measured on these devices (`unity profile`), the machine has their profile.

    If several processes run one program, all of them call this, and all get the first one's machine: every process measures its own
    host, and all together measure the links between hosts.

    Raises:
        MachineError: the list of devices is empty, or has several kinds; nodes have different numbers of devices; or devices
            without a preset are only some of those of several processes, or belong to several processes of one host.
        PlanError: the processes have different numbers of devices, or versions of JAX.
    """
    with unset():
        return _described(list(jax.devices() if devices is None else devices))


def is_unmeasured(devices: Sequence[JaxDevice]) -> bool:
    """Return whether `describe` would measure some devices now, in this process or, of several, in the first one."""
    return jax.process_index() == 0 and devices[0].device_kind not in KINDS and not os.path.exists(_path(list(devices)))


def _described(chosen: list[JaxDevice]) -> Machine:
    kinds = sorted({device.device_kind for device in chosen})
    if len(kinds) != 1:
        raise MachineError(f"a machine has devices of one kind, got {', '.join(kinds) or 'none'}: pass devices= of one kind")
    processes = {device.process_index for device in chosen}
    if processes != {jax.process_index()} and len(chosen) == len(jax.devices()) and set(chosen) == set(jax.devices()):
        return _of_all_processes(chosen)
    if kinds[0] in KINDS:
        return _profiled(_known(chosen, DEVICES[KINDS[kinds[0]]]), chosen)
    if processes != {jax.process_index()}:
        raise MachineError(
            f"{kinds[0]} is no known kind of device, and several processes measure all their devices together or none: leave"
            " devices= out, or describe one node with Machine.local(jax.local_devices()), add the level between nodes, and"
            " Machine.load that in all"
        )
    return _profiled(_load_or_measure(chosen), chosen)


def _of_all_processes(devices: list[JaxDevice]) -> Machine:
    """Return the machine that all processes of one program form, by the first process's figures.

    Known GPUs have the smallest memory limit of all processes, and the first process's profile.
    """
    check_devices(devices)
    check_alike({})
    kind, first, path = devices[0].device_kind, jax.process_index() == 0, _path(devices)
    if kind in KINDS:
        machine = _known(devices, DEVICES[KINDS[kind]])
        limits = exchanged(str(_limit(jax.local_devices()) or machine.device.memory))
        machine = _profiled(machine.with_memory(min(map(int, limits))), jax.local_devices())
    else:
        machine = _load(path) if first else None
        if not from_first("" if machine is None else "recalled"):
            machine = _measured_together(devices)
            if first:
                _save(path, machine)
    return Machine.from_json(json.loads(from_first("" if machine is None else json.dumps(machine.to_json()))))


def _measured_together(devices: list[JaxDevice]) -> Machine:
    """Measure every host by its own process, all at the same time, and then the links between hosts together."""
    hosts = by_host(devices)
    if len(hosts) != jax.process_count():
        raise MachineError(
            f"{devices[0].device_kind} is no known kind of device, and several processes of one host cannot measure it: start one"
            f" process for each host, or describe it: Machine.grid(nodes={len(hosts)}, devices_per_node={len(hosts[0])}, ...)"
        )
    host = _measured(jax.local_devices())
    return replace(host, levels=(between(hosts), *host.levels))


def where(devices: Sequence[JaxDevice]) -> Where:
    """Return the conditions that measurements on `devices` hold for."""
    first = devices[0]
    platform = getattr(getattr(first, "client", None), "platform_version", "")
    return Where(first.device_kind, len(devices), _cores(), jax.__version__, platform.partition("\n")[0])


def _profiled(machine: Machine, devices: list[JaxDevice]) -> Machine:
    """Add the profile of measured operators, if there is one. Several processes get none: their profiles might differ."""
    if {device.process_index for device in devices} != {jax.process_index()}:
        return machine
    try:
        return machine.with_profile(Store.usual().profile(where(devices)))
    except ProfileError as error:
        warnings.warn(f"{error.reason}; planning without measured operators", stacklevel=4)
        return machine


def _known(devices: list[JaxDevice], device: Device) -> Machine:
    nodes = Counter(map(host_of, devices))
    if len(set(nodes.values())) != 1:
        numbers = ", ".join(map(str, sorted(nodes.values())))
        raise MachineError(f"nodes have different numbers of devices ({numbers}): pass devices= without the odd ones")
    machine = replace(Machine.grid(len(nodes), len(devices) // len(nodes), device), name="local")
    if {member.process_index for member in devices} != {jax.process_index()}:
        # All processes must plan for the same machine, but a process sees only the limits of its own devices: keep the preset's.
        return machine
    limit = _limit(devices)
    return machine if limit is None else machine.with_memory(limit)


def _limit(devices: list[JaxDevice]) -> int | None:
    """Return the memory limit in bytes of this process's devices, if JAX reports one."""
    limits = [stats["bytes_limit"] for device in devices if (stats := device.memory_stats()) and "bytes_limit" in stats]
    return min(limits, default=None)


def _load_or_measure(devices: list[JaxDevice]) -> Machine:
    path = _path(devices)
    known = _load(path)
    if known is not None:
        return known
    machine = _measured(devices)
    _save(path, machine)
    return machine


def _load(path: Path) -> Machine | None:
    """Load a machine measured before. A damaged file is moved aside if that is permitted."""
    if not os.path.exists(path):  # Path.exists raises where a folder on the way may not be looked into
        return None
    try:
        return Machine.load(path)
    except (MachineError, OSError) as error:
        reason = error.reason if isinstance(error, MachineError) else f"{path}: {error.strerror}"
        warnings.warn(f"{reason}; {_set_aside(path)}, measuring this machine again", stacklevel=5)
        return None


def _set_aside(path: Path) -> str:
    """Move a damaged file aside. Return a phrase that tells where, or why it cannot be moved."""
    aside = path.with_name(path.name + ".corrupt")
    try:
        os.replace(path, aside)
    except OSError as error:
        return f"it cannot be set aside ({error.strerror})"
    return f"set aside as {aside}"


def _save(path: Path, machine: Machine) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine.save(path)
    except OSError as error:
        warnings.warn(
            f"{path}: the measured machine cannot be kept ({file_fault(error)}); every process will measure", stacklevel=5
        )


def _path(devices: list[JaxDevice]) -> Path:
    at = where(devices)
    processes = len({device.process_index for device in devices})
    several = f"-processes-{processes}" if processes > 1 else ""
    key = f"{at.kind}-{at.devices}{several}-jax-{at.jax}-cores-{at.cores}-way-{METHOD_VERSION}"
    return platformdirs.user_cache_path("unity") / "machines" / (re.sub(r"[^\w.-]+", "_", key) + ".json")


def _measured(devices: list[JaxDevice]) -> Machine:
    result = measure(devices)
    device = Device(
        name=device_name(devices[0].device_kind),
        flops=result.flops,
        memory=_memory(devices),
        bandwidth=result.bandwidth,
        efficiency=1.0,  # the FLOP/s were reached
        launch=result.launch,
    )
    # A single device has no link: its level has size 1, and no collective uses the figures.
    link = result.link_bandwidth or result.bandwidth, result.link_latency or 0.0
    level = Level("device", len(devices), *link, result.relative, result.curves)
    return Machine("local", device, (level,))


def _memory(devices: list[JaxDevice]) -> int:
    """Return the bytes per device: JAX's limit, or an equal share of the host's memory."""
    limit = _limit(devices)
    if limit is not None:
        return limit
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)


def _cores() -> int:
    """Return the number of cores that this process may use, if the system tells, else of all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
