"""Ragged products whose dimensions are Python integers.

JAX's batching rule numbers dimensions by NumPy's integers, which JAX's own program of a ragged product refuses where there are two
batches: those of a user's `vmap` inside of a `shard_map`, whose devices are another one here, or of two `vmap`s.
"""

from __future__ import annotations

from typing import Any

from jax import lax
from jax.extend import core

from unity.pcg.jaxprs.jaxprs import with_equations, with_nested

RAGGED = "ragged_dot_general"
NUMBERS = "ragged_dot_dimension_numbers"


def with_plain_dimensions(program: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Number the dimensions of every ragged product of a program, in nested programs too, by Python integers."""
    return with_equations(program, _with_plain_dimensions)


def _with_plain_dimensions(eqn: core.JaxprEqn) -> core.JaxprEqn:
    if eqn.primitive.name != RAGGED:
        return with_nested(eqn, _with_plain_dimensions)
    numbers = eqn.params[NUMBERS]
    plain = lax.RaggedDotDimensionNumbers(
        _plain(numbers.dot_dimension_numbers), _plain(numbers.lhs_ragged_dimensions), _plain(numbers.rhs_group_dimensions)
    )
    return eqn.replace(params={**eqn.params, NUMBERS: plain})


def _plain(dimensions: Any) -> Any:
    """Return nested sequences of integers as tuples of Python integers."""
    return tuple(map(_plain, dimensions)) if isinstance(dimensions, tuple | list) else int(dimensions)
