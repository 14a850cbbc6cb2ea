"""Operands that a call with a derivative rule takes and nobody reads.

Packages pass values through such a call only to see, or to refuse, that they are differentiated: Equinox's loops give all weights
to one. If neither its program nor its derivative needs an operand, nothing has to be gathered for it, and no gradient comes back.
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
    """Returns the body with zeros in the place of operands that their calls do not need."""
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
    """The operands that neither the program of a `custom_jvp` nor its derivative rule reads, for values or for tangents."""
    program = nested_body(call)
    read = _read(program)
    places = [p for p, v in enumerate(program.inputs) if v not in read]
    if not places:  # as nearly always, and a rule takes long to trace
        return ()
    try:
        rule = jvp_body(call)
    except Unreadable:
        return ()
    needed = _read(rule.body)
    tangents = iter(rule.body.inputs[len(call.operands) :])
    moves = [floating and next(tangents) in needed for floating in rule.floating]
    return tuple(p for p in places if rule.body.inputs[p] not in needed and not moves[p])


def _read(body: Body) -> set[int]:
    """The variables that a body's outputs depend on."""
    equations = used(body).equations
    return {a for e in equations for a in e.operands if isinstance(a, int)} | {a for a in body.outputs if isinstance(a, int)}
