"""The machine that this process sees: from the presets if its devices are known, else measured once and remembered."""

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

from unity.base.processes import check_alike, check_devices, exchanged, from_first
from unity.exec.hosts.arrangement import by_host, host_of
from unity.machine.hardware import Device, Level, MachineError
from unity.machine.machine import Machine, device_name
from unity.machine.presets import DEVICES, KINDS
from unity.machine.profiles.profile import Where
from unity.machine.profiles.store import ProfileError, Store

WAY = 3  # of measuring: another number for another one, so that what was measured otherwise is not believed
JaxDevice: TypeAlias = Any  # jax.Device, which is no type to a type checker: jaxlib has no stubs


def describe(devices: Sequence[JaxDevice] | None = None) -> Machine:
    """Describes `devices` (default: `jax.devices()`). A mesh takes them in this order: a node's devices stand together.

    Known GPUs come from the presets, their nodes joined as is usual for them; in a single process their memory is what
    JAX was given of it. Other devices, virtual CPU devices among them, are measured together. That takes about half a
    minute, once: it is remembered as JSON in the user's cache directory, by kind, number, JAX version and number of cores.

    Where operators were measured on these devices (`unity profile`), the machine carries what was measured.

    Where several processes run one program, all of them call this, and all get what the first one has or measures: every process
    measures its own host, and all together the links between them.

    Raises:
        MachineError: there are no devices, or several kinds; nodes have different numbers of devices; or the devices
            are not known and are some of those of several processes, or several processes' of one host.
        PlanError: the processes have different numbers of devices, or versions of JAX.
    """
    found = list(jax.devices() if devices is None else devices)
    kinds = sorted({device.device_kind for device in found})
    if len(kinds) != 1:
        raise MachineError(f"a machine has devices of one kind, got {', '.join(kinds) or 'none'}: pass devices= of one kind")
    processes = {device.process_index for device in found}
    if processes != {jax.process_index()} and len(found) == len(jax.devices()) and set(found) == set(jax.devices()):
        return _together(found)
    if kinds[0] in KINDS:
        return _profiled(_known(found, DEVICES[KINDS[kinds[0]]]), found)
    if processes != {jax.process_index()}:
        raise MachineError(
            f"{kinds[0]} is no known kind of device, and several processes measure all their devices together or none: leave"
            " devices= out, or describe one node with Machine.local(jax.local_devices()), add the level between nodes, and"
            " Machine.load that in all"
        )
    return _profiled(_remembered(found), found)


def _together(devices: list[JaxDevice]) -> Machine:
    """The machine that all processes of one program are, described in all of them at once: by the first one's figures.

    Known GPUs have what JAX was given of their memory in every process, and the first process's profile.
    """
    check_devices(devices)
    check_alike({})
    kind, first, path = devices[0].device_kind, jax.process_index() == 0, _path(devices)
    if kind in KINDS:
        machine = _known(devices, DEVICES[KINDS[kind]])
        limits = exchanged(str(_limit(jax.local_devices()) or machine.device.memory))
        machine = _profiled(machine.with_memory(min(map(int, limits))), jax.local_devices())
    else:
        machine = _recalled(path) if first else None
        if not from_first("" if machine is None else "recalled"):
            machine = _measured_together(devices)
            if first:
                _keep(path, machine)
    return Machine.from_json(json.loads(from_first("" if machine is None else json.dumps(machine.to_json()))))


def _measured_together(devices: list[JaxDevice]) -> Machine:
    """Every process measures its own host, all at the same time; then all measure what joins them."""
    from unity.exec.measure.machine import between  # imported only where something is measured

    hosts = by_host(devices)
    if len(hosts) != jax.process_count():
        raise MachineError(
            f"{devices[0].device_kind} is no known kind of device, and several processes of one host cannot measure it: start one"
            f" process for each host, or describe it: Machine.grid(nodes={len(hosts)}, devices_per_node={len(hosts[0])}, ...)"
        )
    host = _measured(jax.local_devices())
    return replace(host, levels=(between(hosts), *host.levels))


def where(devices: Sequence[JaxDevice]) -> Where:
    """What measurements on `devices` hold for."""
    first = devices[0]
    platform = getattr(getattr(first, "client", None), "platform_version", "")
    return Where(first.device_kind, len(devices), _cores(), jax.__version__, platform.partition("\n")[0])


def _profiled(machine: Machine, devices: list[JaxDevice]) -> Machine:
    """The machine with what was measured of operators, if anything was. Several processes might have measured differently."""
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
    if {found.process_index for found in devices} != {jax.process_index()}:
        # A process sees only its own devices' limits, and all must plan for the same machine: the preset's figure
        # stays.
        return machine
    limit = _limit(devices)
    return machine if limit is None else machine.with_memory(limit)


def _limit(devices: list[JaxDevice]) -> int | None:
    """Bytes that JAX was given on each of this process's devices, where it says."""
    limits = [stats["bytes_limit"] for found in devices if (stats := found.memory_stats()) and "bytes_limit" in stats]
    return min(limits, default=None)


def _remembered(devices: list[JaxDevice]) -> Machine:
    path = _path(devices)
    known = _recalled(path)
    if known is not None:
        return known
    machine = _measured(devices)
    _keep(path, machine)
    return machine


def _recalled(path: Path) -> Machine | None:
    """What was measured before. A damaged file is set aside, where that may be."""
    if not os.path.exists(path):  # Path.exists raises where a folder on the way may not be looked into
        return None
    try:
        return Machine.load(path)
    except (MachineError, OSError) as error:
        reason = error.reason if isinstance(error, MachineError) else f"{path}: {error.strerror}"
        warnings.warn(f"{reason}; {_set_aside(path)}, measuring this machine again", stacklevel=5)
        return None


def _set_aside(path: Path) -> str:
    """Moves a damaged file away, and says so, or why it cannot be moved."""
    aside = path.with_name(path.name + ".corrupt")
    try:
        os.replace(path, aside)
    except OSError as error:
        return f"it cannot be set aside ({error.strerror})"
    return f"set aside as {aside}"


def _keep(path: Path, machine: Machine) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine.save(path)
    except OSError as error:
        warnings.warn(f"{path}: the measured machine cannot be kept ({error}); every process will measure", stacklevel=5)


def _path(devices: list[JaxDevice]) -> Path:
    at = where(devices)
    processes = len({device.process_index for device in devices})
    several = f"-processes-{processes}" if processes > 1 else ""
    key = f"{at.kind}-{at.devices}{several}-jax-{at.jax}-cores-{at.cores}-way-{WAY}"
    return platformdirs.user_cache_path("unity") / "machines" / (re.sub(r"[^\w.-]+", "_", key) + ".json")


def _measured(devices: list[JaxDevice]) -> Machine:
    # Imported only where something is measured: planning for another machine does not need the part that runs programs.
    from unity.exec.measure.machine import measure

    result = measure(devices)
    device = Device(
        name=device_name(devices[0].device_kind),
        flops=result.flops,
        memory=_memory(devices),
        bandwidth=result.bandwidth,
        efficiency=1.0,  # the FLOP/s are what was reached
        launch=result.launch,
    )
    # A device alone has no link: the level has size 1, and no collective ever uses its figures.
    link = result.link_bandwidth or result.bandwidth, result.link_latency or 0.0
    level = Level("device", len(devices), *link, result.relative, result.curves)
    return Machine("local", device, (level,))


def _memory(devices: list[JaxDevice]) -> int:
    """Bytes per device: what JAX says, or an equal share of the host's memory."""
    limit = _limit(devices)
    if limit is not None:
        return limit
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)


def _cores() -> int:
    """The cores that this process may use, where the system says; else all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
