"""Tracing outside of any mesh that the user has set by `jax.set_mesh`, which types would otherwise mention."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, get_mesh, use_abstract_mesh

NO_MESH = AbstractMesh((), ())
NO_DEVICES = Mesh(np.empty((), object), ())


def without_mesh() -> AbstractContextManager[object]:
    """Return a context in which tracing sees no mesh."""
    return use_abstract_mesh(NO_MESH)


def unset() -> AbstractContextManager[object]:
    """Return a context without the mesh that the user has set, on whose devices alone JAX would run programs."""
    try:
        return without_mesh() if get_mesh().empty else jax.set_mesh(NO_DEVICES)
    except ValueError:  # inside of a jit, where no program is run
        return without_mesh()
