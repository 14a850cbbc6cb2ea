"""Elementwise functions of one tensor, named so that two equations of the same function have equal names."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import jax
import numpy as np

from unity.pcg.ir.program import Equation, Literal
from unity.pcg.ir.tracing import trace
from unity.pcg.types.factors import facts_of
from unity.pcg.types.parallel_type import Shape

NAMED = {"tanh": "tanh", "logistic": "sigmoid"}  # names in the vocabulary of the rules
DERIVED = "custom_jvp_call"


def pointwise(e: Equation) -> str | None:
    """Return the name of the elementwise function of one tensor that an equation computes; None for any other equation."""
    if sum(isinstance(a, int) for a in e.operands) != 1 or len(e.results) != 1:
        return None
    literals = [a for a in e.operands if isinstance(a, Literal)]
    if any(prod(a.tensor.shape) != 1 for a in literals):
        return None
    if e.name == DERIVED:
        return "relu" if _is_relu(e) else None
    if not facts_of(e.name).pointwise:
        return None
    if e.name in NAMED and e.params.get("accuracy") is None:
        return NAMED[e.name]
    arguments = [str(np.asarray(a.value).item()) if isinstance(a, Literal) else "x" for a in e.operands]
    return f"{e.signature.strip()}({', '.join(arguments)})"


def _is_relu(e: Equation) -> bool:
    """Return whether an equation is `jax.nn.relu`, including its derivative."""
    if e.origin is None or len(e.operands) != 1:
        return False
    aval: Any = e.origin.invars[0].aval
    return replace(e, inactive=()).signature == _relu_signature(aval.shape, aval.dtype)


@lru_cache(maxsize=4096)
def _relu_signature(shape: Shape, dtype: Any) -> str:
    """Return the signature of `jax.nn.relu` for one type."""
    (e,) = trace(jax.nn.relu, [jax.ShapeDtypeStruct(shape, dtype)]).equations
    return e.signature
