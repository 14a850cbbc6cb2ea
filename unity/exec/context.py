"""A plan has a mesh of its own, whatever mesh the user has set by `jax.set_mesh`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from jax.sharding import AbstractMesh, AxisType, Mesh, get_abstract_mesh, use_abstract_mesh

from unity.base.errors import PlanError


def own(mesh: Mesh | AbstractMesh) -> AbstractContextManager[object]:
    """What is traced inside sees this mesh. What it takes and gives, the user's program sees.

    Raises PlanError if the user has set a mesh with explicit axes: arrays' types would have to name it, and a plan's name its own.
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
