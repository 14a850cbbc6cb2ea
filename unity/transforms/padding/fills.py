"""The values in the padding of a tensor, and the operators that need others.

The padding of every floating tensor is one finite constant, its *fill*. An elementwise operator computes a fill from fills, which
is accepted only if it and all derivatives there are finite. So a cotangent of zero stays zero, and whatever a reduction or a
product adds up over padding is its neutral element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from unity.pcg.ir.program import Equation, Literal, Tensor
from unity.pcg.types.factors import Role, Slot, Spec, facts_of
from unity.pcg.types.parallel_type import Shape

Fill = Any  # a Python number; None for integers and booleans whose padding has several values


def enlarged(shape: Shape, sizes: Mapping[int, int]) -> Shape:
    """Return a shape with other sizes of some dimensions."""
    return tuple(sizes.get(d, n) for d, n in enumerate(shape))


def inside(shape: Shape, true: Mapping[int, int]) -> jax.Array:
    """Return whether each element of an array lies before the true sizes of some dimensions."""
    masks = [lax.broadcasted_iota(jnp.int32, shape, d) < n for d, n in true.items()]
    mask = masks[0]
    for other in masks[1:]:
        mask = lax.bitwise_and(mask, other)
    return mask


def filled(x: jax.Array, true: Mapping[int, int], fill: Fill) -> jax.Array:
    """Return an array with a constant in its padding, from where no cotangent flows."""
    return lax.select(inside(x.shape, true), x, jnp.full(x.shape, fill, x.dtype))


def is_elementwise(e: Equation, spec: Spec, operands: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    """Return whether each element of the only result is a function of the operands' elements at its place.

    It is one that the primitive computes for operands of any shape: parameters of `tile`, and those of a primitive that returns
    a list, may contain shapes.
    """
    facts = facts_of(e.name)
    if (
        len(results) != 1
        or not operands
        or e.name == "tile"
        or e.primitive.multiple_results
        or facts.alone
        or facts.looks_up
        or facts.draws
        or facts.key
        or facts.role not in (Role.WORK, Role.CONVERSION)
    ):
        return False
    if any(jnp.issubdtype(t.dtype, jax.dtypes.extended) for t in (*operands, *results)):
        return False
    shape = results[0].shape
    alike = all(
        not t.shape or (t.ndim == len(shape) and all(n in (1, m) for n, m in zip(t.shape, shape, strict=True))) for t in operands
    )
    places = {f.results[0] for f in spec.factors if not f.reduction and f.halo is None and not f.optional}
    return alike and places == {Slot(d) for d, n in enumerate(shape) if n > 1}


def constant_of(literal: Literal) -> Fill:
    """Return the number of a literal with one element, else None."""
    return np.asarray(literal.value).item() if prod(literal.tensor.shape) == 1 else None


def result_fill(e: Equation, fills: Sequence[Fill], dtypes: Sequence[Any], active: Sequence[int]) -> Fill:
    """Return the fill of an elementwise operator's floating result, or None if it or a derivative at the fills is not finite.

    Args:
        e: The operator.
        fills: The fills of its operands.
        dtypes: Their element types.
        active: The operands in which it is differentiated.
    """
    operands = [jnp.asarray(fill, dtype) for fill, dtype in zip(fills, dtypes, strict=True)]

    def run(*chosen: jax.Array) -> jax.Array:
        values = dict(zip(active, chosen, strict=True))
        return e.primitive.bind(*(values.get(k, x) for k, x in enumerate(operands)), **e.params)

    chosen = [operands[k] for k in active]
    try:
        result, back = jax.vjp(run, *chosen)
        derivatives = back(jnp.ones_like(result))
    except NotImplementedError:  # a function without a derivative, which no program differentiates
        result, derivatives = run(*chosen), ()
    finite = all(bool(jnp.all(jnp.isfinite(x))) for x in (result, *derivatives))
    return np.asarray(result).item() if finite else None
