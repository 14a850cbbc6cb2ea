"""Removal of operands that a call with a custom derivative takes and nothing reads.

Packages pass values through such a call only to detect, or to refuse, that they are differentiated: Equinox's loops pass all
weights to one. If neither its program nor its derivative reads an operand, no device needs to gather it, and it has no gradient.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
from jax.extend.core import primitives

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.program import Body, Equation, Literal, Tensor, tensor_type
from unity.pcg.propagation.derivative_rules import Unreadable, jvp_body
from unity.pcg.propagation.solver import nested_body


def without_unread(body: Body) -> Body:
    """Return a body with zeros in the place of operands that their calls do not read."""
    equations, tensors = list[Equation](), dict(body.tensors)
    for e in body.equations:
        places = [p for p in _unread(e) if isinstance(e.operands[p], int)] if e.name == "custom_jvp_call" else []
        operands = list(e.operands)
        for p in places:
            v = max(tensors) + 1
            tensors[v] = body.tensor(operands[p])
            equations.append(_zeros(tensors[v], v, e))
            operands[p] = v
        equations.append(e.reading(tuple(operands)) if places else e)
    return Body(body.inputs, body.outputs, tuple(equations), tensors) if len(tensors) > len(body.tensors) else body


def _zeros(tensor: Tensor, variable: int, call: Equation) -> Equation:
    params = {"shape": tensor.shape, "broadcast_dimensions": (), "sharding": None}
    zero = Literal(np.zeros((), tensor.dtype), tensor_type((), tensor.dtype))
    return replace(
        call, primitive=primitives.broadcast_in_dim_p, params=params, operands=(zero,), results=(variable,), origin=None, still=()
    )


@lru_cache(maxsize=1024)
def _unread(call: Equation) -> tuple[int, ...]:
    """Return the operands of a `custom_jvp` that neither its program nor its derivative rule reads, by value or by tangent."""
    program = nested_body(call)
    read = _read_variables(program)
    places = [p for p, v in enumerate(program.inputs) if v not in read]
    if not places:  # nearly always; tracing a rule is slow
        return ()
    try:
        rule = jvp_body(call)
    except Unreadable:
        return ()
    read_by_rule = _read_variables(rule.body)
    tangents = iter(rule.body.inputs[len(call.operands) :])
    active = [floating and next(tangents) in read_by_rule for floating in rule.floating]
    return tuple(p for p in places if rule.body.inputs[p] not in read_by_rule and not active[p])


def _read_variables(body: Body) -> set[int]:
    """Return the variables that a body's outputs depend on."""
    equations = used(body).equations
    return {a for e in equations for a in e.operands if isinstance(a, int)} | {a for a in body.outputs if isinstance(a, int)}
