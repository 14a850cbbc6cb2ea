"""Gradients of a product's operands that are computed together on GPUs.

XLA's latency-hiding scheduler runs gradients of weights late, beside collectives, since nothing but the result waits for them. The
operands and the cotangent of the product wait with them, whatever memory that takes: of Llama-3-8B with remat, 8.4 GB for the
cotangent of the logits. A barrier over the gradients of both operands lets nothing go on from the one before the other is computed,
so that memory is what the search adds up. A collective of one operand's gradient then begins after both, and less computing hides
collectives: so gradients are tied only in plans that might not fit otherwise (`LATE_OVERHEAD`).

The barrier is in the tangents, which are linear in both modes of differentiation: the forward mode and further derivatives remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from unity.pcg.ir.graph import Node
from unity.pcg.types.factors import facts_of
from unity.pcg.types.varying_axes import varying

# Memory of a program for GPUs whose gradients are late, in times of what is predicted: 1.52 at most of 60 plans of 20 networks.
LATE_OVERHEAD = 1.6


def with_tied_gradients(node: Node, operands: Sequence[Any]) -> list[Any]:
    """Return the operands of an operator unchanged. Where it is a product, their gradients are computed together."""
    floating = [k for k, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]
    result = list(operands)
    if len(floating) > 1 and _contains_product(node):
        for k, x in zip(floating, tied(*(operands[k] for k in floating)), strict=True):
            result[k] = x
    return result


@jax.custom_jvp
def tied(*operands: Any) -> tuple[Any, ...]:
    """Return values unchanged. Their cotangents, and their tangents, are all computed before any of them is used.

    That is so for those that vary along the same mesh axes, as the operands of a product do.
    """
    return operands


def _tangents(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    result = list(tangents)
    changing = [k for k, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
    if len(changing) > 1 and len({varying(tangents[k]) for k in changing}) == 1:  # JAX 0.10 has no barrier over others
        for k, t in zip(changing, lax.optimization_barrier([tangents[k] for k in changing]), strict=True):
            result[k] = t
    return primals, tuple(result)


tied.defjvp(_tangents, symbolic_zeros=True)


def _contains_product(node: Node) -> bool:
    return node.body is not None and any(facts_of(e.name).product for e in node.body.equations)
