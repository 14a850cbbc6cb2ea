"""The mesh context in which a plan is traced and run. It replaces any mesh that the user has set by `jax.set_mesh`.

Under a mesh with explicit axes, and with arguments of such a mesh, JAX's types contain shardings. A plan is then a region in which
these axes are automatic (`jax.sharding.auto_axes`). Its gradients have the types of its arguments, and its results the types of the
planned function's results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax import lax
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    auto_axes,
    get_abstract_mesh,
    get_mesh,
    use_abstract_mesh,
)

from unity.base.errors import PlanError
from unity.pcg.jaxprs.shardings import sharding_of
from unity.pcg.types.axis import Axis
from unity.pcg.types.mesh_axes import mesh_axes, sliced


def automatic(mesh: Mesh) -> Mesh:
    """Return a mesh with the same devices and names and with automatic axes only, for which programs are compiled."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def refuse_manual() -> None:
    """Raise PlanError inside of a `jax.shard_map` or `jax.pmap`, where no plan can run."""
    here = get_abstract_mesh()
    manual = [name for name, kind in zip(here.axis_names, here.axis_types, strict=True) if kind == AxisType.Manual]
    if manual:
        raise PlanError(
            f"a plan is called inside of a jax.shard_map or jax.pmap (along {', '.join(map(str, manual))}), but runs on all of its"
            " devices itself: call it outside. (docs: capture#devices-and-kernels)"
        )


def own(mesh: Mesh | AbstractMesh) -> AbstractContextManager[object]:
    """Return a context in which programs are traced under a plan's mesh.

    Raises:
        PlanError: the plan is called inside of `jax.shard_map` or `jax.pmap`; or the user has set a mesh of another size, or a mesh
            with explicit axes although the plan is a stream, whose arrays stay as the plan places them between steps.
    """
    refuse_manual()
    here = get_abstract_mesh()
    explicit = [name for name, kind in zip(here.axis_names, here.axis_types, strict=True) if kind == AxisType.Explicit]
    if explicit:
        raise PlanError(
            f"jax.set_mesh has set a mesh with the explicit axes {', '.join(map(str, explicit))}, where a plan's stream, whose"
            " arrays are of the plan's mesh, cannot run.\n    Leave it out, or make it of"
            " axis_types=(jax.sharding.AxisType.Auto,) * n. (docs: moving#under-a-mesh-of-your-own)"
        )
    if not here.empty and here.size != mesh.size:
        raise PlanError(
            f"jax.set_mesh has set a mesh of {here.size} devices, where a plan for {mesh.size} cannot run.\n    Set one of the"
            " plan's devices, in their order (plan.inspect.mesh), or none. (docs: moving#under-a-mesh-of-your-own)"
        )
    if here.empty:  # then transformations that read the program again (checkify) find none either
        return nullcontext()
    return use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh)


def explicit_mesh(values: Iterable[Any]) -> AbstractMesh | None:
    """Return the mesh with explicit axes that the user has set, or else the one in the types of values, or None."""
    here = get_abstract_mesh()
    if not here.empty:
        return here if AxisType.Explicit in here.axis_types else None
    stated = (sharding_of(jax.typeof(x)) for x in values)
    return next((s.mesh if isinstance(s.mesh, AbstractMesh) else s.mesh.abstract_mesh for s in stated if s is not None), None)


def typed(
    run: Callable[..., tuple], mesh: AbstractMesh, specs: Sequence[PartitionSpec], stored: Sequence[PartitionSpec]
) -> Callable[..., tuple]:
    """Convert a function of whole arrays to one of values whose types have shardings on a mesh with explicit axes.

    If the mesh has automatic axes, too, types do not tell the sharding along them. XLA may then choose one for a result or a
    gradient that the mesh cannot express, which JAX refuses. So the values and the results are constrained there.

    Args:
        run: the function.
        mesh: the mesh in the types.
        specs: the shardings in the types of the results.
        stored: the shardings of the values on the mesh. Values beyond them, the function's constants, are replicated.
    """
    mixed = AxisType.Auto in mesh.axis_types

    def constrained(values: Iterable[Any], shardings: Sequence[PartitionSpec]) -> tuple:
        pairs = zip(values, (*shardings, *(PartitionSpec() for _ in values)), strict=False)
        return tuple(lax.with_sharding_constraint(x, s) if mixed else x for x, s in pairs)

    def body(*values: Any) -> tuple:
        return constrained(run(*constrained(values, stored)), specs)

    region: Any = auto_axes(body, out_sharding=tuple(specs))

    def call(*leaves: Any) -> tuple:
        with use_abstract_mesh(mesh):
            return region(*map(_on_current_mesh, leaves))

    return jax.jit(call)


def _on_current_mesh(x: Any) -> Any:
    """Return a value whose type has a mesh: the current one if it had none, as a NumPy array. Its gradient has that mesh, too."""
    return lax.squeeze(lax.expand_dims(x, (0,)), (0,)) if jax.typeof(x).sharding.mesh.empty else x


def typed_mesh(own: Mesh) -> Mesh | None:
    """Return the mesh with explicit axes for the types of a plan's values, or None if types shall not have shardings.

    It is the mesh that the user has set if its devices are those of the plan's mesh in the same order, or else the plan's mesh.
    """
    planned = own if AxisType.Explicit in own.axis_types else None
    here = get_abstract_mesh()
    if here.empty or AxisType.Explicit not in here.axis_types:
        return planned
    try:
        mesh = get_mesh()
    except ValueError:  # inside of a jit, where the devices are unknown
        return planned
    return mesh if list(mesh.devices.flat) == list(own.devices.flat) else planned


def on_mesh(sharding: NamedSharding, mesh: Mesh | AbstractMesh, axes: Sequence[Axis]) -> NamedSharding:
    """Express a plan's sharding on the user's mesh, with fewer slices where the mesh's axes are too coarse for it.

    Returns the sharding unchanged if the sizes of the axes do not fit.
    """
    names = mesh_axes(mesh.shape, axes)
    if names is None:
        return sharding
    position = {axis.name: k for k, axis in enumerate(axes)}
    parts = ([position[name] for name in entry_axes(entry)] for entry in sharding.spec)
    return NamedSharding(mesh, PartitionSpec(*(sliced(part, names) or None for part in parts)))


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Return the names of the axes in an entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
