"""Products of joined values in a scan's step as sums of products, so that those of the step's slices can leave the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from jax import lax

from unity.pcg.ir.dead_code import used
from unity.pcg.ir.equation_writer import EquationWriter
from unity.pcg.ir.program import Body, Equation
from unity.pcg.types.accumulation import narrow
from unity.transforms.loops.dependences import Dependence, ScanParts


@dataclass(frozen=True, eq=False)
class JoinedProduct:
    """A product with constants that contracts the dimension along which its other operand was joined.

    Attributes:
        product: the product.
        join: the concatenation that computes an operand of it.
        side: the number of that operand, 0 or 1.
    """

    product: Equation
    join: Equation
    side: int

    @property
    def dimension(self) -> int:
        """The dimension along which the operand was joined."""
        return int(self.join.params["dimension"])

    @property
    def along(self) -> int:
        """The dimension of the constant that is contracted with the joined one."""
        contracted, _ = self.product.params["dimension_numbers"]
        return int(contracted[1 - self.side][tuple(contracted[self.side]).index(self.dimension)])


def joined_products(parts: ScanParts) -> list[JoinedProduct]:
    """Return the products of a step with constants whose other operand joins slices with what depends on the carry.

    Parts of a sum are rounded each. So a product whose result is narrower than float32 stays as it is.
    """
    producers = {v: e for e in parts.step.equations for v in e.results}
    products = []
    for e in parts.step.equations:
        if e.name != "dot_general" or narrow(parts.step.tensors[e.results[0]].dtype):
            continue
        contracted, _ = e.params["dimension_numbers"]
        for side, (joined, fixed) in enumerate((e.operands, e.operands[::-1])):
            join = producers.get(joined) if isinstance(joined, int) else None
            constant = not isinstance(fixed, int) or parts.dependences[fixed] == Dependence.CONSTANTS
            if join is None or join.name != "concatenate" or not constant or join.params["dimension"] not in contracted[side]:
                continue
            levels = {parts.dependences[a] for a in join.operands if isinstance(a, int)}
            if {Dependence.SLICES, Dependence.CARRY} <= levels:
                products.append(JoinedProduct(e, join, side))
    return products


def add_with_parts(writer: EquationWriter, parts: ScanParts) -> bool:
    """Append a scan whose products of joined values are sums of products.

    Returns False, and appends the scan as it is, if it has none.
    """
    scan, step = parts.scan, parts.step
    joined = {id(j.product): j for j in joined_products(parts)}
    inner = EquationWriter.beside(step)
    for e in step.equations:
        if id(e) not in joined:
            inner.equations.append(e)
            continue
        j = joined[id(e)]
        atoms = (*j.join.operands, e.operands[1 - j.side])
        sizes = [inner.tensor(a).shape[j.dimension] for a in j.join.operands]
        inner.trace(_sum_of_parts(j, sizes), atoms, e, {0: e.results[0]})
    new = used(Body(step.inputs, step.outputs, tuple(inner.equations), inner.tensors))
    writer.equations.append(replace(scan, params={**scan.params, "jaxpr": new}, origin=None) if joined else scan)
    return bool(joined)


def _sum_of_parts(j: JoinedProduct, sizes: Sequence[int]) -> Callable[..., Any]:
    """Return the sum of the products of all parts as a function of the parts and the constant."""
    params = j.product.params
    others = {name: params[name] for name in ("precision", "preferred_element_type")}

    def run(*operands: Any) -> Any:
        *parts, constant = operands
        total: Any = None
        for part, size, end in zip(parts, sizes, accumulate(sizes), strict=True):
            piece = lax.slice_in_dim(constant, end - size, end, axis=j.along)
            pair = (part, piece) if j.side == 0 else (piece, part)
            product = lax.dot_general(*pair, params["dimension_numbers"], **others)
            total = product if total is None else lax.add(total, product)
        return total

    return run
