"""The device mesh that a plan runs on, and the check that all processes have the same plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from unity.base.errors import PlanError
from unity.base.formatting import duration, size
from unity.base.processes import check_alike, check_devices, several, shared
from unity.exec.hosts.device_order import check_order, in_mesh_order
from unity.exec.lowering import mesh_of
from unity.machine.machine import Machine
from unity.pcg.ir.graph import PCG
from unity.pcg.jaxprs.parameter_text import array_text
from unity.pcg.types.axis import Axis
from unity.plan.planned_program import PlannedProgram


def mesh_for(program: PlannedProgram, chosen: Sequence[Any] | Mesh | None = None) -> Mesh:
    """Return a mesh of devices with the axes of a plan's machine.

    By default the mesh has this program's devices, arranged so that the machine's levels are made of whole hosts. The plans of
    several processes that share its devices are compared, because each would wait for the others at other collectives.

    Args:
        program: the plan's program.
        chosen: devices to use instead, in their order, or a mesh of them, which `refuse_devices` accepts. The mesh is returned if
            its axes are the plan's. The devices may be those of a topology that is only compiled for.

    Raises:
        PlanError: there are fewer devices than the machine has, the hosts do not form its levels, or another process has another
            plan.
    """
    machine = program.family.search.machine
    if chosen is not None:
        devices = tuple(chosen.devices.flat) if isinstance(chosen, Mesh) else chosen
        if shared(devices[: machine.devices]):
            check_alike(_shared_facts(program))
        if isinstance(chosen, Mesh) and program.has_mesh(chosen.shape):
            check_order(machine, devices)
            return chosen
        return _mesh(machine, devices)
    devices = jax.devices()
    if several():
        check_devices(devices)
        check_alike(_shared_facts(program))
    if len(devices) < machine.devices:
        raise PlanError(
            f"this plan is for {machine.devices} devices ({machine.name}), but JAX sees {len(devices)}"
            f" ({devices[0].platform}).\n    Run it where they are, plan with machine=unity.Machine.local(), or give a CPU more"
            f" virtual devices: XLA_FLAGS=--xla_force_host_platform_device_count={machine.devices}. Without devices, a plan has"
            " in_specs, mesh_shape and inspect.abstract_mesh. (docs: plan#devices)"
        )
    return _mesh(machine, in_mesh_order(machine, devices))


def refuse_devices(machine: Machine, chosen: Sequence[Any] | Mesh) -> None:
    """Raise PlanError if there are fewer devices than a machine has, if one is named twice, or if a mesh has other axes than those
    planned for.
    """
    count = chosen.size if isinstance(chosen, Mesh) else len(chosen)
    if count < machine.devices:
        raise PlanError(
            f"this plan is for {machine.devices} devices ({machine.name}), but {count} are given.\n    Give as many, or"
            " plan for a machine of fewer. (docs: plan#devices)"
        )
    used = () if isinstance(chosen, Mesh) else chosen[: machine.devices]
    if twice := next((device for k, device in enumerate(used) if device in used[:k]), None):
        raise PlanError(
            f"this plan is for {machine.devices} devices ({machine.name}), but `devices` names {twice} twice.\n    Give as many"
            " different ones, such as jax.devices(). (docs: plan#devices)"
        )
    if isinstance(chosen, Mesh) and machine.mesh and not machine.has_mesh(chosen.shape):
        raise PlanError(
            f"this plan is for the mesh {dict(machine.mesh)}, but `devices` is a mesh of {dict(chosen.shape)}.\n    Give a mesh of"
            " these axes, or plan again with mesh=; a list of devices is arranged in the plan's own mesh. (docs:"
            " moving#plan-for-a-mesh-of-your-own)"
        )


def graph_on(program: PlannedProgram, mesh: Mesh) -> PCG:
    """Return the parallel graph over the axes of a plan's mesh: those that users see, if the user gave a mesh of them."""
    return program.named_pcg if program.has_mesh(mesh.shape) else program.pcg


def _mesh(machine: Machine, devices: Sequence[Any]) -> Mesh:
    """Return the mesh of a machine's axes, those of size 1 included."""
    return mesh_of([Axis(name, size, 0) for name, size in machine.mesh_shape.items()], devices)


def _shared_facts(program: PlannedProgram) -> dict[str, str]:
    """Return the facts that must be equal in all processes, by the words for them in an error."""
    family, point = program.family, program.candidate
    return {
        "the function, or the shapes of its arguments": f"{family.name}, {program.original.key}",
        "the arrays that it closes over": " ".join(map(array_text, family.captured.consts)),
        "the machine": str(family.search.machine),
        "the plan": f"{duration(point.time)} a step, {size(point.memory)} on each device, {program.pcg.key}",
    }
