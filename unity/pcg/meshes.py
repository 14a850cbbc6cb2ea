"""Programs are read and searched outside of any mesh that the user has set by `jax.set_mesh`: their types would name it."""

from __future__ import annotations

from contextlib import AbstractContextManager

from jax.sharding import AbstractMesh, use_abstract_mesh

NO_MESH = AbstractMesh((), ())


def apart() -> AbstractContextManager[object]:
    """What is traced inside sees no mesh of the user's."""
    return use_abstract_mesh(NO_MESH)
