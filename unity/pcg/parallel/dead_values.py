"""Dead values: those that only derivative rules take, and ignore. XLA removes the collectives that would move them.

A product in 8 bits takes each operand twice: rounded, to multiply it, and as it was, because the gradient belongs to that one. The
latter's cotangent is needed, but its value is dead.
"""

from __future__ import annotations

from functools import lru_cache

from unity.pcg.ir.graph import PARALLELIZATION, Node, Value
from unity.pcg.ir.program import Body
from unity.pcg.jaxprs.jaxprs import CUSTOM_VJP
from unity.pcg.parallel.constant_cotangents import Uses
from unity.pcg.propagation.nested.derivative_rules import ignored_operands


def is_dead(v: Value, uses: Uses) -> bool:
    """Return whether a value has users, and all of them ignore it, possibly behind changes of its type."""
    users = uses.get(v, ())
    return bool(users) and all(use is not None and _is_dead_at(*use, uses) for use in users)


def _is_dead_at(node: Node, position: int, uses: Uses) -> bool:
    return is_dead(Value(node), uses) if node.kind in PARALLELIZATION else ignores(node, position)


def ignores(node: Node, position: int) -> bool:
    """Return whether an operator's results and residuals are independent of the value of one of its operands."""
    return node.body is not None and node.body.inputs[position] in _ignored_inputs(node.body)


@lru_cache(maxsize=4096)
def _ignored_inputs(body: Body) -> frozenset[int]:
    """Return the inputs of a body that are operands of nothing but calls that ignore their values."""
    ignored, read = set[int](), {a for a in body.outputs if isinstance(a, int)}
    for e in body.equations:
        places = ignored_operands(e) if e.name in CUSTOM_VJP else frozenset[int]()
        for p, a in enumerate(e.operands):
            if isinstance(a, int):
                (ignored if p in places else read).add(a)
    return frozenset(ignored.intersection(body.inputs) - read)
