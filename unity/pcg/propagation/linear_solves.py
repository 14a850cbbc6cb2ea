"""The programs of a linear solve: what `jnp.linalg.solve`, `inv` and the derivative of `slogdet` are to JAX.

One primitive holds four of them: the product `A x` that is inverted, its transpose, and how each of the two is solved. Every
program closes over operands of its own, and all take the right sides. Values come from `solve`, derivatives from all four: from
`A x = b` follows `A dx = db - dA x`, a solve again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jax.extend import core

from unity.pcg.ir.program import Body, Equation, close

SOLVES = ("matvec", "vecmat", "solve", "transpose_solve")  # in the order of what they close over


def parts(equation: Equation, operands: Sequence[Any]) -> tuple[dict[str, Sequence[Any]], Sequence[Any]]:
    """What each program closes over, and the right sides, of something that there is for each operand."""
    found, start = {}, 0
    for name in SOLVES:
        end = start + getattr(equation.params["const_lengths"], name)
        found[name] = operands[start:end]
        start = end
    return found, operands[start:]


def named(equation: Equation) -> tuple[str, ...]:
    """The programs that are there: of what is never transposed, not all."""
    return tuple(name for name in SOLVES if getattr(equation.params["jaxprs"], name) is not None)


@lru_cache(maxsize=1024)
def part_of(equation: Equation, name: str) -> Body:
    """One of the programs that are there: what it closes over and the right sides in, solutions (or a product) out."""
    inner = getattr(equation.params["jaxprs"], name)
    return close(inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ()))


def symmetric(equation: Equation) -> bool:
    """Whether the transpose was said to be the product itself."""
    programs = equation.params["jaxprs"]
    return programs.vecmat is not None and programs.vecmat is programs.matvec
