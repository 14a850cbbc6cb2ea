"""The programs of equations with nested programs, as bodies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from jax.extend import core

from unity.pcg.ir.nested_programs import body_of
from unity.pcg.ir.program import Body, Equation
from unity.pcg.jaxprs.foreign_primitives import first_order
from unity.pcg.jaxprs.jaxprs import BRANCHED, RULED, called


def nests(equation: Equation) -> bool:
    """Return whether an equation is call-like: it has a single nested program, which `nested_body` returns."""
    return called(equation.params) is not None


@lru_cache(maxsize=4096)
def nested_body(equation: Equation) -> Body:
    """Return the program of a call-like equation.

    A call with a derivative rule is differentiated by it alone, so the rules nested in its program are dropped; those that use
    enclosing values could not even be read.
    """
    program = called(equation.params)
    return body_of(first_order(program) if equation.name in RULED and isinstance(program, core.ClosedJaxpr) else program)


@lru_cache(maxsize=4096)
def branches(equation: Equation) -> tuple[Body, ...]:
    """Return the programs of a cond."""
    return tuple(body_of(b) for b in equation.params["branches"])


def branch_indices(body: Body) -> Mapping[int, int]:
    """Return the inputs that are indices of conditionals' branches, each with the number of branches."""
    conditionals = ((e.operands[0], e.params["branches"]) for e in body.equations if e.name in BRANCHED)
    return {index: len(programs) for index, programs in conditionals if isinstance(index, int) and index in body.inputs}
