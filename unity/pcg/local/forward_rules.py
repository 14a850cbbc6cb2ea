"""The derivative rule of a `custom_jvp` on pieces, for the operands that have tangents when it runs.

With `symbolic_zeros`, a rule may ask which operands have a tangent, and return another derivative where one has none. It is planned
as if all had one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from jax.custom_derivatives import SymbolicZero

from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.nested.derivative_rules import JvpRule, Unreadable, jvp_body, unread_operands
from unity.pcg.propagation.placement import Placing, placing
from unity.pcg.propagation.propagation import Unmatched
from unity.pcg.types.parallel_type import Type


def rule_for(
    equation: Equation, tangents: Sequence[Any], types: tuple[Type, ...], results: tuple[Type, ...], n_axes: int
) -> tuple[JvpRule, Placing]:
    """Return the rule of a call for the operands that have tangents, and its solution along each axis.

    Operands that the call does not read count as if they had a tangent: zeros may be in their place (`capture.unread_operands`).
    If pieces of that rule's results are not those of the derivative, the rule for all tangents is returned, which takes zeros.

    Args:
        equation: the call.
        tangents: the tangents of its operands, `SymbolicZero` where there is none.
        types, results: the parallel types of its operands and results.
        n_axes: the number of axes of the mesh.
    """
    rule = jvp_body(equation)
    zero = [isinstance(t, SymbolicZero) for t in tangents]
    unread = unread_operands(equation) if any(zero) else frozenset[int]()
    active = tuple(f and (not z or p in unread) for p, (f, z) in enumerate(zip(rule.floating, zero, strict=True)))
    if any(active) and active != rule.floating:
        with suppress(Unreadable, Unmatched):
            other = jvp_body(equation, active)
            solutions = solutions_of(other, types, results, n_axes)
            if has_results(other.body, solutions, results * 2):
                return other, solutions
    return rule, solutions_of(rule, types, results, n_axes)


def solutions_of(rule: JvpRule, types: tuple[Type, ...], results: tuple[Type, ...], n_axes: int) -> Placing:
    """Return a rule's solution along each axis, with tangents of the types of their primals; raises Unmatched if it has none."""
    tangents = tuple(t for t, f in zip(types, rule.floating, strict=True) if f)
    return placing(rule.body, types + tangents, results * 2, n_axes)


def has_results(body: Body, solutions: Placing, types: Sequence[Type]) -> bool:
    """Return whether solutions along all axes lead to results of these types; a constant has any."""
    results = ((k, s.results) for k, s in enumerate(solutions) if s is not None)
    return all(
        state == t[k]
        for k, states in results
        for a, state, t in zip(body.outputs, states, types, strict=True)
        if isinstance(a, int)
    )
