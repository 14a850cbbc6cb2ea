"""A form of programs in which a product of a joined value is a sum of products, by the lemma `product-of-joined`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jax import lax

from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Body, Equation
from unity.pcg.propagation.nested.scan_programs import inside


def by_parts(body: Body) -> Body:
    """Return a program in which no product contracts a dimension along which an operand was joined, in nested programs, too."""
    body = _inside(body)
    writer, joins = EquationWriter.beside(body), dict[int, Equation]()
    for e in body.equations:
        places = [_JoinedOperand.of(e, side, joins) for side in (0, 1)] if e.name == "dot_general" else []
        place = next((p for p in places if p is not None), None)
        if e.name == "concatenate":
            joins[e.results[0]] = e
        if place is None:
            writer.equations.append(e)
            continue
        atoms = (*place.join.operands, e.operands[1 - place.side])
        writer.trace(_added(e, place), atoms, e, {0: e.results[0]})
    if len(writer.equations) == len(body.equations):
        return body
    # both operands of a product may have been joined
    return by_parts(Body(body.inputs, body.outputs, tuple(writer.equations), writer.tensors))


def _inside(body: Body) -> Body:
    """Return a program whose scans and checkpoints have the form of `by_parts` inside."""
    equations = []
    for e in body.equations:
        program = inside(e)
        new = None if program is None else by_parts(program)
        equations.append(e if new is program else replace(e, params={**e.params, "jaxpr": new}, origin=None))
    return replace(body, equations=tuple(equations))


@dataclass(frozen=True, eq=False)
class _JoinedOperand:
    """A join that computes an operand of a product, the side of it, and the joined dimension's place among the contracted ones."""

    join: Equation
    side: int
    number: int

    @classmethod
    def of(cls, product: Equation, side: int, joins: dict[int, Equation]) -> _JoinedOperand | None:
        operand = product.operands[side]
        join = joins.get(operand) if isinstance(operand, int) else None
        contracted = [int(d) for d in product.params["dimension_numbers"][0][side]]
        if join is None or len(join.operands) < 2 or join.params["dimension"] not in contracted:
            return None
        return cls(join, side, contracted.index(join.params["dimension"]))


def _added(product: Equation, place: _JoinedOperand) -> Callable[..., Any]:
    """Return the products of all joined values with their parts of the other operand, added from the left."""
    params = product.params
    along = int(params["dimension_numbers"][0][1 - place.side][place.number])

    def run(*values: Any) -> Any:
        joined, other = values[:-1], values[-1]
        sizes = [x.shape[place.join.params["dimension"]] for x in joined]
        products = []
        for x, y in zip(joined, lax.split(other, sizes, along), strict=True):
            left, right = (x, y) if place.side == 0 else (y, x)
            numbers, kinds = params["dimension_numbers"], (params["precision"], params["preferred_element_type"])
            products.append(lax.dot_general(left, right, numbers, precision=kinds[0], preferred_element_type=kinds[1]))
        total = products[0]
        for one in products[1:]:
            total = total + one
        return total

    return run
