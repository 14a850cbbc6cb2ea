"""The programs of JAX's linear-solve primitive, to which `jnp.linalg.solve`, `inv` and the derivative of `slogdet` lower.

The primitive has four programs: the product `A x` to be inverted, its transpose, and a solver for each of the two. Each program
closes over separate operands, and all take the right-hand sides. Values come from `solve`, derivatives from all four: `A x = b`
implies `A dx = db - dA x`, which is another solve.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jax.extend import core

from unity.pcg.ir.program import Body, Equation, close
from unity.pcg.propagation.nested.agreements import agreements, as_match
from unity.pcg.propagation.nested.loops import NestedSolve
from unity.pcg.types.factors import Match
from unity.pcg.types.parallel_type import PARTIAL, REPLICATED, State

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


def linear_solve_matches(solve_nested: NestedSolve, equation: Equation, known: Mapping[int, State]) -> Iterator[Match]:
    """Yield the match of a solve, if there is one on which all its programs agree.

    A solution has the state of its right side, since derivatives take one for the other.

    Args:
        solve_nested: solves its programs.
        equation: the equation.
        known: states by position, of operands and then of results.
    """
    n, count = len(equation.operands), len(equation.results)
    states, (closed, right) = dict(known), split_operands(equation, range(n))
    operand_positions = {name: [*closed[name], *right] for name in program_names(equation)}
    solved = None
    for name in (*operand_positions, *operand_positions):  # the second round sees the states of the first
        result_positions = range(n, n + (count if name == "solve" else len(right)))
        positions = (*operand_positions[name], *result_positions)
        if known and states.keys().isdisjoint(positions):
            continue
        body = solve_program(equation, name)
        boundary = zip((*body.inputs, *body.outputs), positions, strict=False)  # transpose_solve may have auxiliary results
        solution = solve_nested(body, {v: states[p] for v, p in boundary if isinstance(v, int) and p in states})
        if solution is None:
            return
        states |= zip(positions, (*solution.operands, *solution.results), strict=False)
        solved = (body, solution) if name == "solve" else solved
    if solved is None or any(states[p] != states[n + k] for k, p in enumerate(right)):
        return
    if REPLICATED in (states[p] for p in right) and not solves_partial_sums(solve_nested, equation, states):
        return
    operands, results = (tuple(states[p] for p in positions) for positions in (range(n), range(n, n + count)))
    if all(s == (operands + results)[p] for p, s in known.items()):
        yield as_match([solved], operands, results)


def solves_partial_sums(solve_nested: NestedSolve, equation: Equation, states: Mapping[int, State]) -> bool:
    """Return whether both solvers map partial sums of the right sides that are replicated to partial sums of the solutions.

    The cotangents of a replicated solution are partial sums. JAX takes every solver to be linear in its right sides, but one that
    stops early is not: the steps of conjugate gradients depend on the residual.

    Args:
        solve_nested: solves its programs.
        equation: the equation.
        states: states of the operands by position.
    """
    closed_over, right = split_operands(equation, [states[p] for p in range(len(equation.operands))])
    partial = [PARTIAL if s == REPLICATED else s for s in right]
    for name in {"solve", "transpose_solve"}.intersection(program_names(equation)):
        body = solve_program(equation, name)
        sums = {v: s for v, s in zip(body.outputs, partial, strict=False) if isinstance(v, int) and s == PARTIAL}
        inputs = dict(zip(body.inputs, (*closed_over[name], *partial), strict=True))
        if any(inputs.get(v, s) != s for v, s in sums.items()):  # an operand that is returned as it is
            return False
        solution = solve_nested(body, inputs | sums)
        if solution is None or any(agreements(body, solution)):
            return False
    return True
