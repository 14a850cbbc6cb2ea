"""Removal of operands on which no element of a result depends: no device needs to gather them, and they have no gradient.

A result without elements (`x[2:2]`) depends on no operand, and what is linear in operands without elements (the sum of `x[2:2]`) is
zero. Packages pass values through a call with a custom derivative only to detect, or to refuse, that they are differentiated:
Equinox's loops pass all weights to one, whose program and derivative read none.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.graph import CONSTRAIN
from unity.pcg.ir.program import Body, Equation, Literal, Tensor, tensor_type
from unity.pcg.propagation.nested.derivative_rules import unread_operands
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import facts_of


def without_unread(body: Body) -> Body:
    """Return a body with zeros in the place of results that no element of an operand enters, and of operands that no call reads."""
    equations, tensors = list[Equation](), dict(body.tensors)
    for e in body.equations:
        if _is_zero(body, e):
            equations += [_zeros(tensors[v], v, e) for v in e.results]
            continue
        places = [p for p in sorted(unread_operands(e)) if isinstance(e.operands[p], int)] if e.name == "custom_jvp_call" else []
        operands = list(e.operands)
        for p in places:
            v = max(tensors) + 1
            tensors[v] = body.tensor(operands[p])
            equations.append(_zeros(tensors[v], v, e))
            operands[p] = v
        equations.append(e.reading(tuple(operands)) if places else e)
    unchanged = tuple(equations) == body.equations
    return body if unchanged else used(Body(body.inputs, body.outputs, tuple(equations), tensors))


def _is_zero(body: Body, equation: Equation) -> bool:
    """Return whether results have no elements, or are zero as linear functions of operands without elements."""
    results = [body.tensors[v] for v in equation.results]
    if equation.name == CONSTRAIN or any(jnp.issubdtype(t.dtype, jax.dtypes.extended) for t in results):  # keys have no zero
        return False
    if all(0 in t.shape for t in results):
        return True
    places = range(len(equation.operands))
    empty = {p for p in places if 0 in body.tensor(equation.operands[p]).shape}
    spec = spec_of(body, equation) if empty else None
    groups = (*spec.linear, *facts_of(equation.name).linear_in) if spec is not None else ()
    return any(empty.issuperset(p for p in places if p in group) for group in groups)


def _zeros(tensor: Tensor, variable: int, equation: Equation) -> Equation:
    params = {"shape": tensor.shape, "broadcast_dimensions": (), "sharding": None}
    zero = Literal(np.zeros((), tensor.dtype), tensor_type((), tensor.dtype))
    return replace(
        equation,
        primitive=primitives.broadcast_in_dim_p,
        params=params,
        operands=(zero,),
        results=(variable,),
        origin=None,
        inactive=(),
    )
