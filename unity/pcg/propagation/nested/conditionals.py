"""Choices of conditionals: those on which all branches agree."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.nested.agreements import as_match, constant_results
from unity.pcg.propagation.nested.loops import NestedSolve
from unity.pcg.propagation.nested.programs import branches
from unity.pcg.propagation.propagation import Solution
from unity.pcg.types.factors import Match
from unity.pcg.types.parallel_type import REPLICATED, State


def cond_matches(solve_nested: NestedSolve, equation: Equation, known: Mapping[int, State]) -> Iterator[Match]:
    """Yield the match of a `cond`, if there is one on which all branches agree.

    The index is the same on every device.

    Args:
        solve_nested: solves its branches.
        equation: the equation.
        known: states by position, of operands and then of results.
    """
    n = len(equation.operands)
    if known.get(0, REPLICATED) != REPLICATED:
        return
    operands: dict[int, State] = {p: s for p, s in known.items() if 0 < p < n}
    results: dict[int, State] = {p - n: s for p, s in known.items() if p >= n}
    solved: dict[int, tuple[Body, Solution]] = {}
    for last in (False, True):  # the second round sees the states that the last branch fixed in the first
        for b, branch in enumerate(branches(equation)):
            states = {branch.inputs[p - 1]: s for p, s in operands.items()}
            states |= {v: results[k] for k, v in enumerate(branch.outputs) if k in results and isinstance(v, int)}
            solution = solve_nested(branch, states)
            if solution is None:
                return
            solved[b] = branch, solution
            # values that a branch forwards, ignores or computes from constants may be in any state, which other branches may fix
            free = {v for v in branch.inputs if v not in branch.touching and v not in states} | constant_results(branch)
            free = set() if last else free
            operands |= {p: s for p, (v, s) in enumerate(zip(branch.inputs, solution.operands, strict=True), 1) if v not in free}
            outputs = enumerate(zip(branch.outputs, solution.results, strict=True))
            results |= {k: s for k, (a, s) in outputs if isinstance(a, int) and a not in free}
    result_states = tuple(results.get(k, REPLICATED) for k in range(len(equation.results)))
    constant = {k for b in branches(equation) for k, a in enumerate(b.outputs) if not isinstance(a, int)}
    if all(result_states[k].kind == "R" for k in constant):  # a constant is whole
        yield as_match(solved.values(), (REPLICATED, *(operands[p] for p in range(1, n))), result_states)
