"""Programs are read and searched outside of any mesh that the user has set by `jax.set_mesh`: their types would name it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from jax.extend import core
from jax.sharding import AbstractMesh, NamedSharding, use_abstract_mesh

from unity.pcg.jaxprs.jaxprs import with_equations

NO_MESH = AbstractMesh((), ())


def apart() -> AbstractContextManager[object]:
    """What is traced inside sees no mesh of the user's."""
    return use_abstract_mesh(NO_MESH)


def forgotten(value: Any) -> Any:
    """A program, or a parameter with programs in it, whose equations remember no mesh: each is run under the one that was set when
    it was traced, and some name it. The same object where there is nothing to forget."""
    return with_equations(value, _forgetful)


SAID_BY_USERS = frozenset({"sharding_constraint"})  # what users say of where values lie; elsewhere JAX notes it


def _forgetful(eqn: core.JaxprEqn) -> core.JaxprEqn:
    said = eqn.primitive.name in SAID_BY_USERS
    noted = {name for name, value in eqn.params.items() if isinstance(value, NamedSharding) and not said}
    params = {name: None if name in noted else forgotten(value) for name, value in eqn.params.items()}
    with eqn.ctx.manager, apart():
        context = type(eqn.ctx)()  # of all that is set now
    same = context == eqn.ctx and all(params[name] is value for name, value in eqn.params.items())
    return eqn if same else eqn.replace(params=params, ctx=context)
