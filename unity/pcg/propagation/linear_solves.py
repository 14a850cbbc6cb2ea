"""The programs of JAX's linear-solve primitive, to which `jnp.linalg.solve`, `inv` and the derivative of `slogdet` lower.

The primitive has four programs: the product `A x` to be inverted, its transpose, and a solver for each of the two. Each program
closes over separate operands, and all take the right-hand sides. Values come from `solve`, derivatives from all four: `A x = b`
implies `A dx = db - dA x`, which is another solve.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jax.extend import core

from unity.pcg.ir.program import Body, Equation, close

SOLVES = ("matvec", "vecmat", "solve", "transpose_solve")  # in the order of the operands that they close over


def split_operands(equation: Equation, per_operand: Sequence[Any]) -> tuple[dict[str, Sequence[Any]], Sequence[Any]]:
    """Split a sequence with one entry per operand into the entries that each program closes over, and those of the right sides."""
    closed_over, start = {}, 0
    for name in SOLVES:
        end = start + getattr(equation.params["const_lengths"], name)
        closed_over[name] = per_operand[start:end]
        start = end
    return closed_over, per_operand[start:]


def program_names(equation: Equation) -> tuple[str, ...]:
    """Return the names of the programs that a solve has: one that is never transposed lacks some."""
    return tuple(name for name in SOLVES if getattr(equation.params["jaxprs"], name) is not None)


@lru_cache(maxsize=1024)
def solve_program(equation: Equation, name: str) -> Body:
    """Return one program of a solve: (operands it closes over, right sides) → solutions, or a product."""
    inner = getattr(equation.params["jaxprs"], name)
    return close(inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ()))


def is_symmetric(equation: Equation) -> bool:
    """Return whether the solve was declared symmetric: the transpose is the product."""
    programs = equation.params["jaxprs"]
    return programs.vecmat is not None and programs.vecmat is programs.matvec
