"""Sums over the batch dimensions of products, as contractions: a `psum` of products of pieces is one product of whole arrays."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

from jax.extend import core

from unity.pcg.jaxprs.jaxprs import Program, each, equations, with_equations, with_nested


def contracted(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Replace sums over batch dimensions of products, which nothing else reads, by products that contract these dimensions."""
    every = [e for eqn in program.eqns for e in (eqn, *equations(eqn))]
    nested = (p for e in every for p in each(e.params) if isinstance(p, Program))
    atoms = chain(*(e.invars for e in every), *(p.outvars for p in (program.jaxpr, *(getattr(p, "jaxpr", p) for p in nested))))
    uses = Counter(v for v in atoms if isinstance(v, core.Var))
    products = {e.outvars[0]: e for e in every if e.primitive.name == "dot_general" and uses[e.outvars[0]] == 1}

    def change(eqn: core.JaxprEqn) -> core.JaxprEqn:
        variable = eqn.invars[0] if eqn.primitive.name == "reduce_sum" else None
        product = products.get(variable) if isinstance(variable, core.Var) else None
        if product is not None and all(axis < len(_dimensions(product)[1][0]) for axis in eqn.params["axes"]):
            contraction = _with_contraction(eqn, product)
            if uses[eqn.outvars[0]] == 1:  # perhaps by a sum over another axis
                products[eqn.outvars[0]] = contraction
            return contraction
        return with_nested(eqn, change)

    return with_equations(program, change)


def _dimensions(product: core.JaxprEqn) -> Any:
    """Return the (contracted, batch) dimensions of a product's two operands. Batch dimensions come first in its result."""
    return product.params["dimension_numbers"]


def _with_contraction(total: core.JaxprEqn, product: core.JaxprEqn) -> core.JaxprEqn:
    """Return a product that contracts the batch dimensions that a sum is over."""
    contracting, batch = _dimensions(product)
    summed = [tuple(dims[axis] for axis in total.params["axes"]) for dims in batch]
    rest = tuple(tuple(d for k, d in enumerate(dims) if k not in total.params["axes"]) for dims in batch)
    dims = tuple((*more, *before) for more, before in zip(summed, contracting, strict=True)), rest
    return product.replace(outvars=total.outvars, params={**product.params, "dimension_numbers": dims})
