"""Views: programs whose result is their operand in another shape, or a block of it, so that no code runs for them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax.numpy as jnp

from unity.pcg.ir.graph import UNCHANGED, Node
from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.solver import spec_of


@lru_cache(maxsize=65536)
def is_view(body: Body) -> bool:
    """Return whether a program compiles to nothing: every equation is a view by the operator table (`Spec.view`)."""
    return bool(body.equations) and all(_views(body, e) for e in body.equations)


@lru_cache(maxsize=65536)
def costs_nothing(body: Body) -> bool:
    """Return whether a program consists of views and of arithmetic on integer scalars, such as the number of a loop's step."""
    return bool(body.equations) and all(_indexes(body, e) or _views(body, e) for e in body.equations)


def _views(body: Body, equation: Equation) -> bool:
    spec = spec_of(body, equation)
    return spec is not None and spec.view


def _indexes(body: Body, equation: Equation) -> bool:
    """Return whether an equation computes integer or boolean scalars from such scalars."""
    tensors = [body.tensor(a) for a in (*equation.operands, *equation.results)]
    return spec_of(body, equation) is not None and all(t.ndim == 0 and _counts(t.dtype) for t in tensors)


def _counts(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)


def of_argument(node: Node) -> bool:
    """Return whether a value is an argument of the program, or a view of one, under any changes of type."""
    while node.operands and (node.kind in UNCHANGED or (node.body is not None and is_view(node.body))):
        node = node.operands[0].node
    return node.kind == "input"
