"""Tracing outside of any mesh that the user has set by `jax.set_mesh`, which types would otherwise mention."""

from __future__ import annotations

from contextlib import AbstractContextManager

from jax.sharding import AbstractMesh, use_abstract_mesh

NO_MESH = AbstractMesh((), ())


def apart() -> AbstractContextManager[object]:
    """Return a context in which tracing sees no mesh."""
    return use_abstract_mesh(NO_MESH)
