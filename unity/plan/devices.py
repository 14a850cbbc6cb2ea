"""The devices that a plan runs on: as many as it is for, and the same plan in all processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from unity.base.errors import PlanError
from unity.base.processes import check_alike, check_devices, several
from unity.exec.hosts.arrangement import arranged
from unity.exec.lowering import mesh_of
from unity.pcg.jaxprs.parameter_text import array_text

if TYPE_CHECKING:
    from unity.plan.plan import Plan


def mesh_for(plan: Plan, given: Sequence[Any] | None = None) -> Mesh:
    """This program's devices as a mesh of the axes of a plan's machine, whole hosts as units of its levels. Or those given, in
    their order, which need not be there.

    Raises PlanError if there are fewer devices than the machine has, or other hosts, or if processes have other plans.
    """
    machine = plan.machine
    if given is not None:
        if len(given) < machine.devices:
            raise PlanError(f"this plan is for {machine.devices} devices ({machine.name}), but {len(given)} are given")
        return mesh_of(machine.axes, given)
    devices = jax.devices()
    if several():
        check_devices(devices)
        check_alike(_facts(plan))
    if len(devices) < machine.devices:
        raise PlanError(
            f"this plan is for {machine.devices} devices ({machine.name}), but JAX sees {len(devices)}"
            f" ({devices[0].platform}).\n    Run it where they are, plan with machine=unity.Machine.local(), or give a CPU more"
            f" virtual devices: XLA_FLAGS=--xla_force_host_platform_device_count={machine.devices} (docs: plan#devices)"
        )
    return mesh_of(machine.axes, arranged(machine, devices))


def _facts(plan: Plan) -> dict[str, str]:
    """What must be the same in all processes, and what to call it if it is not."""
    return {
        "the function, or the shapes of its arguments": f"{plan.__name__}, {plan.original.key}",
        "the arrays that it closes over": " ".join(map(array_text, plan._made.captured.consts)),
        "the machine": str(plan.machine),
        "the plan": f"{plan!r}, {plan.pcg.key}",
    }
