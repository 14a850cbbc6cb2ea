"""Foreign primitives: those of other packages, such as Lineax' linear solves, and functions that JAX represents as one primitive.

Their derivative and lowering rules compare the types of their operands with those they were made for. Inside of a `shard_map` types
also list the axes along which values vary, so the rules would refuse everything. Therefore each is replaced by the program that it
computes in JAX's own primitives, with its own reverse-mode derivative as the rule of a `custom_vjp`.

Functions with an object among their parameters (`jax.experimental.hijax`) are, since JAX 0.12, `jnp.searchsorted`, `jnp.nonzero`,
`lax.custom_root` and others, and packages may define more. A few of JAX's are elementwise, with derivatives made of themselves:
these stay, under names of the operator table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives

from unity.pcg.jaxprs.jaxprs import RULED, Program, called, chosen_of, equations, floating, merged, with_equations, with_nested
from unity.pcg.jaxprs.pullbacks import EquationPullback
from unity.pcg.jaxprs.shard_maps.regions import raised
from unity.pcg.jaxprs.shardings import without_shardings
from unity.pcg.jaxprs.trace_contexts import precision_of, without_mesh
from unity.pcg.jaxprs.weak_types import WITHOUT_WEAK_TYPE, struct_of
from unity.pcg.types.factors import TABLE
from unity.pcg.types.varying_axes import CAST

HELD = "call_hi_primitive"
NAMES = {"Frexp": "frexp", "Ldexp": "ldexp"}  # JAX's classes of the functions that stay


def name_of(primitive: str, params: Mapping[str, Any]) -> str:
    """Return the name of a primitive, or of the function that it represents."""
    if primitive != HELD:
        return primitive
    kind = type(params["_prim"])
    return NAMES.get(kind.__name__, HELD) if kind.__module__.startswith("jax.") else HELD


def function_of(params: Mapping[str, Any]) -> Callable[..., list]:
    """Return the represented function, of flat operands, in ordinary primitives."""
    held = params["_prim"]
    return lambda *operands: list(held.out_tree.flatten_up_to(held.expand(*held.in_tree.unflatten(operands))))


def foreign(primitive: core.Primitive) -> bool:
    """Return whether a primitive is neither JAX's own nor in the operator table."""
    implementation = getattr(primitive.impl, "func", primitive.impl)
    return (
        primitive.name not in TABLE
        and primitive.name not in (CAST, WITHOUT_WEAK_TYPE)
        and implementation.__module__.partition(".")[0] not in ("jax", "jaxlib")
    )


def own_program(eqn: core.JaxprEqn) -> core.ClosedJaxpr | None:
    """Return the program that a foreign primitive computes, None for others and for one that is not implemented in JAX."""
    held = name_of(eqn.primitive.name, eqn.params) == HELD
    return _implementation(eqn, held) if held or foreign(eqn.primitive) else None


@lru_cache(maxsize=1024)
def _implementation(eqn: core.JaxprEqn, held: bool) -> core.ClosedJaxpr | None:
    run = function_of(eqn.params) if held else partial(eqn.primitive.impl, **eqn.params)
    try:
        return outside(run, [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars])
    except Exception:  # it is not implemented in JAX
        return None


def outside(run: Any, arguments: Any, results: Sequence[Any] = ()) -> core.ClosedJaxpr:
    """Trace a function outside of any mesh, in the precision of its arguments, whether or not 64 bits are enabled now.

    results: types of results that it is known to have, which tell its precision, too.
    """
    structs = jax.tree.map(struct_of, arguments)
    with precision_of([*jax.tree.leaves(structs), *results]), without_mesh():
        return raised(without_shardings(jax.make_jaxpr(run)(*structs)))


@TABLE.clears
@lru_cache(maxsize=1024)
def adopted(eqn: core.JaxprEqn, inactive: tuple[bool, ...]) -> core.ClosedJaxpr | None:
    """Return the program that replaces a foreign primitive. None for others, and for one whose rules cannot be traced.

    `inactive`: the operands to which no gradient flows. Rules may refuse to be differentiated by these.
    """
    program = own_program(eqn)
    if program is None or not any(floating(v.aval) for v in eqn.outvars):
        return program  # without floating-point results it has no derivatives
    try:
        return outside(_with_rules(eqn, program, inactive), [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars])
    except Exception:  # a rule refuses some operands, or results
        return None


def _with_rules(eqn: core.JaxprEqn, program: core.ClosedJaxpr, inactive: tuple[bool, ...]) -> Callable[..., list]:
    """Return a foreign primitive as a function with a `custom_vjp`, traced once for all floating-point operands and results."""

    def run(*operands: Any) -> list:
        results = eqn.primitive.bind(*operands, **eqn.params)
        return list(results) if eqn.primitive.multiple_results else [results]

    active = [floating(v.aval) and not fixed for v, fixed in zip(eqn.invars, inactive, strict=True)]
    return with_vjp(run, eqn, program, active, partial(outside, results=[v.aval for v in eqn.outvars]))


def with_vjp(
    run: Callable[..., list], eqn: core.JaxprEqn, program: core.ClosedJaxpr, active: Sequence[bool], traced: Callable[..., Any]
) -> Callable[..., list]:
    """Return an equation as a function with a `custom_vjp`, whose rules are traced once.

    Args:
        run: the equation as a function of its operands, which is differentiated.
        eqn: the equation.
        program: the program of its values.
        active: whether each operand is differentiated.
        traced: traces a function of values of some types.
    """
    real = [floating(v.aval) for v in eqn.outvars]
    pullback = EquationPullback(run, active)
    n, avals = len(eqn.outvars), [v.aval for v in eqn.outvars]
    first = traced(pullback.forward, [v.aval for v in eqn.invars])
    second = traced(partial(pullback.backward, real), [first.out_avals[n:], chosen_of(real, avals)])
    # rules may contain the primitive, too, and be of a mesh
    forwards, back = (core.jaxpr_as_fun(first_order(without_shardings(p))) for p in (first, second))

    call = jax.custom_vjp(lambda *given: core.jaxpr_as_fun(program)(*given))
    call.defvjp(
        lambda *given: (lambda out: (out[:n], out[n:]))(forwards(*given)),
        lambda residuals, cotangents: tuple(
            merged(active, back(*residuals, *chosen_of(real, cotangents)), [None] * active.count(False))
        ),
    )
    return call


def first_order(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Replace custom calls in a rule's program by their bodies, in nested programs too: a rule is not differentiated again.

    This ends a recursion: the rule of an `odeint` solves another, larger equation by `odeint`, and so on. Foreign primitives are
    replaced, too.
    """
    return with_equations(program, _as_body)


def ruled_calls(program: core.ClosedJaxpr) -> tuple[core.JaxprEqn, ...]:
    """Return the calls with derivative rules in a program, in nested programs too: those that `first_order` replaces."""
    return tuple(e for eqn in program.eqns for e in (eqn, *equations(eqn)) if e.primitive.name in RULED)


def _as_body(eqn: core.JaxprEqn) -> core.JaxprEqn:
    program = own_program(eqn)
    if eqn.primitive.name in RULED:
        program = called(eqn.params)
    if program is None:
        return with_nested(eqn, _as_body)
    body = _without_names(with_equations(program, _as_body))
    return eqn.replace(primitive=primitives.closed_call_p, params={"call_jaxpr": body})


def _without_names(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Return a program without its arguments' names: a custom call also names static arguments, and JAX cannot prune it then."""
    jaxpr = program.jaxpr
    unnamed = core.DebugInfo(jaxpr.debug_info.traced_for, jaxpr.debug_info.func_src_info, None, None)
    return core.ClosedJaxpr(jaxpr.replace(debug_info=unnamed), program.consts)


def with_foreign(program: Program) -> bool:
    """Return whether a program has foreign primitives, in nested programs too."""
    return any(own_program(e) is not None for eqn in program.eqns for e in (eqn, *equations(eqn)))
