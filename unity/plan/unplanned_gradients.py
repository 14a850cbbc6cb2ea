"""Refusal of gradients that a plan leaves out: those of arguments that it was not made to differentiate.

A plan has the gradients of all real arguments, except where a transformation leaves out what only others need: what the first stage
of a pipeline would send back, say. Without an error they would be zero.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from unity.base.errors import PlanError


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def without_gradient(x: Any, what: str) -> Any:
    """Return an argument unchanged; raise PlanError where it is differentiated, with a message that begins by `what`."""
    return x


@partial(without_gradient.defjvp, symbolic_zeros=True)
def _tangent(what: str, primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        raise PlanError(
            f"{what} is differentiated, but the plan was made for the gradients of other arguments alone, and its pipeline or its"
            " micro-batches leave this one out.\n"
            "    Name it in argnums= of unity.optimize, or leave that option out. (docs: plan#derivatives)"
        )
    return primals[0], jnp.zeros_like(primals[0])
