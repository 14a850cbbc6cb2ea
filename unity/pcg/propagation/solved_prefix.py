"""The longest prefix of a program that has a solution, and the equation after it, which error messages name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from unity.pcg.ir.program import Body
from unity.pcg.propagation.propagation import Solution, Unmatched
from unity.pcg.propagation.solver import solve
from unity.pcg.types.parallel_type import State


def longest_solved_prefix(body: Body, known: Mapping[int, State], patient: bool = True) -> tuple[Solution, int]:
    """Return the solution of the longest prefix of a body's equations that has one, by bisection, and the length of the prefix.

    Args:
        body: the body.
        known: states by variable.
        patient: as of `solve`.
    """

    def solved(length: int) -> Solution | None:
        equations = body.equations[:length]
        outputs = tuple(v for e in equations for v in e.results)
        try:
            return solve(replace(body, equations=equations, outputs=outputs), known, patient=patient)
        except Unmatched:
            return None

    good, bad, best = 0, len(body.equations) + 1, solve(replace(body, equations=(), outputs=()), known)
    middle = len(body.equations)
    while bad - good > 1:
        solution = solved(middle)
        good, bad, best = (good, middle, best) if solution is None else (middle, bad, solution)
        middle = (good + bad) // 2
    return best, good


def first_unmatched(body: Body, known: Mapping[int, State], patient: bool = True) -> tuple[int, Solution]:
    """Return the first equation, by number, with which a body without a solution has none, and the solution of those before it."""
    solution, length = longest_solved_prefix(replace(body, equations=body.equations[:-1]), known, patient)
    return length, solution
