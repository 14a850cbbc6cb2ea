"""Value numbering: equal equations of the same operands are computed once, if the gradient stays what it is."""

from __future__ import annotations

from dataclasses import replace

from unity.pcg.ir.program import Body, Equation, Literal
from unity.pcg.jaxprs.jaxprs import NESTING
from unity.pcg.operators.table import TABLE
from unity.pcg.propagation.cotangent_linearity import nonlinear_call


def deduplicated(body: Body) -> Body:
    """Compute equal equations once: a mean taken for itself and for a variance, but also products, loops and conditionals."""
    first: dict[tuple, tuple[int, ...]] = {}
    same: dict[int, int] = {}
    equations = []
    for e in body.equations:
        if same and any(a in same for a in e.operands if isinstance(a, int)):
            e = e.reading(tuple(same.get(a, a) if isinstance(a, int) else a for a in e.operands))
        if _is_pure(e):
            content = (e.signature, e.identity, *(a.key if isinstance(a, Literal) else a for a in e.operands))
            results = first.setdefault(content, e.results)
            if results is not e.results and gradients_add_up(body, e):
                same.update(zip(e.results, results, strict=True))
                continue
        equations.append(e)
    outputs = tuple(same.get(a, a) if isinstance(a, int) else a for a in body.outputs)
    return Body(body.inputs, outputs, tuple(equations), body.tensors)


def _is_pure(e: Equation) -> bool:
    """Return whether two such equations of the same operands have the same results."""
    return e.name in NESTING or (e.name in TABLE and not TABLE[e.name].facts.distinct)


def gradients_add_up(body: Body, e: Equation) -> bool:
    """Return whether the gradients of two such equations add up to that of one with the sum of their cotangents.

    They do not where a derivative rule, the equation's or one inside, clips its cotangent, or adds something to it. A rule that
    nobody can read may do so.
    """
    return nonlinear_call(replace(body, equations=(e,)), unknown_is_linear=False) is None
