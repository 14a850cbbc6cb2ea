"""The device mesh that a plan runs on, and the check that all processes have the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from unity.base.errors import PlanError
from unity.base.processes import check_alike, check_devices, several, shared
from unity.exec.hosts.arrangement import arranged
from unity.exec.lowering import mesh_of
from unity.pcg.jaxprs.parameter_text import array_text

if TYPE_CHECKING:
    from unity.plan.plan import Plan


def mesh_for(plan: Plan, chosen: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh of devices with the axes of a plan's machine.

    By default the mesh has this program's devices, arranged so that the machine's levels are made of whole hosts. The plans of
    several processes that share its devices are compared, because each would wait for the others at other collectives.

    Args:
        plan: the plan.
        chosen: devices to use instead, in their order. They may be those of a topology that is only compiled for.

    Raises:
        PlanError: there are fewer devices than the machine has, the hosts do not form its levels, or another process has another
            plan.
    """
    machine = plan.machine
    if chosen is not None:
        if len(chosen) < machine.devices:
            raise PlanError(
                f"this plan is for {machine.devices} devices ({machine.name}), but {len(chosen)} are given.\n    Give as many, or"
                " plan for a machine of fewer. (docs: plan#devices)"
            )
        if shared(chosen[: machine.devices]):
            check_alike(_shared_facts(plan))
        return mesh_of(machine.axes, chosen)
    devices = jax.devices()
    if several():
        check_devices(devices)
        check_alike(_shared_facts(plan))
    if len(devices) < machine.devices:
        raise PlanError(
            f"this plan is for {machine.devices} devices ({machine.name}), but JAX sees {len(devices)}"
            f" ({devices[0].platform}).\n    Run it where they are, plan with machine=unity.Machine.local(), or give a CPU more"
            f" virtual devices: XLA_FLAGS=--xla_force_host_platform_device_count={machine.devices} (docs: plan#devices)"
        )
    return mesh_of(machine.axes, arranged(machine, devices))


def _shared_facts(plan: Plan) -> dict[str, str]:
    """Return the facts that must be equal in all processes, by the words for them in an error."""
    return {
        "the function, or the shapes of its arguments": f"{plan.__name__}, {plan.original.key}",
        "the arrays that it closes over": " ".join(map(array_text, plan.family.captured.consts)),
        "the machine": str(plan.machine),
        "the plan": f"{plan!r}, {plan.pcg.key}",
    }
