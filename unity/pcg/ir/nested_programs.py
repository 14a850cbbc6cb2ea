"""The programs inside of an equation, whatever its parameters call them: of loops, branches, derivative rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend import core

from unity.pcg.ir.program import Body, Equation, close, from_jaxpr
from unity.pcg.jaxprs.jaxprs import Program, each


def programs(params: Mapping[str, Any]) -> Iterator[Program | Body]:
    """The programs in an equation's parameters; of what was rewritten they are bodies."""
    yield from (x for x in each(params) if isinstance(x, Program | Body))


def bodies(equation: Equation) -> Iterator[Body]:
    """They, as bodies."""
    for x in programs(equation.params):
        yield x if isinstance(x, Body) else close(x) if isinstance(x, core.ClosedJaxpr) else from_jaxpr(x)


def has(body: Body, primitive: str) -> bool:
    """Whether a body applies a primitive of this name, or a program inside of it does."""
    return any(e.name == primitive or any(has(b, primitive) for b in bodies(e)) for e in body.equations)
