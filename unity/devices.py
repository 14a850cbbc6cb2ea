"""The devices that a plan runs on: as many as it is for, and the same plan in all processes."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from unity.exec.hosts.arrange import arranged
from unity.exec.hosts.talk import check_alike, check_devices, several
from unity.exec.lowering import mesh_of
from unity.pcg.errors import PlanError
from unity.search.machine import Machine


def mesh_for(machine: Machine, facts: Callable[[], dict[str, str]]) -> Mesh:
    """This program's devices as a mesh of a machine's axes, whole hosts as units of its levels.

    `facts`: what must be the same in all processes, by what to call it if it is not; asked for where there are several.
    Raises PlanError if there are fewer devices than the machine has, or other hosts.
    """
    devices = jax.devices()
    if several():
        check_devices(devices)
        check_alike(facts())
    if len(devices) < machine.devices:
        raise PlanError(
            f"this plan is for {machine.devices} devices ({machine.name}), but JAX sees {len(devices)}"
            f" ({devices[0].platform}).\n    Run it where they are, plan with machine=unity.Machine.local(), or give a CPU more"
            f" virtual devices: XLA_FLAGS=--xla_force_host_platform_device_count={machine.devices} (docs: plan#devices)"
        )
    return mesh_of(machine.axes, arranged(machine, devices))
