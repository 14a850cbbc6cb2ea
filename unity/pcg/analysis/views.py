"""Views: programs whose result aliases their operand, or a block of it, so that nothing runs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax.numpy as jnp

from unity.pcg.ir.graph import UNCHANGED, Node
from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.specifications import spec_of
from unity.pcg.types.factors import Role, facts_of


@lru_cache(maxsize=65536)
def is_view(body: Body) -> bool:
    """Return whether every equation of a program is a view by the operator table (`Spec.view`), so that it compiles to nothing.

    A program without operands computes a constant, which is a view of nothing.
    """
    return bool(body.inputs and body.equations) and all(_is_view(body, e) for e in body.equations)


@lru_cache(maxsize=65536)
def is_conversion(body: Body) -> bool:
    """Return whether a program consists of views and conversions to other types: no collective waits for its derivative."""
    return bool(body.inputs and body.equations) and all(
        _is_view(body, e) or facts_of(e.name).role is Role.CONVERSION for e in body.equations
    )


@lru_cache(maxsize=65536)
def costs_nothing(body: Body) -> bool:
    """Return whether a program consists of views and index arithmetic only.

    Index arithmetic, such as on a loop counter, is on single integers; it fuses with its users and its cost is ignored.
    """
    return bool(body.equations) and all(_is_index_arithmetic(body, e) or _is_view(body, e) for e in body.equations)


def _is_view(body: Body, equation: Equation) -> bool:
    spec = spec_of(body, equation)
    return spec is not None and spec.view


def _is_index_arithmetic(body: Body, equation: Equation) -> bool:
    """Return whether an equation of the operator table computes single integers or booleans from such."""
    tensors = [body.tensor(a) for a in (*equation.operands, *equation.results)]
    return spec_of(body, equation) is not None and all(t.ndim == 0 and _is_integer(t.dtype) for t in tensors)


def _is_integer(dtype: Any) -> bool:
    """Return whether a dtype is of integers or booleans. JAX answers for the dtypes of keys, too, which NumPy does not know."""
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_)


def of_argument(node: Node) -> bool:
    """Return whether a value is an argument of the program, a view or a conversion of one, perhaps after changes of type."""
    while node.operands and (node.kind in UNCHANGED or (node.body is not None and is_conversion(node.body))):
        node = node.operands[0].node
    return node.kind == "input"
