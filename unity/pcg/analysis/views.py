"""Views: programs whose result lies as their operand does, or as a block of it, so that nothing of them runs."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from unity.pcg.ir.graph import UNCHANGED, Node
from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.solver import spec_of


@lru_cache(maxsize=65536)
def is_view(body: Body) -> bool:
    """Whether a compiler makes nothing of a program: every equation is a view, as the operator table says (`Spec.view`)."""
    return bool(body.equations) and all(_views(body, e) for e in body.equations)


@lru_cache(maxsize=65536)
def costs_nothing(body: Body) -> bool:
    """Whether a program consists of views and of index arithmetic, which is computed where it is used: single integers, as the
    number of a loop's step, which nobody counts, either."""
    return bool(body.equations) and all(_indexes(body, e) or _views(body, e) for e in body.equations)


def _views(body: Body, equation: Equation) -> bool:
    spec = spec_of(body, equation)
    return spec is not None and spec.view


def _indexes(body: Body, equation: Equation) -> bool:
    """Whether an equation of the table makes single integers or truth values of such."""
    tensors = [body.tensor(a) for a in (*equation.operands, *equation.results)]
    return spec_of(body, equation) is not None and all(t.ndim == 0 and np.dtype(t.dtype).kind in "iub" for t in tensors)


def of_argument(node: Node) -> bool:
    """Whether a value is an argument of the program, or a view of one, however its type was changed."""
    while node.operands and (node.kind in UNCHANGED or (node.body is not None and is_view(node.body))):
        node = node.operands[0].node
    return node.kind == "input"
