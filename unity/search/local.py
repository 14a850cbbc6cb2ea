"""The machine that this process sees: from the presets if its devices are known, else measured once and remembered."""

from __future__ import annotations

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

from unity.search.hardware import Device, Level, MachineError
from unity.search.machine import Machine, device_name
from unity.search.presets import DEVICES, KINDS
from unity.search.profiles.profile import Where
from unity.search.profiles.store import ProfileError, Store

WAY = 3  # of measuring: another number for another one, so that what was measured otherwise is not believed
JaxDevice: TypeAlias = Any  # jax.Device, which is no type to a type checker: jaxlib has no stubs


def describe(devices: Sequence[JaxDevice] | None = None) -> Machine:
    """Describes `devices` (default: `jax.devices()`). A mesh takes them in this order: a node's devices stand together.

    Known GPUs come from the presets, their nodes joined as is usual for them; in a single process their memory is what
    JAX was given of it. Other devices, virtual CPU devices among them, are measured together. That takes about half a
    minute, once: it is remembered as JSON in the user's cache directory, by kind, number, JAX version and number of cores.

    Where operators were measured on these devices (`unity profile`), the machine carries what was measured.

    Raises:
        MachineError: there are no devices, or several kinds; nodes have different numbers of devices; or the devices
            are not known and belong to several processes, which would each measure something else, and then plan
            differently.
    """
    found = list(jax.devices() if devices is None else devices)
    kinds = sorted({device.device_kind for device in found})
    if len(kinds) != 1:
        raise MachineError(f"a machine has devices of one kind, got {', '.join(kinds) or 'none'}: pass devices= of one kind")
    if kinds[0] in KINDS:
        return _profiled(_known(found, DEVICES[KINDS[kinds[0]]]), found)
    if {device.process_index for device in found} != {jax.process_index()}:
        raise MachineError(
            f"{kinds[0]} is no known kind of device, and several processes cannot measure it alike: describe one node "
            "with Machine.local() in a process of its own, add the level between nodes, and Machine.load that in all"
        )
    return _profiled(_remembered(found), found)


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
        warnings.warn(f"{error}; planning without measured operators", stacklevel=4)
        return machine


def _known(devices: list[JaxDevice], device: Device) -> Machine:
    # On GPUs a slice is a host, however many processes run there.
    nodes = Counter(getattr(found, "slice_index", found.process_index) for found in devices)
    if len(set(nodes.values())) != 1:
        numbers = ", ".join(map(str, sorted(nodes.values())))
        raise MachineError(f"nodes have different numbers of devices ({numbers}): pass devices= without the odd ones")
    machine = replace(Machine.grid(len(nodes), len(devices) // len(nodes), device), name="local")
    if {found.process_index for found in devices} != {jax.process_index()}:
        # A process sees only its own devices' limits, and all must plan for the same machine: the preset's figure
        # stays.
        return machine
    limits = [stats["bytes_limit"] for found in devices if (stats := found.memory_stats()) and "bytes_limit" in stats]
    return machine.with_memory(min(limits)) if limits else machine


def _remembered(devices: list[JaxDevice]) -> Machine:
    path = _path(devices)
    if path.exists():
        try:
            return Machine.load(path)
        except MachineError as error:
            aside = path.with_name(path.name + ".corrupt")
            os.replace(path, aside)
            warnings.warn(f"{error}; set aside as {aside}, measuring this machine again", stacklevel=4)
    machine = _measured(devices)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        machine.save(path)
    except OSError as error:
        warnings.warn(f"{path}: the measured machine cannot be kept ({error}); every process will measure", stacklevel=4)
    return machine


def _path(devices: list[JaxDevice]) -> Path:
    at = where(devices)
    key = f"{at.kind}-{at.devices}-jax-{at.jax}-cores-{at.cores}-way-{WAY}"
    return platformdirs.user_cache_path("unity") / "machines" / (re.sub(r"[^\w.-]+", "_", key) + ".json")


def _measured(devices: list[JaxDevice]) -> Machine:
    # Imported only where something is measured: planning for another machine does not need the part that runs programs.
    from unity.exec.measure import measure

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
    limits = [stats["bytes_limit"] for device in devices if (stats := device.memory_stats()) and "bytes_limit" in stats]
    if limits:
        return min(limits)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)


def _cores() -> int:
    """The cores that this process may use, where the system says; else all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
