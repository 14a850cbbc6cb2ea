"""Jaxprs: the nested programs of equations, and traversals that change equations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

Program = core.Jaxpr | core.ClosedJaxpr
# The primitives with programs among their parameters that are not inlined. Names differ between versions of JAX.
CUSTOM_JVP = ("custom_jvp_call",)
CUSTOM_VJP = ("custom_vjp_call", "custom_vjp_call_jaxpr")
RULED = frozenset({*CUSTOM_JVP, *CUSTOM_VJP})  # calls with derivative rules
REMATERIALIZED = ("remat2", "checkpoint", "remat")
CALLS = RULED.union(REMATERIALIZED)
SCANNED = ("scan",)
LOOPED = frozenset({*SCANNED, "while"})
BRANCHED = ("cond",)
LINEAR_SOLVE = "custom_linear_solve"
NESTING = CALLS | LOOPED | {*BRANCHED, LINEAR_SOLVE}
PROGRAMS = ("call_jaxpr", "jaxpr", "fun_jaxpr")  # names of the parameter with a call's program


def called(params: Mapping[str, Any]) -> Any:
    """Return the program of a call-like equation from its parameters, or None."""
    return next((params[name] for name in PROGRAMS if name in params), None)


def each(params: Mapping[str, Any]) -> Iterator[Any]:
    """Iterate over all parameters, and over the items of those that are sequences."""
    for value in params.values():
        yield from value if isinstance(value, tuple | list) else (value,)


def equations(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    """Iterate over the equations in the nested programs of one, at any depth."""
    for x in each(eqn.params):
        for e in x.eqns if isinstance(x, Program) else ():
            yield e
            yield from equations(e)


def callable_of(
    eqn: core.JaxprEqn, change: Callable[[core.Jaxpr], core.Jaxpr] = lambda program: program
) -> Callable[..., list[Any]]:
    """Return an equation as a function of all its operands (including literals and duplicates).

    change: a change of the program that has this equation alone.
    """
    operands: list[Any] = [core.Var(v.aval) for v in eqn.invars]
    unnamed = core.DebugInfo(eqn.primitive.name, "", None, None)
    jaxpr = core.Jaxpr((), operands, eqn.outvars, [eqn.replace(invars=operands)], debug_info=unnamed)
    run = core.jaxpr_as_fun(core.ClosedJaxpr(change(jaxpr), ()))
    return lambda *arguments: list(run(*arguments))


def floating(x: Any) -> bool:
    """Return whether a value or a type can have a gradient: floating point or complex."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def is_reference(aval: Any) -> bool:
    """Return whether a value of a type can be changed in place (`jax.Ref`)."""
    return type(aval).__name__ == "AbstractRef"


def with_programs(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change the program in a parameter, or each of several. Returns the same object if none changes."""
    if isinstance(value, Program):
        return change(value)
    if isinstance(value, tuple | list) and any(isinstance(v, Program) for v in value):
        changed = [with_programs(v, change) for v in value]
        make = getattr(value, "_make", type(value))  # the programs of a linear solve are a named tuple
        return value if all(a is b for a, b in zip(changed, value, strict=True)) else make(changed)
    return value


def with_equations(value: Any, change: Callable[[core.JaxprEqn], core.JaxprEqn]) -> Any:
    """Change every equation of a program, or of the programs in a parameter. Returns the same object if none changes.

    Nested programs are left to `change`, which may call `with_nested`.
    """

    def changed(program: Any) -> Any:
        if not isinstance(program, core.Jaxpr):  # closed, before JAX 0.12
            inside = changed(program.jaxpr)
            return program if inside is program.jaxpr else program.replace(jaxpr=inside)
        eqns = [change(eqn) for eqn in program.eqns]
        return program if all(a is b for a, b in zip(eqns, program.eqns, strict=True)) else program.replace(eqns=eqns)

    return with_programs(value, changed)


def with_nested(eqn: core.JaxprEqn, change: Callable[[core.JaxprEqn], core.JaxprEqn]) -> core.JaxprEqn:
    """Change every equation of the programs nested in an equation. Returns the same object if none changes."""
    params = {name: with_equations(value, change) for name, value in eqn.params.items()}
    return eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)


def chosen_of(flags: Sequence[bool], values: Sequence[Any], wanted: bool = True) -> list:
    """Return the values whose flag is `wanted`."""
    return [v for v, f in zip(values, flags, strict=True) if f == wanted]


def merged(flags: Sequence[bool], chosen: Any, others: Any) -> list:
    """Interleave the values with a flag and those without: the inverse of `chosen_of`."""
    chosen, others = iter(chosen), iter(others)
    return [next(chosen) if f else next(others) for f in flags]
