"""The programs inside of JAX's own equations, whatever their parameters call them: of loops, branches, derivative rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jax.extend import core

Program = core.Jaxpr | core.ClosedJaxpr
RULED = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})  # have derivative rules of their own


def equations(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    """All equations in the programs of one, at any depth."""
    for given in eqn.params.values():
        for x in given if isinstance(given, tuple | list) else (given,):
            for e in x.eqns if isinstance(x, Program) else ():
                yield e
                yield from equations(e)


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
