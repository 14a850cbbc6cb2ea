"""Values on which no result depends, though a gradient may flow to them: XLA removes the collectives that would move them.

A product in 8 bits reads each operand twice: rounded, to multiply it, and as it was, because the gradient belongs to that one.
"""

from __future__ import annotations

from functools import lru_cache

from unity.pcg.ir.graph import PARALLELIZATION, Node, Value
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.jaxprs import CUSTOM_VJP
from unity.pcg.parallel.constant_cotangents import Uses
from unity.pcg.propagation.nested.derivative_rules import unread_values


def is_unread(v: Value, uses: Uses) -> bool:
    """Return whether no result depends on a value: only such operands of derivative rules read it, or changes of its type."""
    users = uses.get(v, ())
    return bool(users) and all(use is not None and _leaves_unread(*use, uses) for use in users)


def _leaves_unread(node: Node, position: int, uses: Uses) -> bool:
    return is_unread(Value(node), uses) if node.kind in PARALLELIZATION else leaves_unread(node, position)


def leaves_unread(node: Node, position: int) -> bool:
    """Return whether the results of an operator, and its residuals, are independent of the value of one of its operands."""
    return node.body is not None and node.body.inputs[position] in _unread_inputs(node.body)


@lru_cache(maxsize=4096)
def _unread_inputs(body: Body) -> frozenset[int]:
    """Return the inputs of a body whose values only derivative rules read that do not depend on them."""
    unread, read = set[int](), {a for a in body.outputs if isinstance(a, int)}
    for e in body.equations:
        places = unread_values(e) if e.name in CUSTOM_VJP else frozenset[int]()
        for p, a in enumerate(e.operands):
            if isinstance(a, int):
                (unread if p in places else read).add(a)
    return frozenset(unread.intersection(body.inputs) - read)
