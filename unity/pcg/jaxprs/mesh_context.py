"""Tracing outside of any mesh that the user has set by `jax.set_mesh`, which types would otherwise mention."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from jax.extend import core
from jax.sharding import AbstractMesh, NamedSharding, use_abstract_mesh

from unity.pcg.jaxprs.jaxprs import with_equations

NO_MESH = AbstractMesh((), ())


def apart() -> AbstractContextManager[object]:
    """Return a context in which tracing sees no mesh."""
    return use_abstract_mesh(NO_MESH)


def forgotten(value: Any) -> Any:
    """Remove meshes from the equations of a program, or of the programs in a parameter.

    JAX runs each equation under the mesh that was set when it was traced, and some name it. Returns the same object if none does.
    """
    return with_equations(value, _forgetful)


BY_USERS = frozenset({"sharding_constraint"})  # primitives whose shardings users write; in others JAX records them


def _forgetful(eqn: core.JaxprEqn) -> core.JaxprEqn:
    by_user = eqn.primitive.name in BY_USERS
    recorded = {name for name, value in eqn.params.items() if isinstance(value, NamedSharding) and not by_user}
    params = {name: None if name in recorded else forgotten(value) for name, value in eqn.params.items()}
    with eqn.ctx.manager, apart():
        context = type(eqn.ctx)()  # the current settings
    same = context == eqn.ctx and all(params[name] is value for name, value in eqn.params.items())
    return eqn if same else eqn.replace(params=params, ctx=context)
