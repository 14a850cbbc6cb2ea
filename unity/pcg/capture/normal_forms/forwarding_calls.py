"""Removal of calls with a derivative rule that only forward operands and their tangents.

Packages use such calls to stop tangents, or to refuse some: Equinox passes all that a loop returns through one. Nothing relates the
operands of such a call, so the number of ways to divide them is exponential in their number.
"""

from __future__ import annotations

from collections.abc import Sequence

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Atom, Body, Equation, Literal
from unity.pcg.ir.tracing import stop_gradient
from unity.pcg.jaxprs.jaxprs import CUSTOM_JVP
from unity.pcg.propagation.nested.derivative_rules import (
    Flags,
    Unreadable,
    differentiable_operands,
    jvp_body,
    unread_operands,
    value_body,
)
from unity.pcg.propagation.propagation import constants


def without_forwarding_calls(body: Body) -> Body:
    """Return a body that reads the operands which such calls forward, behind a `stop_gradient` where the rule stops a tangent."""
    same: dict[int, Atom] = {}
    equations = list[Equation]()

    def read(atom: Atom) -> Atom:
        return same.get(atom, atom) if isinstance(atom, int) else atom

    for e in body.equations:
        e = e.reading(tuple(map(read, e.operands))) if same else e
        places = _forwarded_places(e) if e.name in CUSTOM_JVP else None
        passed = None if places is None else _passed_tangents(e, places)
        if places is None or passed is None:
            equations.append(e)
            continue
        for v, place, passes in zip(e.results, places, passed, strict=True):
            operand = e.operands[place]
            if passes or isinstance(operand, Literal):
                same[v] = operand
            else:
                equations.append(stop_gradient(operand, v, e.source))
    unchanged = tuple(equations) == body.equations
    return body if unchanged else Body(body.inputs, tuple(map(read, body.outputs)), tuple(equations), body.tensors)


def _forwarded_places(call: Equation) -> tuple[int, ...] | None:
    """Return for each result of a call the operand that it is, by number; None if the call computes anything."""
    program = value_body(call)
    if program is None or used(program).equations or not all(a in program.inputs for a in program.outputs):
        return None
    return tuple(program.inputs.index(a) for a in program.outputs if isinstance(a, int))


def _passed_tangents(call: Equation, places: Sequence[int]) -> list[bool] | None:
    """Return for each result whether the rule of a call passes the tangent of the operand that it is; otherwise, it is stopped.

    None if a tangent is anything else, or depends on which of the operands that the rule reads have one.
    """
    differentiable = (False,) * len(call.operands) if call.undifferentiated else differentiable_operands(call)
    unread = unread_operands(call)
    flags = [differentiable]
    if call.params.get("symbolic_zeros"):
        alone = [p for p in dict.fromkeys(places) if differentiable[p]]
        flags += [tuple(f and (q == p or q in unread) for q, f in enumerate(differentiable)) for p in alone]
    passed: list[bool] = []
    for k, place in enumerate(places):
        kinds = {_passes(call, some, k, place) for some in flags if some[place]} or {True}
        kind = kinds.pop()
        if kind is None or kinds:
            return None
        passed.append(kind)
    return passed


def _passes(call: Equation, differentiated: Flags, result: int, place: int) -> bool | None:
    """Return whether the tangent of a result is that of an operand; None if it is neither that nor zero.

    Args:
        call: the call.
        differentiated: for each operand whether it has a tangent.
        result: the result's number.
        place: the operand's number.
    """
    try:
        rule = jvp_body(call, differentiated).body
    except Unreadable:
        return None
    tangent = rule.outputs[len(call.results) + result]
    if tangent == rule.inputs[len(call.operands) + sum(differentiated[:place])]:
        return True
    is_zero = tangent.zero if isinstance(tangent, Literal) else tangent in constants(rule).zero
    return False if is_zero else None
