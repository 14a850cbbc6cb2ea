"""The programs inside of an equation, whatever its parameters call them: of loops, branches, derivative rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax.extend import core

from unity.pcg.body import Body, Equation, close, from_jaxpr

Program = core.Jaxpr | core.ClosedJaxpr


def programs(params: Mapping[str, Any]) -> Iterator[Program | Body]:
    """The programs in an equation's parameters; of what was rewritten they are bodies."""
    for given in params.values():
        for x in given if isinstance(given, tuple | list) else (given,):
            if isinstance(x, Program | Body):
                yield x


def bodies(equation: Equation) -> Iterator[Body]:
    """They, as bodies."""
    for x in programs(equation.params):
        yield x if isinstance(x, Body) else close(x) if isinstance(x, core.ClosedJaxpr) else from_jaxpr(x)


def has(body: Body, primitive: str) -> bool:
    """Whether a body applies a primitive of this name, or a program inside of it does."""
    return any(e.name == primitive or any(has(b, primitive) for b in bodies(e)) for e in body.equations)


def equations(eqn: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    """All equations in the programs of one of JAX's, at any depth."""
    for x in programs(eqn.params):
        for e in () if isinstance(x, Body) else x.eqns:
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
