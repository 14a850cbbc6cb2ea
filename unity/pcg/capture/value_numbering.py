"""Value numbering: equal equations of the same operands are computed once, if the gradient stays what it is.

The gradients of two equal calls do not add up to that of one call where a derivative rule is not linear in its cotangent. Such
calls are numbered. The number is part of their content, so that whatever compares programs by content tells them apart, too.
"""

from __future__ import annotations

from dataclasses import replace

from unity.pcg.ir.program import Body, Equation, Literal
from unity.pcg.jaxprs.jaxprs import NESTING
from unity.pcg.operators.table import TABLE
from unity.pcg.propagation.cotangent_linearity import nonlinear_call
from unity.pcg.types.factors import facts_of


def deduplicated(body: Body) -> Body:
    """Compute equal equations once: a mean taken for itself and for a variance, but also products, loops and conditionals."""
    first: dict[tuple, tuple[int, ...]] = {}
    same: dict[int, int] = {}
    equations = []
    for e in body.equations:
        if same and any(a in same for a in e.operands if isinstance(a, int)):
            e = e.reading(tuple(same.get(a, a) if isinstance(a, int) else a for a in e.operands))
        if _is_pure(e):
            while (results := first.setdefault(_content(e), e.results)) is not e.results and not gradients_add_up(body, e):
                e = replace(e, occurrence=e.occurrence + 1)
            if results is not e.results:
                same.update(zip(e.results, results, strict=True))
                continue
        equations.append(e)
    outputs = tuple(same.get(a, a) if isinstance(a, int) else a for a in body.outputs)
    return Body(body.inputs, outputs, tuple(equations), body.tensors)


def with_numbered_calls(body: Body) -> Body:
    """Number the calls of a program that equal earlier ones and must stay apart from them, and leave all else as it is."""
    calls = [e.signature for e in body.equations if e.name in NESTING]
    if len(set(calls)) == len(calls):  # nearly always
        return body
    numbers: dict[tuple, int] = {}
    values: dict[int, tuple[int, int]] = {}  # of each variable, the number of its equation's content, and which result it is
    equations = []
    for e in body.equations:
        operands = [a.key if isinstance(a, Literal) else values.get(a, a) for a in e.operands]
        operands = sorted(operands, key=repr) if facts_of(e.name).commutative else operands
        while (key := (e.signature, e.identity, *operands)) in numbers and not gradients_add_up(body, e):
            e = replace(e, occurrence=e.occurrence + 1)
        number = numbers.setdefault(key, len(numbers))
        values.update((v, (number, k)) for k, v in enumerate(e.results))
        equations.append(e)
    return replace(body, equations=tuple(equations))


def _content(e: Equation) -> tuple:
    return (e.signature, e.identity, *(a.key if isinstance(a, Literal) else a for a in e.operands))


def _is_pure(e: Equation) -> bool:
    """Return whether two such equations of the same operands have the same results."""
    return e.name in NESTING or (e.name in TABLE and not TABLE[e.name].facts.distinct)


def gradients_add_up(body: Body, e: Equation) -> bool:
    """Return whether the gradients of two such equations add up to that of one with the sum of their cotangents.

    They do not where a derivative rule, the equation's or one inside, clips or rounds its cotangent, or adds something to it. A
    rule that cannot be read may do so.
    """
    return e.name not in NESTING or nonlinear_call(replace(body, equations=(e,)), is_strict=True) is None
