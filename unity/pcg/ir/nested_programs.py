"""The nested programs of an equation: of loops, branches and derivative rules, whatever the parameters are called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend import core

from unity.pcg.ir.program import Body, Equation, close, from_jaxpr
from unity.pcg.jaxprs.jaxprs import Program, each


def programs(params: Mapping[str, Any]) -> Iterator[Program | Body]:
    """Iterate over the programs among parameters. Rewritten programs are bodies."""
    yield from (x for x in each(params) if isinstance(x, Program | Body))


def body_of(program: Program | Body) -> Body:
    """Return a program among an equation's parameters, a jaxpr or a rewritten body, as a body."""
    if isinstance(program, Body):
        return program
    return close(program) if isinstance(program, core.ClosedJaxpr) else from_jaxpr(program)


def bodies(equation: Equation) -> Iterator[Body]:
    """Iterate over the nested programs of an equation, as bodies."""
    yield from map(body_of, programs(equation.params))


def has(body: Body, primitive: str) -> bool:
    """Return whether a body applies a primitive, or a nested program does."""
    return any(e.name == primitive or any(has(b, primitive) for b in bodies(e)) for e in body.equations)
