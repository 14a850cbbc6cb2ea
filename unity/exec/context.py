"""The mesh context of a plan, which replaces any mesh that the user has set by `jax.set_mesh`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from jax.sharding import AbstractMesh, AxisType, Mesh, get_abstract_mesh, use_abstract_mesh

from unity.base.errors import PlanError


def own(mesh: Mesh | AbstractMesh) -> AbstractContextManager[object]:
    """Return a context in which programs are traced under a plan's mesh.

    Raises:
        PlanError: the user has set a mesh with explicit axes, which arrays' types would have to name, while a plan's arrays name
            the plan's mesh; or the plan is called inside of `jax.shard_map` or `jax.pmap`.
    """
    here = get_abstract_mesh()
    manual = [name for name, kind in zip(here.axis_names, here.axis_types, strict=True) if kind == AxisType.Manual]
    if manual:
        raise PlanError(
            f"a plan is called inside of a jax.shard_map or jax.pmap (along {', '.join(map(str, manual))}), but runs on all of its"
            " devices itself: call it outside. (docs: capture#devices-and-kernels)"
        )
    explicit = [name for name, kind in zip(here.axis_names, here.axis_types, strict=True) if kind == AxisType.Explicit]
    if explicit:
        raise PlanError(
            f"jax.set_mesh has set a mesh with the explicit axes {', '.join(map(str, explicit))}, where a plan, which has a mesh of"
            " its own, cannot run.\n    Leave it out, or make it of axis_types=(jax.sharding.AxisType.Auto,) * n."
            " (docs: moving#from-hand-written-partitionspecs)"
        )
    if here.empty:  # then transformations that read the program again (checkify) find none either
        return nullcontext()
    return use_abstract_mesh(mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh)
