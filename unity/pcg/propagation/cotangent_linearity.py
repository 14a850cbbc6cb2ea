"""Derivative rules that are not linear in their cotangent, such as one that clips a gradient.

Two equal calls may become one only if their gradients add up to that of the one call with the sum of both cotangents. A loop that
runs backward passes before the cotangent of the loss is known computes gradients for a cotangent of one, and multiplies them by
that of the loss afterwards. Both are right if every derivative rule inside is linear in its cotangent.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import jax.numpy as jnp
import numpy as np

from unity.pcg.ir.nested_programs import bodies
from unity.pcg.ir.program import Atom, Body, Equation, Literal
from unity.pcg.propagation.constants import constants
from unity.pcg.propagation.nested.derivative_rules import Unreadable, is_reverse_only, vjp_bodies
from unity.pcg.propagation.solver import NESTED, equation_matches
from unity.pcg.types.accumulation import narrow
from unity.pcg.types.factors import TABLE
from unity.pcg.types.parallel_type import PARTIAL

ROUNDING = ("convert_element_type", "reduce_precision")  # linear but for rounding


@lru_cache(maxsize=4096)
def nonlinear_call(body: Body, is_strict: bool = False) -> Equation | None:
    """Return the first call of a program, nested programs included, whose derivative rule is not linear in its cotangent.

    Args:
        body: the program.
        is_strict: whether rules that cannot be read count, and those that round to a narrower type or apply a primitive without an
            entry in the operator table, such as a kernel. Otherwise all these are taken to be linear.
    """
    for e in body.equations:
        if is_reverse_only(e):
            if not _is_linear_rule(e, is_strict):
                return e
        else:
            for program in bodies(e):
                if (call := nonlinear_call(program, is_strict)) is not None:
                    return call
    return None


def _is_linear_rule(call: Equation, is_strict: bool) -> bool:
    """Return whether the rule of a call is linear in the cotangents of the call's results."""
    try:
        rule = vjp_bodies(call).backward
    except Unreadable:
        return not is_strict
    backward = _widened(rule)
    dependent = set(backward.inputs[len(backward.inputs) - len(call.results) :])
    for e in backward.equations:
        if not dependent.isdisjoint(a for a in e.operands if isinstance(a, int)):
            if is_strict and (_is_unknown(e) or _narrows(rule, e)):
                return False
            if not (_is_unknown(e) or _is_linear(backward, e, dependent)):
                return False
            dependent.update(e.results)
    return all(a in dependent or _is_zero(backward, a) for a in backward.outputs)  # no constant gradient


def _is_unknown(e: Equation) -> bool:
    """Return whether neither the operator table nor a nested program tells what an equation is linear in."""
    return e.name not in TABLE and e.name not in NESTED and e.name not in ROUNDING


def _narrows(body: Body, e: Equation) -> bool:
    """Return whether an equation rounds to fewer bits."""
    if e.name == "reduce_precision":
        return True
    operand, result = body.tensor(e.operands[0]) if e.operands else None, body.tensors[e.results[0]]
    if e.name != "convert_element_type" or operand is None or not (operand.floating and result.floating):
        return False
    return jnp.finfo(result.dtype).nmant < jnp.finfo(operand.dtype).nmant


def _is_linear(body: Body, e: Equation, dependent: set[int]) -> bool:
    """Return whether an equation is linear in its operands that depend on a cotangent: sums of these give sums of results."""
    if e.name in ROUNDING:
        return all(body.tensors[v].floating for v in e.results)
    n = len(e.operands)
    known = {p: PARTIAL for p, a in enumerate(e.operands) if a in dependent} | {n + k: PARTIAL for k in range(len(e.results))}
    others = [p for p, a in enumerate(e.operands) if p not in known and not _is_zero(body, a)]
    matches = equation_matches(body, e, known)
    return any(not m.agreed and all(m.operands[p] != PARTIAL for p in others) for m in matches)


def _widened(body: Body) -> Body:
    """Return a program with its narrow numbers as float32: products of narrow sums round them, which is ignored here."""
    tensors = {v: replace(t, dtype=np.dtype(np.float32)) if t.floating and narrow(t.dtype) else t for v, t in body.tensors.items()}
    return replace(body, tensors=tensors)


def _is_zero(body: Body, atom: Atom) -> bool:
    return atom.zero if isinstance(atom, Literal) else atom in constants(body).zero
