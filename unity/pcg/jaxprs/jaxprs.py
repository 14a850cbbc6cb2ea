"""JAX's own equations: the programs inside, whatever their parameters call them, of loops, branches, derivative rules; and which
values have gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend import core

Program = core.Jaxpr | core.ClosedJaxpr
RULED = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})  # have derivative rules of their own
LINEAR_SOLVE = "custom_linear_solve"
NESTING = RULED | {"cond", "while", "scan", "remat2", "checkpoint", LINEAR_SOLVE}  # have programs inside that are not inlined
PROGRAMS = ("call_jaxpr", "jaxpr", "fun_jaxpr")  # parameters that hold the program of a call-like equation, the first that is there


def called(params: Mapping[str, Any]) -> Any:
    """The program of a call-like equation with these parameters; None if it has none."""
    return next((params[name] for name in PROGRAMS if name in params), None)


def each(params: Mapping[str, Any]) -> Iterator[Any]:
    """All parameters, and in the place of a sequence what is in it."""
    for given in params.values():
        yield from given if isinstance(given, tuple | list) else (given,)


def equations(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    """All equations in the programs of one, at any depth."""
    for x in each(eqn.params):
        for e in x.eqns if isinstance(x, Program) else ():
            yield e
            yield from equations(e)


def floating(x: Any) -> bool:
    """Whether a value or a type can have a gradient: floating point or complex (bfloat16 and float8 included)."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def with_equations(value: Any, change: Callable[[core.JaxprEqn], core.JaxprEqn]) -> Any:
    """A program of JAX's, or a parameter with programs in it, with every equation changed; the same object if none is. Programs
    inside of an equation are left to `change`."""
    if isinstance(value, tuple | list) and any(isinstance(v, Program) for v in value):
        found = [with_equations(v, change) for v in value]
        make = getattr(value, "_make", type(value))  # the programs of a linear solve have names
        return value if all(a is b for a, b in zip(found, value, strict=True)) else make(found)
    if isinstance(value, core.Jaxpr):  # since JAX 0.12 a closed one is one, too
        eqns = [change(eqn) for eqn in value.eqns]
        return value if all(a is b for a, b in zip(eqns, value.eqns, strict=True)) else value.replace(eqns=eqns)
    if isinstance(value, core.ClosedJaxpr):
        inside = with_equations(value.jaxpr, change)
        return value if inside is value.jaxpr else value.replace(jaxpr=inside)
    return value
