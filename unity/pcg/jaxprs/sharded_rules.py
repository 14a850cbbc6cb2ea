"""Custom derivative rules that name the axes of a mesh, traced once under that mesh.

Rules are traced anew wherever a plan needs them, outside of any mesh. A rule that needs the mesh (`reshard(g, P("x"))`) is traced
while its function is captured; its call becomes one whose rules are the resulting programs, without shardings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from unity.pcg.jaxprs.foreign_primitives import outside, with_vjp
from unity.pcg.jaxprs.jaxprs import callable_of, called, chosen_of, floating, merged
from unity.pcg.jaxprs.shard_maps.regions import without_scope
from unity.pcg.jaxprs.shardings import without_shardings


def with_own_rules(eqn: core.JaxprEqn, plain: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """Return the program of a `custom_jvp` or `custom_vjp` call whose rule needs the mesh that it was traced under, or None.

    `plain` is the equation without the mesh.
    """
    active = [floating(v.aval) for v in eqn.invars]
    try:
        outside(_derivative(plain, active), _with_tangents(plain, active))
        return None
    except Exception:  # for want of a mesh, or for good
        pass
    try:
        with eqn.ctx.manager:
            renewed = _jvp_call if eqn.primitive.name == "custom_jvp_call" else _vjp_call
            call = renewed(eqn, called(plain.params), active)
        return outside(call, [v.aval for v in eqn.invars])
    except Exception:  # the rule cannot be traced at all, which is reported where it is needed
        return None


def _derivative(eqn: core.JaxprEqn, active: Sequence[bool]) -> Callable[..., Any]:
    """Return a call's results and their derivative, as a function of its operands and the tangents or cotangents of real ones."""
    run, real = callable_of(without_scope(eqn)), [floating(v.aval) for v in eqn.outvars]
    count = len(eqn.invars)

    def forward(*given: Any) -> list:
        operands, tangents = given[:count], given[count:]
        zeros = [np.zeros(np.shape(x), jax.dtypes.float0) for x in chosen_of(active, operands, False)]
        results, out = jax.jvp(run, operands, tuple(merged(active, tangents, zeros)))
        return [*results, *chosen_of(real, out)]

    def backward(*given: Any) -> Any:
        operands, cotangents = given[:count], given[count:]

        def chosen(*some: Any) -> list:
            return chosen_of(real, run(*merged(active, some, chosen_of(active, operands, False))))

        results, back = jax.vjp(chosen, *chosen_of(active, operands))
        return results, back(list(cotangents))

    return forward if eqn.primitive.name == "custom_jvp_call" else backward


def _with_tangents(eqn: core.JaxprEqn, active: Sequence[bool]) -> list[Any]:
    """Return the types of the arguments of a call's `_derivative`."""
    forward = eqn.primitive.name == "custom_jvp_call"
    more = chosen_of(active, eqn.invars) if forward else [v for v in eqn.outvars if floating(v.aval)]
    return [v.aval for v in (*eqn.invars, *more)]


def _traced(run: Callable[..., Any], avals: Any) -> core.ClosedJaxpr:
    """Trace a function of values of sharded types, under their mesh."""
    return jax.make_jaxpr(run)(*jax.tree.map(_struct, avals))


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)


def _vjp_call(eqn: core.JaxprEqn, program: core.ClosedJaxpr, active: Sequence[bool]) -> Callable[..., list]:
    """Return a `custom_vjp` call, which computes `program`, as one with rules that are traced."""
    return with_vjp(callable_of(without_scope(eqn)), eqn, program, active, _traced)


def _jvp_call(eqn: core.JaxprEqn, program: core.ClosedJaxpr, active: Sequence[bool]) -> Callable[..., list]:
    """Return a `custom_jvp` call, which computes `program`, as one with a rule that is traced."""
    real, count = [floating(v.aval) for v in eqn.outvars], len(eqn.outvars)
    rule = core.jaxpr_as_fun(without_shardings(_traced(_derivative(eqn, active), _with_tangents(eqn, active))))
    values = core.jaxpr_as_fun(program)
    call = jax.custom_jvp(lambda *operands: values(*operands))

    @call.defjvp
    def differentiated(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list, list]:
        out = rule(*primals, *chosen_of(active, tangents))
        zeros = [np.zeros(x.shape, jax.dtypes.float0) for x in chosen_of(real, out[:count], False)]
        return list(out[:count]), merged(real, out[count:], zeros)

    return call
