"""Cotangents with the same constant in every element, such as that of `y` in `mean(y)`: XLA gathers no pieces of them.

It also folds sums of zeros over devices. A derivative rule may return zeros for an operand: those of products in 8 bits do for
rounded operands, because the gradient belongs to the operand before it was rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from unity.pcg.ir.differentiable_dependence import differentiated
from unity.pcg.ir.gradient_flow import losses, wanted_by
from unity.pcg.ir.graph import PARALLELIZATION, PCG, Node, Value
from unity.pcg.ir.program import Atom, Body, Equation, Literal
from unity.pcg.jaxprs.jaxprs import CUSTOM_VJP
from unity.pcg.parallel.equal_values import forwards_cotangent
from unity.pcg.propagation.constants import constants
from unity.pcg.propagation.nested.derivative_rules import Unreadable, vjp_bodies

Uses = Mapping[Value, Sequence[tuple[Node, int] | None]]  # the users of each value, as (node, operand); None is an output

# Primitives whose operand has the cotangent of the result in every element, or a multiple of it by a literal.
_UNIFORM = frozenset(
    {
        "reduce_sum",
        "reshape",
        "squeeze",
        "transpose",
        "convert_element_type",
        "copy",
        "neg",
        "add",
        "add_any",
        "sub",
        "real",
        "imag",
    }
)
_SCALED = frozenset({"mul", "div"})
# Operators behind which a cotangent is no known constant: XLA exchanges pieces even if all are equal, and a value that stops being
# replicated has its cotangent on some devices only.
_NOT_UNIFORM = frozenset({"combine_partition", "unreplicate"})


def has_constant_cotangent(v: Value, graph: PCG, uses: Uses) -> bool:
    """Return whether the cotangent of a value has the same constant in every element.

    It does if the value's only use leads to the loss, whose cotangent `jax.grad` sets to 1, by sums and multiples.
    """
    while True:
        users = uses.get(v, ())
        use = users[0] if len(users) == 1 else None
        if use is None:
            return v.tensor.shape == () and losses(graph) == (0,) and len(users) == 1 and v == graph.outputs[0]
        node, position = use
        if node.kind in PARALLELIZATION:
            if node.kind in _NOT_UNIFORM or (node.kind == "contribute" and not forwards_cotangent(node)):
                return False
            v = Value(node)
            continue
        output = None if node.body is None else _uniform_result(node.body, node.body.inputs[position])
        if output is None:
            return False
        v = Value(node, output)


def has_zero_cotangent(v: Value, uses: Uses) -> bool:
    """Return whether the cotangent of a value is zero: only derivative rules that return zeros for it read it.

    They read it directly, or behind changes of its type.
    """
    users = uses.get(v, ())
    return bool(users) and all(use is not None and _returns_zeros(*use, uses) for use in users)


def _returns_zeros(node: Node, position: int, uses: Uses) -> bool:
    """Return whether a node returns zeros as the cotangent of one of its operands."""
    if node.kind in PARALLELIZATION:
        return has_zero_cotangent(Value(node), uses)
    return node.body is not None and node.body.inputs[position] in _inputs_without_cotangent(node.body)


@lru_cache(maxsize=4096)
def _inputs_without_cotangent(body: Body) -> frozenset[int]:
    """Return the inputs of a body whose only differentiable readers are derivative rules that return zeros for them."""
    without, others = set[int](), {a for a in body.outputs if isinstance(a, int)}
    for e in body.equations:
        read = set(differentiated(e))
        for a, zero in zip(e.operands, _zero_cotangents(e), strict=True):
            if isinstance(a, int) and a in read:
                (without if zero else others).add(a)
    return frozenset(without.intersection(body.inputs) - others)


def _zero_cotangents(e: Equation) -> Sequence[bool]:
    """Return for each operand of an equation whether it is a call whose derivative rule returns zeros for it."""
    if e.name not in CUSTOM_VJP or e.undifferentiated:
        return [False] * len(e.operands)
    try:
        rule = vjp_bodies(e)
    except Unreadable:
        return [False] * len(e.operands)
    known = constants(rule.backward).zero
    zero = (a.zero if isinstance(a, Literal) else a in known for a in rule.backward.outputs)  # of `floating` operands alone
    return [flag and next(zero) for flag in rule.floating]


def _uniform_result(body: Body, variable: int) -> int | None:
    """Return the result, by number, that a variable leads to by sums and multiples alone, if there is one.

    Every element of the variable's cotangent is then the same multiple of the result's.
    """
    active = wanted_by(body, (True,) * len(body.outputs))
    while variable not in body.outputs:
        users = [e for e in body.equations if not active.isdisjoint(e.results) for a in differentiated(e) if a == variable]
        if len(users) != 1 or not _is_uniform(users[0], variable):
            return None
        variable = users[0].results[0]
    read = any(variable in e.operands for e in body.equations)
    return None if read or body.outputs.count(variable) > 1 else body.outputs.index(variable)


def _is_uniform(e: Equation, variable: int) -> bool:
    if e.name in _SCALED:
        one, other = e.operands
        return (one == variable and _is_number(other)) or (e.name == "mul" and other == variable and _is_number(one))
    return e.name in _UNIFORM


def _is_number(atom: Atom) -> bool:
    """Return whether an atom is one constant number, and not an array of several."""
    return isinstance(atom, Literal) and not atom.tensor.shape
